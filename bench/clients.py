"""How many tasks real coding clients and the vendors' Python packages solve on our server.

With `--scripted` a script takes the model's place and does two tasks with the tools that each client offers:
it shows that client and server understand each other, counts connections and what was reused of each prompt,
and `--write` puts the table into docs/clients.md. With `--model` a real model does the tasks.

Regime: twenty small tasks of our own (fix, rename, add, delete, create; `client_rows/tasks.py`), each in a
fresh folder, each client unchanged and in its usual mode, greedy, `--parallel` tasks at a time over one
server. A task is solved if its check passes. A turn is one answer of the model; of the turns that call a
tool, or try to, the well-formed ones became a complete call that the client could read. aider calls no tools:
its turns are well formed when it found an edit to apply. The ceiling is the model: one of 1.5 billion
parameters fails some tasks whatever its constraints.

    python -m bench.clients --scripted --write docs/clients.md
    python -m bench.clients --model coder.gguf                       # on this machine's engine
    python -m bench.clients --model coder.gguf --engine cuda --parallel 12 --save results.jsonl
    python -m bench.clients --model coder.gguf --clients codex --tasks 3 --declarations full
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import uvicorn

from bench.client_rows.programs import PROGRAMS, Program
from bench.client_rows.script import EDITS, scripted_coder
from bench.client_rows.tasks import TASKS, ClientTask
from bench.record import record
from keystroke.config import Settings, load_settings
from keystroke.engine.load import load_model
from keystroke.gateway.api.messages import MessagesSerializer
from keystroke.gateway.api.ollama import OllamaChatSerializer
from keystroke.gateway.api.serializers import ChatSerializer, ResponseSerializer
from keystroke.gateway.app import Gateway, uvicorn_config
from keystroke.gateway.work.registry import ModelRegistry, local_entry
from keystroke.protocol.items import CustomToolCall, FunctionCall, Message
from keystroke.protocol.messages import TextBlock, ToolUseBlock

_BEGIN, _END = "<!-- written by bench.clients -->", "<!-- end -->"
_PART = "/bench-task/"  # of a path: whose request it is
_WHOSE: ContextVar[str] = ContextVar("whose", default="")
_TRIED = ("<tool_call>", '"arguments"', "*** Begin Patch", "<function=")  # text that was meant as a call


@dataclass
class ClientTurn:
    """One answer of the model."""

    calls: list[tuple[str, str]]  # each by its name and what it was called with
    text: str
    seconds: float
    tokens: int
    read: int  # tokens of the prompt
    reused: int  # of those, the ones that were not read again
    ended: str  # how, and why

    @property
    def tried(self) -> bool:
        """Whether it was meant as a call; one that the client broke off says nothing."""
        meant = bool(self.calls) or any(mark in self.text for mark in _TRIED)
        return meant and not self.ended.startswith("cancelled")


@dataclass
class ClientTaskResult:
    task: ClientTask
    done: bool
    in_time: bool
    seconds: float
    turns: list[ClientTurn] = field(default_factory=list)
    applied: bool = False
    said: str = ""
    left: dict[str, str] = field(default_factory=dict)  # the files as they are afterwards
    connections: int = 0


class TurnListener:
    """Hears every answer of the gateway, at the place where it is written for a client; tells tasks apart by
    the path that their client was given."""

    def __init__(self) -> None:
        self.turns: defaultdict[str, list[ClientTurn]] = defaultdict(list)
        self._owner: dict[str, str] = {}  # of an answer, by its id
        self.connections: defaultdict[str, set[Any]] = defaultdict(set)  # addresses of a task's client
        for kind in (ResponseSerializer, ChatSerializer, MessagesSerializer, OllamaChatSerializer):
            self._hear(kind)

    def _hear(self, kind: type[Any]) -> None:
        begin, end = kind.__init__, kind.on_end

        def begun(serializer: Any, *given: Any, **named: Any) -> None:
            begin(serializer, *given, **named)
            self._owner[serializer.id] = _WHOSE.get()

        def ended(serializer: Any, outcome: Any) -> Any:
            events = end(serializer, outcome)
            calls, text = _answer(serializer)
            paid = outcome.receipt
            why = f"{outcome.status} {outcome.finish} {outcome.error or ''}".strip()
            read, reused = paid.input_tokens, paid.reused_tokens
            turn = ClientTurn(calls, text, paid.total_ms / 1e3, paid.output_tokens, read, reused, why)
            self.turns[self._owner.pop(serializer.id, "")].append(turn)
            return events

        kind.__init__, kind.on_end = begun, ended


def _answer(serializer: Any) -> tuple[list[tuple[str, str]], str]:
    """What a whole answer calls, and what it says."""
    calls: list[tuple[str, str]] = []
    if isinstance(serializer, MessagesSerializer):
        blocks = serializer.body.content
        calls += [(b.name, json.dumps(b.input)) for b in blocks if isinstance(b, ToolUseBlock)]
        return calls, "".join(b.text for b in blocks if isinstance(b, TextBlock))
    if isinstance(serializer, OllamaChatSerializer):
        message = serializer.body.message
        made = message.tool_calls if isinstance(message.tool_calls, list) else []
        calls += [(call.function.name, json.dumps(call.function.arguments)) for call in made]
        return calls, message.content
    if isinstance(serializer, ChatSerializer):
        assert serializer.body is not None
        message = serializer.body.choices[0].message
        asked = message.tool_calls if isinstance(message.tool_calls, list) else []
        calls += [(call.function.name or "", call.function.arguments) for call in asked]
        return calls, message.content or ""
    text = ""
    for item in serializer.response.output:
        if isinstance(item, FunctionCall):
            calls.append((item.name, item.arguments))
        elif isinstance(item, CustomToolCall):
            calls.append((item.name, item.input))
        elif isinstance(item, Message):
            text += "".join(part.text for part in item.content)
    return calls, text


def parted(app: Any, listener: TurnListener | None) -> Any:
    """The gateway, under as many paths as there are tasks."""

    async def asked(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path.startswith(_PART):
            whose, _, rest = path[len(_PART) :].partition("/")
            _WHOSE.set(whose)
            if listener is not None and scope.get("method") != "GET":  # those that ask the model
                listener.connections[whose].add(scope.get("client"))
            scope = {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}
        await app(scope, receive, send)

    return asked


@contextmanager
def serving(model: Path | None, settings: Settings, listener: TurnListener | None = None) -> Iterator[str]:
    """A gateway over the model, or the scripted one, in a thread of its own."""
    loaded = scripted_coder() if model is None else load_model(model, settings)
    gateway = Gateway(ModelRegistry([local_entry("small", loaded)]), settings)
    config = uvicorn_config(gateway)
    config.app = parted(config.app, listener)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


_NUMBERS = count(1)


def attempt(
    program: Program, task: ClientTask, url: str, listener: TurnListener, limit: float
) -> ClientTaskResult:
    folder = Path(tempfile.mkdtemp(prefix="keystroke-task-"))
    whose = str(next(_NUMBERS))
    try:
        for path, text in task.files.items():
            (folder / path).write_text(text)
        began = time.perf_counter()
        ran = program.do(f"{url}{_PART}{whose}", folder, task.prompt, limit)
        seconds = time.perf_counter() - began
        left = {
            str(path.relative_to(folder)): path.read_text(errors="replace")[:2000]
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        }
        done = _holds(task, folder)
        applied = "Applied edit" in ran.said
        turns, connections = listener.turns.pop(whose, []), len(listener.connections.pop(whose, ()))
        return ClientTaskResult(task, done, ran.in_time, seconds, turns, applied, ran.said, left, connections)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _holds(task: ClientTask, folder: Path) -> bool:
    try:
        return task.check(folder)
    except Exception:  # code that a model wrote can fail in any way
        return False


def well_formed(program: str, results: Sequence[ClientTaskResult]) -> tuple[int, int]:
    """Turns that tried to act, and those of them the client could use."""
    if program == "aider":
        return len(results), sum(r.applied for r in results)
    turns = [turn for result in results for turn in result.turns if turn.tried]
    return len(turns), sum(bool(turn.calls) and turn.ended.startswith("completed") for turn in turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", type=Path, help="a GGUF file or a model's folder")
    which.add_argument("--scripted", action="store_true", help="a script in the model's place")
    parser.add_argument("--write", type=Path, help="a page whose table of scripted tasks is replaced")
    parser.add_argument("--engine", default="auto", choices=("auto", "onnx", "cuda"))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--clients", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--tasks", type=int, default=len(TASKS), help="how many of them")
    parser.add_argument("--only", nargs="*", help="tasks by name")
    parser.add_argument("--parallel", type=int, default=1, help="tasks at a time")
    parser.add_argument("--save", type=Path, help="a file for what was asked, called, said and left")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one task")
    parser.add_argument("--declarations", default="auto", choices=("auto", "full", "short"))
    for name in PROGRAMS:
        parser.add_argument(f"--{name}", type=Path, help=f"where {name} is installed")
    parser.add_argument("--verbose", action="store_true", help="show what the model said")
    asked = parser.parse_args()
    settings = load_settings()
    settings = replace(
        settings,
        engine=replace(settings.engine, kind=asked.engine),
        model=replace(settings.model, precision=asked.precision),
        server=replace(settings.server, port=0, host="127.0.0.1"),
        assist=replace(settings.assist, tool_declarations=asked.declarations),
    )
    tasks = [t for t in TASKS if not asked.only or t.name in asked.only]
    tasks = [t for t in tasks if not asked.scripted or t.name in EDITS][: asked.tasks]
    listener = TurnListener()
    figures: dict[str, Any] = {"tasks": len(tasks), "declarations": asked.declarations}
    rows: list[ClientRow] = []
    with serving(asked.model, settings, listener) as url, ThreadPoolExecutor(asked.parallel) as pool:
        for name in asked.clients:
            program = PROGRAMS[name](getattr(asked, name))

            def one(task: ClientTask, program: Program = program, name: str = name) -> ClientTaskResult:
                result = attempt(program, task, url, listener, asked.limit)
                _show(name, result, asked.verbose)
                if asked.save is not None:
                    _save(asked.save, name, result)
                return result

            began = time.perf_counter()
            results = list(pool.map(one, tasks))
            tried, formed = well_formed(name, results)
            figures[f"{name}_tasks_done"] = sum(r.done for r in results) / len(results)
            figures[f"{name}_well_formed"] = formed / tried if tried else None
            figures[f"{name}_turns"] = sum(len(r.turns) for r in results)
            figures[f"{name}_seconds"] = time.perf_counter() - began
            rows.append(client_row(program, results))
            figures[f"{name}_reused"] = rows[-1].reused
            figures[f"{name}_connections"] = rows[-1].connections
            print(json.dumps({key: value for key, value in figures.items() if key.startswith(name)}))
    print(table(rows))
    if asked.write is not None and asked.scripted:
        replace_table(asked.write, rows)
    record("clients-scripted" if asked.scripted else "clients", figures)


@dataclass(frozen=True)
class ClientRow:
    """A client in the table: `reused` is the share of the prompts after a task's first that was not read
    again, `connections` the most that one task opened."""

    program: Program
    done: int
    tasks: int
    turns: int
    reused: float | None
    connections: int


def client_row(program: Program, results: Sequence[ClientTaskResult]) -> ClientRow:
    later = [turn for result in results for turn in result.turns[1:]]
    read = sum(turn.read for turn in later)
    return ClientRow(
        program,
        done=sum(result.done for result in results),
        tasks=len(results),
        turns=sum(len(result.turns) for result in results),
        reused=sum(turn.reused for turn in later) / read if read else None,
        connections=max(result.connections for result in results),
    )


def table(rows: Sequence[ClientRow]) -> str:
    lines = [
        "| client | API | tasks done | turns | reused of later prompts | connections a task |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"{row.program.title} {row.program.version}"
        reused = "" if row.reused is None else f"{row.reused:.1%}"
        done = f"{row.done} of {row.tasks}"
        lines.append(f"| {name} | {row.program.api} | {done} | {row.turns} | {reused} | {row.connections} |")
    return "\n".join(lines)


def replace_table(page: Path, rows: Sequence[ClientRow]) -> None:
    """Replace what is between the two comments of the page."""
    before, begin, rest = page.read_text("utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise SystemExit(f"{page} has no place for the table: {_BEGIN} and {_END}")
    page.write_text(f"{before}{begin}\n{table(rows)}\n{end}{after}", "utf-8")


def _show(name: str, result: ClientTaskResult, verbose: bool) -> None:
    turns, calls = len(result.turns), sum(len(t.calls) for t in result.turns)
    state = "done" if result.done else "not done" if result.in_time else "out of time"
    task, spent = result.task, f"{result.seconds:7.1f} s"
    counted = f"{turns:3} turns {calls:3} calls {spent}"
    print(f"{name:9} {task.kind:7} {task.name:18} {state:12} {counted}", flush=True)
    if verbose:
        for turn in result.turns:
            spent = f"{turn.tokens} tokens, {turn.seconds:.1f} s"
            print(f"    {turn.calls} {spent}: {turn.text[:300]!r}")


def _save(path: Path, name: str, result: ClientTaskResult) -> None:
    row = {
        "client": name,
        "task": result.task.name,
        "done": result.done,
        "in_time": result.in_time,
        "seconds": round(result.seconds, 2),
        "turns": [asdict(turn) for turn in result.turns],
        "left": result.left,
        "said": "" if result.done else result.said[-6000:],
    }
    with path.open("a") as file:  # one write, so that lines of parallel tasks do not mix
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
