"""The real Codex CLI, opencode and aider over a small model: how much of what they ask is done.

Regime: twenty small tasks of our own (fix, rename, add, delete, create; `client_rows/tasks.py`), each in a
fresh folder, each client unchanged and in its usual mode, one task at a time, greedy. A task is done when its
files and tests say so. A turn is one answer of the model; of those that call a tool, or try to, the
well-formed ones became a call that the client could read. aider calls no tools: its turns are well formed
when it found an edit to apply. The ceiling is the model: one of 1.5 billion parameters fails some tasks
however it is held.

    python -m bench.clients --model coder.gguf                       # on this machine's engine
    python -m bench.clients --model coder.gguf --engine cuda         # on a GPU
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn

from bench.client_rows.programs import PROGRAMS, Program
from bench.client_rows.tasks import TASKS, Task
from keystroke.config import Settings, load_settings
from keystroke.engine.load import load_model
from keystroke.gateway.api.serializers import ChatSerializer, ResponseSerializer
from keystroke.gateway.app import Gateway, uvicorn_config
from keystroke.gateway.work.registry import Registry, local_entry
from keystroke.protocol.items import CustomToolCall, FunctionCall, Message

_TRIED = ("<tool_call>", '"arguments"', "*** Begin Patch", "<function=")  # text that was meant as a call


@dataclass
class Turn:
    """One answer of the model."""

    calls: int
    text: str
    seconds: float
    tokens: int

    @property
    def tried(self) -> bool:
        return self.calls > 0 or any(mark in self.text for mark in _TRIED)


@dataclass
class Result:
    task: Task
    done: bool
    in_time: bool
    seconds: float
    turns: list[Turn] = field(default_factory=list)
    applied: bool = False


class Listener:
    """Hears every answer of the gateway, at the place where it is written for a client."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        responses, chats = ResponseSerializer.ended, ChatSerializer.ended

        def ended(serializer: ResponseSerializer, outcome: Any) -> list[Any]:
            events = responses(serializer, outcome)
            output = serializer.response.output
            calls = sum(isinstance(item, FunctionCall | CustomToolCall) for item in output)
            text = "".join(p.text for item in output if isinstance(item, Message) for p in item.content)
            self._heard(calls, text, outcome)
            return events

        def chat_ended(serializer: ChatSerializer, outcome: Any) -> list[Any]:
            events = chats(serializer, outcome)
            assert serializer.body is not None
            message = serializer.body.choices[0].message
            calls = message.tool_calls if isinstance(message.tool_calls, list) else []
            self._heard(len(calls), message.content or "", outcome)
            return events

        ResponseSerializer.ended = ended  # type: ignore[method-assign, assignment]
        ChatSerializer.ended = chat_ended  # type: ignore[method-assign, assignment]

    def _heard(self, calls: int, text: str, outcome: Any) -> None:
        paid = outcome.receipt
        self.turns.append(Turn(calls, text, paid.total_ms / 1e3, paid.output_tokens))


@contextmanager
def serving(model: Path, settings: Settings) -> Iterator[str]:
    """A gateway over the model, in a thread of its own."""
    loaded = load_model(model, settings)
    gateway = Gateway(Registry([local_entry("small", loaded)]), settings)
    config = uvicorn_config(gateway)
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


def attempt(program: Program, task: Task, url: str, listener: Listener, limit: float) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="keystroke-task-"))
    try:
        for path, text in task.files.items():
            (folder / path).write_text(text)
        listener.turns = []
        began = time.perf_counter()
        ran = program.do(url, folder, task.prompt, limit)
        seconds = time.perf_counter() - began
        done = _holds(task, folder)
        applied = "Applied edit" in ran.said
        return Result(task, done, ran.in_time, seconds, listener.turns, applied)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _holds(task: Task, folder: Path) -> bool:
    try:
        return task.check(folder)
    except Exception:  # code that a model wrote can fail in any way
        return False


def well_formed(program: str, results: Sequence[Result]) -> tuple[int, int]:
    """Turns that tried to act, and those of them the client could use."""
    if program == "aider":
        return len(results), sum(r.applied for r in results)
    turns = [turn for result in results for turn in result.turns if turn.tried]
    return len(turns), sum(turn.calls > 0 for turn in turns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a model's folder")
    parser.add_argument("--engine", default="auto", choices=("auto", "onnx", "cuda"))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--clients", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--tasks", type=int, default=len(TASKS), help="how many of them")
    parser.add_argument("--only", nargs="*", help="tasks by name")
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
    tasks = [t for t in TASKS if not asked.only or t.name in asked.only][: asked.tasks]
    listener = Listener()
    figures: dict[str, Any] = {"tasks": len(tasks), "declarations": asked.declarations}
    with serving(asked.model, settings) as url:
        for name in asked.clients:
            program = PROGRAMS[name](getattr(asked, name))
            results = []
            for task in tasks:
                result = attempt(program, task, url, listener, asked.limit)
                results.append(result)
                _show(name, result, asked.verbose)
            tried, formed = well_formed(name, results)
            figures[f"{name}_tasks_done"] = sum(r.done for r in results) / len(results)
            figures[f"{name}_well_formed"] = formed / tried if tried else None
            figures[f"{name}_turns"] = sum(len(r.turns) for r in results)
    print(json.dumps(figures))


def _show(name: str, result: Result, verbose: bool) -> None:
    turns, calls = len(result.turns), sum(t.calls for t in result.turns)
    state = "done" if result.done else "not done" if result.in_time else "out of time"
    task, spent = result.task, f"{result.seconds:7.1f} s"
    print(f"{name:9} {task.kind:7} {task.name:18} {state:12} {turns:3} turns {calls:3} calls {spent}")
    if verbose:
        for turn in result.turns:
            print(f"    {turn.calls} calls, {turn.tokens} tokens, {turn.seconds:.1f} s: {turn.text[:300]!r}")


if __name__ == "__main__":
    main()
