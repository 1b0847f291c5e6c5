"""A script that runs the same calls on two versions of a module, in its own process.

It reads one JSON job from standard input, writes one JSON answer and imports nothing of this project. The
module's text was reduced to pure code before. As further protection, builtins that do more are missing and an
audit hook ends the process at any event beyond computing: an opened file, a process, a socket.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import datetime
import decimal
import functools
import importlib
import itertools
import json
import os
import signal
import sys
import time
import types
from typing import Any

_MISSING = ("open", "exec", "eval", "compile", "input", "breakpoint", "exit", "quit", "globals", "locals",
            "help", "getattr", "setattr", "delattr", "vars", "memoryview")  # fmt: skip
_LONGEST = 400
LONGEST = 0.5  # seconds of one plan on one version
_BEHIND = ("_strptime", "_decimal", "calendar", "locale")  # imported lazily by the modules
# Audit events that computing raises; any other ends the process.
_HARMLESS = frozenset(("compile", "exec", "import", "sys._getframe", "builtins.id", "object.__getattr__"))
_REFUSED = 3


def install_audit_hook() -> None:
    """End the process at any audit event that is not harmless. Cannot be undone."""

    def refuse(event: str, arguments: Any, *, known: frozenset[str] = _HARMLESS, end: Any = os._exit) -> None:
        if event in known:
            return
        if event == "object.__setattr__" and arguments[1] == "__doc__":
            return  # dataclasses set it
        end(_REFUSED)

    sys.addaudithook(refuse)


@functools.cache
def _compile_statements(source: str) -> list[types.CodeType]:
    """One code object per statement, so that one that fails does not prevent the others."""
    parts = ast.parse(source).body
    flags = 0
    for part in parts:
        if isinstance(part, ast.ImportFrom) and part.module == "__future__":
            flags |= sum(getattr(__future__, name.name).compiler_flag for name in part.names)
    return [compile(ast.Module([part], []), "<example>", "exec", flags, dont_inherit=True) for part in parts]


class MissingDefinition(Exception):
    """The called definition was left out of the module."""


class TimeLimitReached(BaseException):
    """A step took too long. A BaseException, so that the module cannot catch it."""


class ModuleVersion:
    def __init__(self, source: str, modules: frozenset[str]) -> None:
        known = {name: getattr(builtins, name) for name in dir(builtins) if name not in _MISSING}

        def import_module(name: str, *rest: Any) -> Any:
            if name.partition(".")[0] not in modules:
                raise ImportError(name)
            return __import__(name, *rest)

        known["__import__"] = import_module
        known["print"] = lambda *values, **named: None
        module = types.ModuleType("example")
        sys.modules["example"] = module  # dataclasses look their module up
        self.names = vars(module)
        self.names["__builtins__"] = known
        self.lines = source.split("\n")
        for part in _compile_statements(source):
            with contextlib.suppress(Exception):
                exec(part, self.names)

    def run_plan(self, plan: list[Any], skipped: list[int]) -> list[Any]:
        """The result of each step: a value as text, or the error and whether a `raise` raised it."""
        values: list[Any] = []
        results: list[Any] = []
        for number, step in enumerate(plan):
            if number in skipped:
                values.append(None)
                continue
            try:
                value = self._run_step(step, values)
                values.append(value)
                results.append(["value", show_value(value)])
            except MissingDefinition:
                return [["broken", "Missing"]]
            except TimeLimitReached:
                return [*results, ["endless", ""]]
            except Exception as error:
                results.append(["error", type(error).__name__, self._is_deliberate(error), str(error)[:120]])
                return results
        own = [value for value in values if type(value).__module__ == "example"]
        return [*results, *(["state", show_value(_fields(value))] for value in own)]

    def failing_steps(self, plan: list[Any]) -> list[int]:
        """The preparing steps that fail; they are skipped."""
        values: list[Any] = []
        failed: list[int] = []
        for number, step in enumerate(plan):
            try:
                values.append(self._run_step(step, values))
            except Exception:
                values.append(None)
                if not step.get("before"):
                    break
                failed.append(number)
        return failed

    def _run_step(self, step: Any, values: list[Any]) -> Any:
        value = self._value(step, values)
        return list(itertools.islice(value, 8)) if hasattr(value, "__next__") else value

    def _value(self, item: Any, values: list[Any]) -> Any:
        if not isinstance(item, dict):
            return [self._value(part, values) for part in item] if isinstance(item, list) else item
        if "tuple" in item:
            return tuple(self._value(part, values) for part in item["tuple"])
        if "dict" in item:
            return {self._value(k, values): self._value(v, values) for k, v in item["dict"]}
        if "set" in item:
            return {self._value(part, values) for part in item["set"]}
        if "date" in item:
            return datetime.date(*item["date"])
        if "time" in item:
            return datetime.datetime(*item["time"])
        if "decimal" in item:
            return decimal.Decimal(item["decimal"])
        if "function" in item:
            return _FUNCTIONS[item["function"]]
        if "step" in item:
            return values[item["step"]]
        arguments = [self._value(part, values) for part in item["arguments"]]
        named = {name: self._value(part, values) for name, part in item.get("named", {}).items()}
        if "on" in item:
            target = values[item["on"]]
            value = getattr(target, item["call"])
            return value(*arguments, **named) if callable(value) else value
        if item["call"] not in self.names:
            raise MissingDefinition
        return self.names[item["call"]](*arguments, **named)

    def _is_deliberate(self, error: Exception) -> bool:
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
    "ten": lambda *values: 10,
}


def _fields(value: Any) -> dict[str, Any]:
    slots = getattr(type(value), "__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    held = {name: getattr(value, name) for name in names if hasattr(value, name)}
    fields = {**held, **getattr(value, "__dict__", {})}
    return {name: item for name, item in fields.items() if not callable(item)}


def show_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    if type(value).__module__ == "example" and "__repr__" not in vars(type(value)):
        return f"{type(value).__name__}({show_value(_fields(value))})"[:_LONGEST]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show_value(k)}: {show_value(v)}" for k, v in value.items())[:_LONGEST] + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(map(show_value, value))}]"[:_LONGEST]
    text = repr(value)
    return text if " at 0x" not in text else type(value).__name__


def main() -> None:
    job = json.load(sys.stdin)
    modules = frozenset(job["modules"])
    for name in (*modules, *_BEHIND):
        importlib.import_module(name)
    answer = sys.stdout  # opened already
    if hasattr(signal, "SIGVTALRM"):
        signal.signal(signal.SIGVTALRM, _stop_step)
    install_audit_hook()
    until = time.monotonic() + job["seconds"]
    results: list[Any] = []
    for plan in job["plans"]:
        if time.monotonic() > until:
            break  # report what was run so far
        results.append(_run_plan(job["before"], job["after"], plan, modules))
        if any(step[0] == "endless" for outcome in results[-1][1] for step in outcome):
            break
    json.dump(results, answer)
    answer.flush()
    os._exit(0)  # no exit handlers


def _run_plan(before: str, after: str, plan: list[Any], modules: frozenset[str]) -> list[Any]:
    """The steps that are skipped because they fail in the old version, then the results of the others: twice
    in the old version and once in the new one."""
    results: list[Any] = []
    skipped: list[int] = []
    for number, source in enumerate((before, before, before, after)):
        try:
            _limit_time(LONGEST)
            version = ModuleVersion(source, modules)
            if number == 0:
                skipped = version.failing_steps(plan)
            else:
                results.append(version.run_plan(plan, skipped))
        except (Exception, TimeLimitReached) as error:
            results.append([["broken", type(error).__name__]])
        finally:
            _limit_time(0)
    return [skipped, results[-3:]]


def _limit_time(seconds: float) -> None:
    """Limit processor time, which does not depend on the load of the machine."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _stop_step(number: int, frame: Any) -> None:
    raise TimeLimitReached


if __name__ == "__main__":
    main()
