"""From a key to painted ghost text in the playground, beside the language server on the same keys.

Regime: the gateway in a process of its own with the embedded model, the page in a headless Chromium. The
files of `bench/keystroke.py` are typed by its typist, once over the language server and once in the page,
file by file in turn; each is opened with its end missing, which is then typed with a human rhythm, and each
answer is waited for. In the page a key counts from its event's own time stamp to after the frame that shows
the ghost text (the page's own User Timing measures); over the language server from the write to the answer,
without any drawing: an editor would add its own. `first_paint_ms` is the browser's own first contentful
paint of a fresh profile, from the address being entered.

  key_to_paint_p50_ms, _p95_ms   keys whose ghost text had to be computed
  lsp_p50_ms, lsp_p95_ms         the same typist's keys over the language server
  same_keys                      keys that both computed, with the same answer; over these, medians of:
  over_lsp_ms                      page less language server; the aim is at most 15
  computing_over_lsp_ms            of that, the gateway's own time: a browser draws on its cores
  own_ms, lsp_own_ms               what is not the gateway's, in the page and over the language server
  input_p50_ms                   from the key to the change on the wire
  network_p50_ms                 there and back, less the server's own time
  script_p50_ms, frame_p50_ms    from the answer to the changed document; on to after its frame
  kept_p50_ms                    keys that agree with what is shown: only drawing lies between
  browser_cpu_ms                 processor time of the browser, a key: what a model on the same cores lacks
  bundle_kb, packed_kb           what a browser loads, plain and as it travels (gzip)

Ceiling: a display of 60 frames a second shows a change 8 ms after it was made in the mean, 17 at most.

    make bench-page ARGS="[--seconds N] [--model NAME]"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.browser import FLAGS, chromium, reason_why_not
from bench.keystroke import CASES, Measured, Typist, quantile, rounded
from bench.record import record
from bench.typing_editors import EditorAnswer, LspTransport, gateway
from keystroke.text import Edit
from keystroke.text.cases import read_cases

PARTS = ("input_ms", "network", "script_ms", "frame_ms")
Kept = dict[tuple[str, int], tuple[EditorAnswer, float]]
PAGE = Path(__file__).parents[1] / "src" / "keystroke" / "gateway" / "page"
# The page's own measures are waited for, not polled: what looks every few milliseconds is itself in the way.
_LISTEN = """() => {
  const told = [], waiting = [];
  window.nextMeasure = () => told.length ? Promise.resolve(told.shift())
    : new Promise((resolve) => { waiting.push(resolve); setTimeout(() => resolve(null), 4000); });
  new PerformanceObserver((list) => {
    for (const e of list.getEntries()) {
      if (!e.name.startsWith("key-to-")) continue;
      const ghost = [...document.querySelectorAll(".ghost")].map((g) => g.textContent).join("\\n");
      const one = { ms: e.duration, shown: e.name === "key-to-paint", ghost, ...e.detail };
      const next = waiting.shift();
      if (next) next(one); else told.push(one);
    }
  }).observe({ entryTypes: ["measure"] });
}"""


class PageTransport:
    """An editor that is the playground in a browser's tab."""

    def __init__(self, page: Any) -> None:
        self._page = page
        self.ms = 0.0
        self.parts: dict[str, list[float]] = {part: [] for part in PARTS}

    async def start(self, url: str) -> None:
        await self._page.goto(url)
        await self._page.wait_for_selector("#state[data-state=open]")
        await self._page.evaluate(_LISTEN)

    async def open(self, name: str, text: str, cursor: int) -> None:
        page = self._page
        await page.set_input_files("#file", {"name": name, "mimeType": "text/plain", "buffer": text.encode()})
        await page.wait_for_function("n => document.getElementById('file-name').value === n", arg=name)
        await page.locator(".cm-content").focus()
        await page.keyboard.press("Control+End")
        await asyncio.sleep(1.0)  # the context is warmed

    async def key(self, name: str, version: int, edit: Edit, cursor: int) -> EditorAnswer:
        if len(edit.text) == 1 and edit.text.isprintable():
            await self._page.keyboard.type(edit.text)
        else:
            await self._page.keyboard.insert_text(edit.text)
        told = await self._page.evaluate("nextMeasure()")
        if told is None:
            self.ms = 0.0
            return EditorAnswer("", "", "no answer within 4 s")
        self.ms = told["ms"]
        source = "typed_through" if told["source"] == "kept" else told["source"]
        if not told["shown"]:
            return EditorAnswer("", source, "held back", 1, 0)
        if source in ("computed", "continued"):
            for part in PARTS:
                self.parts[part].append(told[part])
        return EditorAnswer(told["ghost"], source, "", 1, 0, told["server_ms"])

    async def report_answer(self, name: str, answer: EditorAnswer) -> EditorAnswer:
        return answer

    async def close(self, name: str) -> None:
        """The next file takes its place."""


class KeptTypist(Typist):
    """Remembers what each key came to, by its place, so that the same key can be compared."""

    kept: dict[tuple[str, int], tuple[EditorAnswer, float]]

    async def _next(self, asked: asyncio.Task[tuple[EditorAnswer, float]], at: int) -> str:
        answer, ms = await asked
        answer = await self._transport.report_answer(self._name, answer)
        if answer.text and answer.source in ("computed", "continued"):
            self.kept[self._name, at] = (answer, ms)
        return await super()._next(asked, at)


