"""Run by itself, in a process of its own: the same calls on two versions of a module, and what came of each.

Law: reads one JSON job from standard input, writes one JSON answer, imports nothing of this project. The
module's text was cut down to what only computes before it came here. Two walls stand behind that: builtins
that do more are missing, and an audit hook ends this process at whatever Python itself would report: a file
opened, a process started, a socket, a name removed.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import functools
import importlib
import itertools
import json
import os
import sys
import time
import types
from collections.abc import Callable
from typing import Any

_MISSING = (
    "open",
    "exec",
    "eval",
    "compile",
    "input",
    "breakpoint",
    "exit",
    "quit",
    "globals",
    "locals",
    "help",
    "getattr",
    "setattr",
    "delattr",
    "vars",
    "memoryview",
)
_LONGEST = 400
_BEHIND = ("_strptime", "_decimal", "calendar", "locale")  # what the modules load only when it is needed
# Events of the interpreter that computing raises; at any other the process ends.
_HARMLESS = frozenset(("compile", "exec", "import", "sys._getframe", "builtins.id", "object.__getattr__"))
_REFUSED = 3


def wall(harmless: frozenset[str] = _HARMLESS, end: Callable[[int], None] = os._exit) -> None:
    """Let nothing but computing happen from here on. Cannot be undone."""

    def refuse(event: str, arguments: Any, *, known: frozenset[str] = harmless, end: Any = end) -> None:
        if event not in known:
            end(_REFUSED)

    sys.addaudithook(refuse)


@functools.cache
def _compiled(source: str) -> types.CodeType:
    return compile(source, "<example>", "exec")


class Version:
    """One version of the module, loaded."""

    def __init__(self, source: str, modules: frozenset[str]) -> None:
        known = {name: getattr(builtins, name) for name in dir(builtins) if name not in _MISSING}

        def imported(name: str, *rest: Any) -> Any:
            if name.partition(".")[0] not in modules:
                raise ImportError(name)
            return __import__(name, *rest)

        known["__import__"] = imported
        known["print"] = lambda *values, **named: None
        module = types.ModuleType("example")
        sys.modules["example"] = module  # dataclasses look their module up
        self.names = vars(module)
        self.names["__builtins__"] = known
        self.lines = source.split("\n")
        exec(_compiled(source), self.names)

    def outcome(self, plan: list[Any]) -> list[Any]:
        """What each step gave: a value as text, or the error and whether a `raise` made it."""
        made: list[Any] = []
        told: list[Any] = []
        for step in plan:
            try:
                value = self._value(step, made)
                if hasattr(value, "__next__"):
                    value = list(itertools.islice(value, 8))
                made.append(value)
                told.append(["value", _shown(value)])
            except Exception as error:
                told.append(["error", type(error).__name__, self._meant(error), str(error)[:120]])
                return told
        own = [value for value in made if type(value).__module__ == "example"]
        return [*told, *(["state", _shown(_fields(value))] for value in own)]

    def _value(self, item: Any, made: list[Any]) -> Any:
        if not isinstance(item, dict):
            return [self._value(part, made) for part in item] if isinstance(item, list) else item
        if "tuple" in item:
            return tuple(self._value(part, made) for part in item["tuple"])
        if "dict" in item:
            return {self._value(k, made): self._value(v, made) for k, v in item["dict"]}
        if "set" in item:
            return {self._value(part, made) for part in item["set"]}
        if "date" in item:
            return datetime.date(*item["date"])
        if "time" in item:
            return datetime.datetime(*item["time"])
        if "decimal" in item:
            return decimal.Decimal(item["decimal"])
        if "function" in item:
            return _FUNCTIONS[item["function"]]
        if "step" in item:
            return made[item["step"]]
        arguments = [self._value(part, made) for part in item["arguments"]]
        if "on" in item:
            target = made[item["on"]]
            value = getattr(target, item["call"])
            return value(*arguments) if callable(value) else value
        return self.names[item["call"]](*arguments)

    def _meant(self, error: Exception) -> bool:
        """Whether the module raised it itself."""
        number, step = None, error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == "<example>":
                number = step.tb_lineno
            step = step.tb_next
        return number is not None and self.lines[number - 1].strip().startswith(("raise", "assert"))


_FUNCTIONS = {
    "nothing": lambda *values, **named: None,
    "same": lambda value=None, *rest: value,
    "length": len,
    "text": str,
    "zero": lambda *values: 0,
}


def _fields(value: Any) -> dict[str, Any]:
    slots = getattr(type(value), "__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    fields = {**held, **getattr(value, "__dict__", {})}
    return {name: item for name, item in fields.items() if not callable(item)}


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    if type(value).__module__ == "example" and "__repr__" not in vars(type(value)):
        return f"{type(value).__name__}({_shown(_fields(value))})"[:_LONGEST]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_shown(k)}: {_shown(v)}" for k, v in value.items())[:_LONGEST] + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(map(_shown, value))}]"[:_LONGEST]
    text = repr(value)
    return text if " at 0x" not in text else type(value).__name__


def main() -> None:
    job = json.load(sys.stdin)
    modules = frozenset(job["modules"])
    for name in (*modules, *_BEHIND):
        importlib.import_module(name)
    answer = sys.stdout  # opened already
    wall()
    until = time.monotonic() + job["seconds"]
    results: list[Any] = []
    for plan in job["plans"]:
        if time.monotonic() > until:
            break  # what was tried by then is worth telling
        pair = []
        for source in (job["before"], job["before"], job["after"]):
            try:
                pair.append(Version(source, modules).outcome(plan))
            except Exception as error:
                pair.append([["broken", type(error).__name__]])
        results.append(pair)
    json.dump(results, answer)
    answer.flush()
    os._exit(0)  # nothing that was left behind runs at the end


if __name__ == "__main__":
    main()
