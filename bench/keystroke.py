"""From a key to ghost text: real files typed character by character, beside llama.cpp with the same weights.

Regime: files of projects that no model here was trained on (bench/data); each is opened with a part missing,
which is then typed with a human rhythm (log-normal gaps around 140 ms, longer at words and lines; seeded).
Enter brings the next line's indentation along, as in editors. A suggestion that is right to the end of its
line is taken with Tab half of the time, and typed through the other half. The whole program takes part: the
gateway in a process of its own with the embedded model, reached as editors reach it, over `--transport lsp`
(the language server on stdio) or `live` (the WebSocket under it). After each key the change and a request go
out together; the clock stops when the suggestion is back. A key whose answer is still open when the next one
comes got none. Files are typed until the time is used up (`--seconds`, in which llama.cpp has its share);
starting the programs and warming each file are counted apart.

  p50_ms, p95_ms     key to ghost text, suggestions of a line that had to be computed (also those whose
                     computing an earlier key began); *_interval: 95 %, by bootstrap over the keys
  answer_p50_ms ...  key to answer, all lines that had to be computed, also those then held back
  typed_through_ms   p50 where the key agrees with what is shown, so that nothing is computed
  reuse_share        prompt tokens whose KV was there already, over all keys that computed
  chars_saved        share of characters that right suggestions typed or would have typed, at one key each
  infill_p50_ratio   llama.cpp's p50 over ours at the very places we computed a shown line for, as its
                     /infill is out of the box
  infill_spm_p50_ratio   the same with its option that puts the suffix first, for models that know it so:
                     then it too computes only what a key added
  start_s, open_ms   until the first answer of the editor's program; until a file opened is warm, p50

llama.cpp takes part through `llama-cpp-python`, in this process and without HTTP, an advantage over its
`/infill` server for one client. Same weights as GGUF (the faster of Q4_0 and Q8_0 on the
first file), all cores, greedy, its prompt cache on (the longest common prefix of tokens stays in the KV
cache), prefix, suffix, middle as its template has them (the prefix alone for a model that knows no such
order), up to the end of the line. It runs alone on the machine, after ours on each file.
Ceiling: a line of ten tokens cannot come sooner than ten decode steps; on two cores that is 70 to 90 ms for a
model of 135M parameters at four bits.

With `--confirm MODEL` it measures a larger model beside the small one instead (`bench/combined_models.py`).

    make bench-keystroke ARGS="[--transport live|lsp] [--seconds N] [--model NAME] [--no-peer]"
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.combined_models import TwoMinds
from bench.llama_file import llama_files
from bench.record import record
from bench.typing_editors import EditorAnswer, EditorTransport, LiveTransport, LspTransport, gateway
from keystroke.config import load_settings
from keystroke.engine.fim import detect_fim
from keystroke.engine.locate import resolve
from keystroke.engine.tokenizer import load_tokenizer
from keystroke.errors import KeystrokeError
from keystroke.text import Edit
from keystroke.text.cases import CompletionCase, read_cases

CASES = Path(__file__).parent / "data" / "completion.jsonl.xz"
LEAD = 60  # characters of the text before the cut that are typed too: people do not begin at the cut
LINE_TOKENS = 48
SHARE = 0.25  # of the time is llama.cpp's
READING = 0.3  # seconds to see that a suggestion is right
SPM = "--spm-infill"
OVERTAKEN = "overtaken by the next key"


@dataclass(slots=True)
class CompletionPlace:
    prefix: str
    suffix: str
    ms: float


@dataclass(slots=True)
class Measured:
    computed: list[float] = field(default_factory=list)  # and shown
    answered: list[float] = field(default_factory=list)  # computed, shown or not
    through: list[float] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    prompt: int = 0
    reused: int = 0
    keys: int = 0
    taken: int = 0
    characters: int = 0
    saved: int = 0

    def note(self, answer: EditorAnswer, ms: float) -> None:
        if answer.prompt:
            self.prompt += answer.prompt
            self.reused += answer.reused
        if answer.source in ("computed", "continued") and answer.prompt:
            self.answered.append(ms)
        if not answer.text:
            self.outcomes[answer.reason or "nothing shown"] += 1
            return
        self.outcomes[f"shown, {answer.source}"] += 1
        if answer.source in ("typed_through", "cached"):
            self.through.append(ms)
        elif "\n" not in answer.text:
            self.computed.append(ms)


class Typist:
    """Types the missing part of one case; keeps the places where a line was computed and shown."""

    def __init__(
        self, transport: EditorTransport, case: CompletionCase, seed: int, measured: Measured, hurried: bool
    ) -> None:
        lead = min(LEAD, len(case.prefix))
        self.before = case.prefix[: len(case.prefix) - lead]
        self.after = case.suffix
        self.wanted = case.prefix[len(case.prefix) - lead :] + case.middle
        self.places: list[CompletionPlace] = []
        self._transport, self._measured, self._hurried = transport, measured, hurried
        self._rng = random.Random(seed)
        self._name = f"case_{seed}.py"
        self._version = 0
        self._covered = 0

    async def type(self, until: float) -> None:
        """Until all of it stands there, or the time is over."""
        transport, measured = self._transport, self._measured
        began = time.perf_counter()
        await transport.open(self._name, self.before + self.after, len(self.before))
        measured.opened.append((time.perf_counter() - began) * 1e3)
        at, piece = 0, self._key(0)
        while piece and time.monotonic() < until:
            asked = asyncio.create_task(self._ask(at, piece))
            at += len(piece)
            piece = await self._next(asked, at)
        measured.characters += at
        await transport.close(self._name)

    async def _ask(self, at: int, piece: str) -> tuple[EditorAnswer, float]:
        self._version += 1
        self._measured.keys += 1
        start = len(self.before) + at
        began = time.perf_counter()
        answer = await self._transport.key(
            self._name, self._version, Edit(start, start, piece), start + len(piece)
        )
        return answer, (time.perf_counter() - began) * 1e3

    async def _next(self, asked: asyncio.Task[tuple[EditorAnswer, float]], at: int) -> str:
        """Wait as long as a person does before the next key, and say what that key puts there."""
        gap = self._pause(at)
        done, _ = await asyncio.wait({asked}, timeout=gap if self._hurried else None)
        sign = self._key(at)
        if not done:
            self._measured.outcomes[OVERTAKEN] += 1
            asked.add_done_callback(lambda task: task.cancelled() or task.exception())
            return sign
        answer, ms = asked.result()
        answer = await self._transport.report_answer(self._name, answer)
        self._measured.note(answer, ms)
        if answer.text and answer.source in ("computed", "continued") and "\n" not in answer.text:
            self.places.append(CompletionPlace(self.before + self.wanted[:at], self.after, ms))
        line = answer.text.partition("\n")[0]
        if line and self.wanted.startswith(line, at):
            if at >= self._covered:
                self._measured.saved += len(line) - 1
                self._covered = at + len(line)
            if len(line) > 2 and self._rng.random() < 0.5:
                self._measured.taken += 1
                await asyncio.sleep(READING)
                return line
        await asyncio.sleep(max(0.0, gap - ms / 1e3))
        return sign

    def _key(self, at: int) -> str:
        """What the next key puts there: one character, or with Enter the indentation that editors add."""
        end = at + 1
        if self.wanted[at:end] == "\n":
            while self.wanted[end : end + 1] in (" ", "\t"):
                end += 1
        return self.wanted[at:end]

    def _pause(self, at: int) -> float:
        """Seconds before a key, as a practised person types."""
        before, sign = self.wanted[at - 1 : at], self.wanted[at : at + 1]
        gap = self._rng.lognormvariate(-1.97, 0.35)
        if before.isspace() and not sign.isspace():
            gap += self._rng.uniform(0.0, 0.25)
        if sign == "\n":
            gap += self._rng.uniform(0.1, 0.5)
        return gap


class InfillPeer:
    """What llama.cpp's /infill does for one client: its template, its prompt cache, greedy, one line."""

    def __init__(self, path: Path, tokenizer_path: Path, order: str) -> None:
        from llama_cpp import Llama

        threads = os.cpu_count() or 2
        self._model = Llama(str(path), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._fim = detect_fim(self._tokenizer)
        self._order = order

    def line(self, prefix: str, suffix: str) -> float:
        """Milliseconds to the end of the line."""
        began = time.perf_counter()
        tokenizer = self._tokenizer
        if self._fim is None:
            tokens = tokenizer.encode(prefix)
        else:
            before, after, middle = (
                tokenizer.encode(t, special=True)
                for t in (self._fim.prefix, self._fim.suffix, self._fim.middle)
            )
            above = [*before, *tokenizer.encode(prefix)]
            below = [*after, *tokenizer.encode(suffix)]
            tokens = [*above, *below, *middle] if self._order == "psm" else [*below, *above, *middle]
        stops = self._fim.stops if self._fim is not None else frozenset()
        for count, token in enumerate(self._model.generate(tokens, top_k=1, temp=0.0, repeat_penalty=1.0)):
            ended = token == self._model.token_eos() or token in stops
            if ended or count + 1 >= LINE_TOKENS or b"\n" in tokenizer.token_bytes(token):
                break
        return (time.perf_counter() - began) * 1e3


class Peers:
    """llama.cpp at the places where ours was measured, within its share of the time."""

    def __init__(self, others: dict[str, InfillPeer], seconds: float) -> None:
        self._others, self._left = others, seconds
        self.theirs: dict[str, list[float]] = {name: [] for name in others}
        self.ours: list[float] = []

    def compare(self, case: CompletionCase, places: Sequence[CompletionPlace]) -> None:
        """The same places, in the order they were typed; the file is in their cache first, as it was in
        ours."""
        if not places or self._left <= 0 or not self._others:
            return
        began = time.monotonic()
        for name, other in self._others.items():
            other.line(case.prefix[: max(1, len(case.prefix) - LEAD)], case.suffix)
            self.theirs[name] += [other.line(place.prefix, place.suffix) for place in places]
        if not self.ours:
            self._keep_the_faster()
        self.ours += [place.ms for place in places]
        self._left -= time.monotonic() - began

    def _keep_the_faster(self) -> None:
        for spm in (False, True):
            rivals = [name for name in self._others if (SPM in name) is spm]
            for name in sorted(rivals, key=lambda one: median(self.theirs[one]))[1:]:
                del self._others[name], self.theirs[name]

    def best(self, spm: bool) -> list[float]:
        return next((times for name, times in self.theirs.items() if (SPM in name) is spm and times), [])


def peers(model: Path, cache: Path) -> dict[str, InfillPeer]:
    """llama.cpp with the same weights, or nothing where it is not installed or has no such file."""
    gguf = model if model.suffix == ".gguf" else next(iter(sorted(model.glob("*.gguf"))), None)
    if gguf is None:
        print(f"{model.name} has no GGUF file beside it: no llama.cpp in this run")
        return {}
    try:
        files = llama_files(gguf, cache)
    except ImportError:
        print("llama-cpp-python is not installed: no llama.cpp in this run (pip install llama-cpp-python)")
        return {}
    fim = detect_fim(load_tokenizer(model), model)
    found = {}
    for name, file in files.items():
        found[f"llama.cpp {name}"] = InfillPeer(file, model, "psm")
        if fim is not None and fim.order == "spm":
            found[f"llama.cpp {name} {SPM}"] = InfillPeer(file, model, "spm")
    return found


def quantile(values: Sequence[float], q: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


def interval(count: int, figure: Callable[[Sequence[int]], float | None]) -> list[float] | None:
    """Where the figure lies 95 times in 100, by resampling the `count` observations it is made of."""
    if count < 5:
        return None
    rng = random.Random(0)
    drawn = [figure(rng.choices(range(count), k=count)) for _ in range(1000)]
    sound = sorted(value for value in drawn if value is not None)
    return [round(sound[int(0.025 * len(sound))], 2), round(sound[int(0.975 * len(sound)) - 1], 2)]


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float | None, list[float] | None]:
    """Their p50 over ours at the same places, and its interval."""
    if not theirs:
        return None, None

    def figure(drawn: Sequence[int]) -> float:
        return median(theirs[i] for i in drawn) / median(ours[i] for i in drawn)

    return rounded(median(theirs) / median(ours)), interval(len(theirs), figure)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    settings = load_settings({}, Path.cwd())
    path = resolve(options.model or settings.model.default, settings)
    others = {} if options.no_peer else peers(path, settings.paths.cache / "bench")
    compared = Peers(others, SHARE * options.seconds)
    cases = [c for c in read_cases(CASES) if c.kind == "block" and len(c.middle) >= 80]
    random.Random(options.seed).shuffle(cases)
    measured = Measured()
    files = 0
    began = time.monotonic()
    async with gateway(options.model) as url:
        transport: Any = LiveTransport(url) if options.transport == "live" else LspTransport(url, Path.cwd())
        await transport.start()
        started = time.monotonic() - began
        until = time.monotonic() + options.seconds
        try:
            for number, case in enumerate(cases):
                if time.monotonic() >= until:
                    break
                files += 1
                typist = Typist(transport, case, number, measured, not options.patient)
                await typist.type(until)
                compared.compare(case, typist.places)
        finally:
            await transport.stop()
    print(f"{measured.keys} keys over {options.transport}, {files} files, {path.name}")
    for outcome, count in measured.outcomes.most_common():
        print(f"  {count:5d}  {outcome}")
    for name, values in compared.theirs.items():
        if values:
            here = f"p50 {median(values):.1f} ms at the {len(values)} places"
            print(f"  {name}: {here} where ours took {median(compared.ours[: len(values)]):.1f} ms")
    return {"model": path.stem, "transport": options.transport, **figures(measured, compared, started, files)}


async def confirm(options: argparse.Namespace) -> dict[str, Any]:
    """The small model with a larger one beside it, then the larger one alone at the same places."""
    settings = load_settings({}, Path.cwd())
    larger = resolve(options.confirm, settings)
    cases = [c for c in read_cases(CASES) if c.kind == "rest_of_line" and len(c.middle.strip()) >= 4]
    random.Random(options.seed).shuffle(cases)
    async with gateway(options.model, larger) as url:
        measured = await TwoMinds(url, "larger").measure(cases, 0.7 * options.seconds)
    async with gateway(str(larger)) as url:
        alone = await TwoMinds(url, None).measure(cases[: len(measured.exact)], 0.3 * options.seconds)
    found = {**measured.summary(), **alone.alone()}
    for key, value in found.items():
        print(f"  {key:20}{value}")
    return {"model": options.model or "embedded", "larger": larger.stem, "transport": "live", **found}


def figures(measured: Measured, compared: Peers, started: float, files: int) -> dict[str, Any]:
    computed = measured.computed
    out_of_the_box, box_interval = ratio(compared.best(spm=False), compared.ours)
    suffix_first, spm_interval = ratio(compared.best(spm=True), compared.ours)
    return {
        "files": files,
        "keys": measured.keys,
        "characters": measured.characters,
        "computed": len(computed),
        "answered": len(measured.answered),
        "typed_through": len(measured.through),
        "taken": measured.taken,
        "overtaken": measured.outcomes[OVERTAKEN],
        "p50_ms": rounded(quantile(computed, 0.5)),
        "p50_interval": interval(len(computed), lambda drawn: quantile([computed[i] for i in drawn], 0.5)),
        "p95_ms": rounded(quantile(computed, 0.95)),
        "p95_interval": interval(len(computed), lambda drawn: quantile([computed[i] for i in drawn], 0.95)),
        "answer_p50_ms": rounded(quantile(measured.answered, 0.5)),
        "answer_p95_ms": rounded(quantile(measured.answered, 0.95)),
        "typed_through_ms": rounded(quantile(measured.through, 0.5)),
        "typed_through_p95_ms": rounded(quantile(measured.through, 0.95)),
        "compared": len(compared.ours),
        "infill_p50_ms": rounded(quantile(compared.best(spm=False), 0.5)),
        "infill_p50_ratio": out_of_the_box,
        "infill_p50_ratio_interval": box_interval,
        "infill_spm_p50_ms": rounded(quantile(compared.best(spm=True), 0.5)),
        "infill_spm_p50_ratio": suffix_first,
        "infill_spm_p50_ratio_interval": spm_interval,
        "reuse_share": rounded(measured.reused / measured.prompt, 4) if measured.prompt else None,
        "chars_saved": rounded(measured.saved / measured.characters, 4) if measured.characters else None,
        "start_s": rounded(started),
        "open_ms": rounded(quantile(measured.opened, 0.5), 0),
    }


def rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=("live", "lsp"), default="lsp")
    parser.add_argument("--model", help="what the gateway serves; default: the settings' own")
    parser.add_argument("--seconds", type=float, default=225.0, help="for typing and llama.cpp together")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--patient", action="store_true", help="wait for each answer before the next key")
    parser.add_argument("--confirm", metavar="MODEL", help="measure with this larger model beside it")
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    try:
        options = parser.parse_args()
        record("keystroke", asyncio.run((confirm if options.confirm else run)(options)))
    except KeystrokeError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