class PageTypist(KeptTypist):
    """Types in the page; the page's own clock counts."""

    async def _ask(self, at: int, piece: str) -> tuple[EditorAnswer, float]:
        answer, _ = await super()._ask(at, piece)
        transport = self._transport
        assert isinstance(transport, PageTransport)
        return answer, transport.ms


async def first_paint(browser: Any, url: str) -> float:
    """Milliseconds to the first contentful paint, a fresh profile each time; the median of five."""
    seen: list[float] = []
    for _ in range(5):
        room = await browser.new_context()
        page = await room.new_page()
        await page.goto(url)
        await page.wait_for_selector("#state[data-state=open]")
        seen.append(
            await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        )
        await room.close()
    return median(seen)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    from playwright.async_api import async_playwright

    cases = [c for c in read_cases(CASES) if c.kind == "block" and len(c.middle) >= 80]
    random.Random(options.seed).shuffle(cases)
    in_page, over_lsp = Measured(), Measured()
    ours: Kept = {}
    theirs: Kept = {}
    async with gateway(options.model) as url, async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium(), args=FLAGS)
        lsp = LspTransport(url, Path.cwd())
        await lsp.start()
        try:
            painted = await first_paint(browser, url)
            transport = PageTransport(await browser.new_page())
            await transport.start(url)
            spent = 0.0
            until = time.monotonic() + options.seconds
            for number, case in enumerate(cases):
                if time.monotonic() >= until:
                    break
                share = (until - time.monotonic()) / 2
                for typist, kept in (
                    (KeptTypist(lsp, case, number, over_lsp, False), theirs),
                    (PageTypist(transport, case, number, in_page, False), ours),
                ):
                    typist.kept = kept
                    before = browser_cpu()
                    await _typed(typist, min(share, 15.0))
                    spent += browser_cpu() - before if kept is ours else 0.0
        finally:
            await lsp.stop()
            await browser.close()
    return {
        **figures(in_page, over_lsp, painted),
        **compared(ours, theirs),
        **parts(transport.parts),
        "browser_cpu_ms": rounded(spent * 1e3 / max(1, in_page.keys), 1),
    }


def browser_cpu() -> float:
    """Seconds of processor time that the browser's processes have taken so far."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "chrom" in process.name():
                told = process.cpu_times()
                used += told.user + told.system
    return used


async def _typed(typist: Typist, seconds: float) -> None:
    typist.after = ""  # in the page the cursor is at the end; so it is in both
    await typist.type(time.monotonic() + seconds)


def compared(ours: Kept, theirs: Kept) -> dict[str, Any]:
    """The same keys with the same answers, in the page and over the language server."""
    same = [key for key in ours if key in theirs and ours[key][0].text == theirs[key][0].text]
    over = [ours[key][1] - theirs[key][1] for key in same]
    computing = [ours[key][0].server_ms - theirs[key][0].server_ms for key in same]
    own = [ours[key][1] - ours[key][0].server_ms for key in same]
    own_lsp = [theirs[key][1] - theirs[key][0].server_ms for key in same]
    return {
        "same_keys": len(same),
        "over_lsp_ms": rounded(quantile(over, 0.5)),
        "computing_over_lsp_ms": rounded(quantile(computing, 0.5)),
        "own_ms": rounded(quantile(own, 0.5)),
        "lsp_own_ms": rounded(quantile(own_lsp, 0.5)),
    }


def parts(spent: dict[str, list[float]]) -> dict[str, Any]:
    return {f"{part.removesuffix('_ms')}_p50_ms": rounded(quantile(spent[part], 0.5)) for part in PARTS}


def figures(in_page: Measured, over_lsp: Measured, painted: float) -> dict[str, Any]:
    bodies = [(PAGE / name).read_bytes() for name in ("index.html", "app.css", "app.js")]
    ours, theirs = quantile(in_page.computed, 0.5), quantile(over_lsp.computed, 0.5)
    return {
        "keys": in_page.keys,
        "computed": len(in_page.computed),
        "key_to_paint_p50_ms": rounded(ours),
        "key_to_paint_p95_ms": rounded(quantile(in_page.computed, 0.95)),
        "kept_p50_ms": rounded(quantile(in_page.through, 0.5)),
        "lsp_computed": len(over_lsp.computed),
        "lsp_p50_ms": rounded(theirs),
        "lsp_p95_ms": rounded(quantile(over_lsp.computed, 0.95)),
        "lsp_typed_through_p50_ms": rounded(quantile(over_lsp.through, 0.5)),
        "first_paint_ms": rounded(painted, 0),
        "bundle_kb": rounded(sum(map(len, bodies)) / 1024, 1),
        "packed_kb": rounded(sum(len(gzip.compress(body)) for body in bodies) / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="what the gateway serves; default: the settings' own")
    parser.add_argument("--seconds", type=float, default=120.0, help="for typing in both together")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    if (why := reason_why_not()) is not None:
        sys.exit(why)
    measured = asyncio.run(run(options))
    for name, value in measured.items():
        print(f"  {name:26} {value}")
    record("page", measured)


if __name__ == "__main__":
    main()
