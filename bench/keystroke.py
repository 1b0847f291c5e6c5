"""From a key to ghost text: real files typed character by character, beside llama.cpp with the same weights.

Regime: files of projects that no model here was trained on (bench/data); each is opened with a part missing,
which is then typed with a human rhythm (log-normal gaps around 140 ms, longer at words and lines; seeded).
The whole program takes part: the gateway in a process of its own with the embedded model, reached as editors
reach it, over `--transport lsp` (the language server on stdio) or `live` (the WebSocket under it, which also
says where the time went). After each key the change and a request go out together; the clock stops when the
suggestion is back. A key whose answer is still open when the next one comes got none.

  p50_ms, p95_ms     key to ghost text, suggestions of a line that had to be computed (also those whose
                     computing an earlier key began)
  typed_through_ms   p50 where the key agrees with what is shown, so that nothing is computed
  reuse_share        prompt tokens whose KV was there already, over all keys that computed (over lsp: over all
                     that the gateway computed while keys were typed, preparations and what was overtaken too)
  chars_saved        share of typed characters that right suggestions would have typed, at one key each
  infill_p50_ratio   llama.cpp's p50 over ours at the very places we computed a shown line for, as its
                     /infill is out of the box
  infill_spm_p50_ratio   the same with its option that puts the suffix first, for models that know it so:
                     then it too computes only what a key added

llama.cpp takes part through `llama-cpp-python`, in this process and without HTTP, which flatters it: what its
`/infill` server does for one client, less the wire. Same weights as GGUF (the faster of Q4_0 and Q8_0), all
cores, greedy, its prompt cache on (the longest common prefix of tokens stays in the KV cache), prefix,
suffix, middle as its template has them (the prefix alone for a model that knows no such order), up to the end
of the line. It has the machine to itself, after ours on each file.
Ceiling: a line of ten tokens cannot come sooner than ten decode steps; on two cores that is 70 to 90 ms for a
model of 135M parameters at four bits.

    python bench/keystroke.py [--transport live|lsp] [--cases N] [--keys N] [--model NAME] [--no-peer]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

# A neighbour is called cuda.py, and torch imports a package of that name: do not search this folder.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from keystroke.clients.live import LiveClient  # noqa: E402
from keystroke.config import load_settings  # noqa: E402
from keystroke.engine.fim import detect_fim  # noqa: E402
from keystroke.engine.locate import resolve  # noqa: E402
from keystroke.engine.tokenizer import load_tokenizer  # noqa: E402
from keystroke.errors import KeystrokeError  # noqa: E402
from keystroke.protocol import live  # noqa: E402
from keystroke.text import Document, Edit  # noqa: E402
from keystroke.train.cases import Case, read_cases  # noqa: E402

CASES = Path(__file__).parent / "data" / "completion.jsonl.xz"
PROGRAM = str(Path(sys.executable).with_name("keystroke"))
LEAD = 60  # characters of the text before the cut that are typed too: people do not begin at the cut
LINE_TOKENS = 48
SPM = "--spm-infill"
OVERTAKEN = "overtaken by the next key"


@dataclass(slots=True)
class Answer:
    """What came back for one key. `source` as in the receipt."""

    text: str = ""
    source: str = ""
    reason: str = ""
    extent: str = ""
    prompt: int = 0
    reused: int = 0


class Transport(Protocol):
    tells: bool  # whether answers say how many tokens were reused

    async def open(self, name: str, text: str) -> None: ...

    async def key(self, name: str, version: int, edit: Edit, cursor: int) -> Answer: ...

    async def close(self, name: str) -> None: ...


class LiveTransport:
    tells = True

    def __init__(self, url: str) -> None:
        self._ready: dict[str, asyncio.Event] = {}
        self._client = LiveClient(url, on_event=self._heard)

    async def start(self) -> None:
        await self._client.start()

    async def stop(self) -> None:
        await self._client.stop()

    async def open(self, name: str, text: str) -> None:
        self._ready[name] = asyncio.Event()
        self._client.open(name, text, path=name, language="python")
        await self._ready[name].wait()

    async def key(self, name: str, version: int, edit: Edit, cursor: int) -> Answer:
        self._client.change(name, version, [edit], cursor)
        answer = await self._client.complete(name, cursor)
        paid = answer.receipt
        if isinstance(answer, live.Suggestion):
            return Answer(answer.text, paid.source, "", answer.extent, paid.prompt_tokens, paid.reused_tokens)
        return Answer("", paid.source, answer.reason, "", paid.prompt_tokens, paid.reused_tokens)

    async def close(self, name: str) -> None:
        self._client.close(name)

    def _heard(self, event: live.LiveEvent) -> None:
        if isinstance(event, live.Ready) and event.buffer in self._ready:
            self._ready[event.buffer].set()


class LspTransport:
    """An editor: the language server as a child, JSON-RPC over its pipes."""

    tells = False

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._documents: dict[str, Document] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            PROGRAM, "lsp", "--gateway", self._url, stdin=pipe, stdout=pipe
        )
        self._reading = asyncio.create_task(self._read())
        capabilities: dict[str, Any] = {"textDocument": {"inlineCompletion": {}}}
        await self._ask(
            "initialize",
            {"processId": os.getpid(), "rootUri": self._folder.as_uri(), "capabilities": capabilities},
        )
        self._tell("initialized", {})

    async def stop(self) -> None:
        assert self._process is not None
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._ask("shutdown", None), 5)
            self._tell("exit", None)
            await asyncio.wait_for(self._process.wait(), 5)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        if self._reading is not None:
            self._reading.cancel()

    async def open(self, name: str, text: str) -> None:
        self._documents[name] = Document(text)
        item = {"uri": self._uri(name), "languageId": "python", "version": 0, "text": text}
        self._tell("textDocument/didOpen", {"textDocument": item})
        await asyncio.sleep(3.0)  # an editor is not told when the context is warm

    async def key(self, name: str, version: int, edit: Edit, cursor: int) -> Answer:
        before = self._documents[name]
        after = self._documents[name] = before.apply([edit])
        span = {"start": _place(before, edit.start), "end": _place(before, edit.end)}
        document = {"uri": self._uri(name), "version": version}
        change = {"textDocument": document, "contentChanges": [{"range": span, "text": edit.text}]}
        self._tell("textDocument/didChange", change)
        asked = {
            "textDocument": {"uri": self._uri(name)},
            "position": _place(after, cursor),
            "context": {"triggerKind": 2},
        }
        found = await self._ask("textDocument/inlineCompletion", asked)
        items = found.get("items", []) if isinstance(found, dict) else found or []
        if not items:
            return Answer()
        said = (items[0].get("command") or {}).get("arguments") or []
        return Answer(items[0]["insertText"], said[2] if len(said) > 2 else "")

    async def close(self, name: str) -> None:
        self._tell("textDocument/didClose", {"textDocument": {"uri": self._uri(name)}})

    def _uri(self, name: str) -> str:
        return (self._folder / name).as_uri()

    def _tell(self, method: str, params: Any) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    async def _ask(self, method: str, params: Any) -> Any:
        self._count += 1
        answer = self._asked[self._count] = asyncio.get_running_loop().create_future()
        self._write({"jsonrpc": "2.0", "id": self._count, "method": method, "params": params})
        return await answer

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        body = json.dumps(message).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    async def _read(self) -> None:
        assert self._process is not None
        stream = self._process.stdout
        assert stream is not None
        while True:
            length = 0
            while (line := await stream.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if not line:
                return
            message = json.loads(await stream.readexactly(length))
            if "method" in message:
                if "id" in message:  # the server asks something of the editor: it has nothing to say
                    self._write({"jsonrpc": "2.0", "id": message["id"], "result": None})
                continue
            answer = self._asked.pop(message.get("id"), None)
            if answer is not None and not answer.done():
                answer.set_result(message.get("result"))


def _place(document: Document, offset: int) -> dict[str, int]:
    position = document.position(offset)
    return {"line": position.line, "character": position.column}


@contextlib.asynccontextmanager
async def gateway(model: str | None) -> AsyncIterator[str]:
    """A server of its own, on a free port; its address."""
    command = [PROGRAM, "--json", "serve", "--port", "0"]
    if model:
        command += ["--model", model]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 300)
        if not line:
            sys.exit("the gateway did not start; it says why above")
        yield json.loads(line)["url"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), 20)


@dataclass(slots=True)
class Place:
    prefix: str
    suffix: str
    ms: float


@dataclass(slots=True)
class Measured:
    computed: list[float] = field(default_factory=list)
    through: list[float] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    prompt: int = 0
    reused: int = 0
    keys: int = 0
    saved: int = 0


def pauses(text: str, seed: int) -> list[float]:
    """Seconds before each key, as a practised person types."""
    rng = random.Random(seed)
    gaps = []
    for before, sign in zip(" " + text, text, strict=False):
        gap = rng.lognormvariate(-1.97, 0.35)
        if before.isspace() and not sign.isspace():
            gap += rng.uniform(0.0, 0.25)
        if sign == "\n":
            gap += rng.uniform(0.1, 0.5)
        gaps.append(gap)
    return gaps


async def token_counts(url: str) -> tuple[int, int]:
    """Prompt tokens computed and reused so far, as the gateway counts them."""

    def read() -> str:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
            return str(page.read().decode())

    page = await asyncio.to_thread(read)
    kinds = re.findall(r'keystroke_tokens_total\{kind="(\w+)"[^}]*\} ([\d.e+]+)', page)
    totals: Counter[str] = Counter()
    for kind, count in kinds:
        totals[kind] += int(float(count))
    return totals["input"], totals["reused"]


async def replay(
    transport: Transport, url: str, case: Case, keys: int, seed: int, measured: Measured, hurried: bool
) -> list[Place]:
    """Type the missing part of one case; the places where a line was computed and shown."""
    lead = min(LEAD, len(case.prefix))
    typed = (case.prefix[len(case.prefix) - lead :] + case.middle)[:keys]
    before = case.prefix[: len(case.prefix) - lead]
    name = f"case_{seed}.py"
    await transport.open(name, before + case.suffix)
    counted = await token_counts(url)
    cursor, version = len(before), 0
    covered = 0
    places: list[Place] = []
    waiting: asyncio.Task[tuple[Answer, float]] | None = None

    async def ask(sign: str) -> tuple[Answer, float]:
        began = time.perf_counter()
        answer = await transport.key(name, version, Edit(cursor - 1, cursor - 1, sign), cursor)
        return answer, (time.perf_counter() - began) * 1e3

    for index, (sign, gap) in enumerate(zip(typed, pauses(typed, seed), strict=True)):
        if waiting is not None:
            done, _ = await asyncio.wait({waiting}, timeout=gap if hurried else None)
            if done and hurried:
                await asyncio.sleep(max(0.0, gap - waiting.result()[1] / 1e3))
            if done:
                answer, ms = waiting.result()
                note(measured, answer, ms)
                if answer.text:
                    if answer.source in ("computed", "continued") and "\n" not in answer.text:
                        places.append(Place(before + typed[:index], case.suffix, ms))
                    if index >= covered and typed[index:].startswith(answer.text.partition("\n")[0]):
                        measured.saved += max(0, len(answer.text.partition("\n")[0]) - 1)
                        covered = index + len(answer.text.partition("\n")[0])
            else:
                measured.outcomes[OVERTAKEN] += 1
        cursor, version = cursor + 1, version + 1
        measured.keys += 1
        waiting = asyncio.create_task(ask(sign))
    if waiting is not None:
        answer, ms = await waiting
        note(measured, answer, ms)
    if not transport.tells:
        computed, reused = await token_counts(url)
        measured.prompt += computed - counted[0] + reused - counted[1]
        measured.reused += reused - counted[1]
    await transport.close(name)
    return places


def note(measured: Measured, answer: Answer, ms: float) -> None:
    if answer.prompt:
        measured.prompt += answer.prompt
        measured.reused += answer.reused
    if not answer.text:
        measured.outcomes[answer.reason or "nothing shown"] += 1
        return
    measured.outcomes[f"shown, {answer.source}"] += 1
    if answer.source in ("typed_through", "cached"):
        measured.through.append(ms)
    elif "\n" not in answer.text:
        measured.computed.append(ms)


class Infill:
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


_kept: list[object] = []


def peers(model: Path, cache: Path) -> dict[str, Infill]:
    """llama.cpp with the same weights, or nothing where it is not installed or has no such file."""
    try:
        import llama_cpp
    except ImportError:
        print("llama-cpp-python is not installed: no llama.cpp in this run (pip install llama-cpp-python)")
        return {}
    gguf = model if model.suffix == ".gguf" else next(iter(sorted(model.glob("*.gguf"))), None)
    if gguf is None:
        print(f"{model.name} has no GGUF file beside it: no llama.cpp in this run")
        return {}
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    _kept.append(silent)  # llama.cpp holds only a pointer to it
    cache.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, kind in (("Q4_0", 2), ("Q8_0", 7)):
        file = cache / f"{gguf.stem}-{name}.gguf"
        if not file.exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize, params.nthread = kind, True, os.cpu_count() or 1
            llama_cpp.llama_model_quantize(str(gguf).encode(), str(file).encode(), ctypes.byref(params))
        found[f"llama.cpp {name}"] = Infill(file, model, "psm")
        fim = detect_fim(load_tokenizer(model), model)
        if fim is not None and fim.order == "spm":
            found[f"llama.cpp {name} {SPM}"] = Infill(file, model, "spm")
    return found


def compare(
    others: dict[str, Infill], case: Case, places: Sequence[Place], theirs: dict[str, list[float]]
) -> None:
    """The same places, in the order they were typed; the file is in their cache first, as it was in ours."""
    for name, other in others.items():
        if places:
            other.line(case.prefix[: max(1, len(case.prefix) - LEAD)], case.suffix)
        theirs.setdefault(name, []).extend(other.line(place.prefix, place.suffix) for place in places)


def quantile(values: Sequence[float], q: float) -> float | None:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


async def run(options: argparse.Namespace) -> dict[str, Any]:
    settings = load_settings({}, Path.cwd())
    path = resolve(options.model or settings.model.default, settings)
    others = {} if options.no_peer else peers(path, settings.paths.cache / "bench")
    cases = [c for c in read_cases(CASES) if c.kind == "block" and len(c.middle) >= 80]
    cases = random.Random(options.seed).sample(cases, min(options.cases, len(cases)))
    measured, theirs = Measured(), dict[str, list[float]]()
    ours: list[float] = []
    async with gateway(options.model) as url:
        transport: Any = LiveTransport(url) if options.transport == "live" else LspTransport(url, Path.cwd())
        await transport.start()
        try:
            for number, case in enumerate(cases):
                places = await replay(
                    transport, url, case, options.keys, number, measured, not options.patient
                )
                ours += [place.ms for place in places]
                compare(others, case, places, theirs)
        finally:
            await transport.stop()
    p50s = {name: median(values) for name, values in theirs.items() if values}
    print(f"{measured.keys} keys over {options.transport}, {len(cases)} files, {path.name}")
    for outcome, count in measured.outcomes.most_common():
        print(f"  {count:5d}  {outcome}")
    for name, value in p50s.items():
        print(f"  {name}: p50 {value:.1f} ms at the {len(ours)} places where ours took {median(ours):.1f} ms")
    best = min((value for name, value in p50s.items() if SPM not in name), default=None)
    best_spm = min((value for name, value in p50s.items() if SPM in name), default=None)
    return {
        "model": path.stem,
        "transport": options.transport,
        "keys": measured.keys,
        "computed": len(measured.computed),
        "typed_through": len(measured.through),
        "overtaken": measured.outcomes[OVERTAKEN],
        "p50_ms": rounded(quantile(measured.computed, 0.5)),
        "p95_ms": rounded(quantile(measured.computed, 0.95)),
        "typed_through_ms": rounded(quantile(measured.through, 0.5)),
        "typed_through_p95_ms": rounded(quantile(measured.through, 0.95)),
        "infill_p50_ms": rounded(best),
        "infill_p50_ratio": rounded(best / median(ours)) if best and ours else None,
        "infill_spm_p50_ratio": rounded(best_spm / median(ours)) if best_spm and ours else None,
        "reuse_share": rounded(measured.reused / measured.prompt, 4) if measured.prompt else None,
        "chars_saved": rounded(measured.saved / measured.keys, 4) if measured.keys else None,
    }


def rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", choices=("live", "lsp"), default="lsp")
    parser.add_argument("--model", help="what the gateway serves; default: the settings' own")
    parser.add_argument("--cases", type=int, default=6)
    parser.add_argument("--keys", type=int, default=120, help="typed in each file at most")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--patient", action="store_true", help="wait for each answer before the next key")
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    try:
        print(json.dumps(asyncio.run(run(parser.parse_args()))))
    except KeystrokeError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()
