"""Processes for work on untrusted texts: each kind has one, and a thread, for every API key.

A hostile text, or many requests at once, delay only their own key. Both end with the key's last connection.
Checking texts and planning refactorings write nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakValueDictionary, finalize

from keystroke.analysis.check import Diagnostic
from keystroke.analysis.check.check_worker import diagnostics_from_plain
from keystroke.errors import InputError
from keystroke.isolation import IsolatedFunction, LimitExceeded
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

T = TypeVar("T")


class KeyProcess:
    """Create one with `for_key`. A subclass names its function (`target`) and the limits of a call."""

    target: ClassVar[str]
    seconds: ClassVar[float]
    memory: ClassVar[int]
    known: ClassVar[WeakValueDictionary[tuple[type, str], KeyProcess]] = WeakValueDictionary()

    def __init__(self, function: IsolatedFunction | None = None) -> None:
        function = function or IsolatedFunction(self.target, seconds=self.seconds, memory=self.memory)
        self._function = function
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=type(self).__name__.lower())
        finalize(self, function.close)

    @classmethod
    def for_key(cls, key: str) -> Self:
        """The process of this key. It ends when nobody holds a reference to it."""
        found = cls.known.get((cls, key))
        if not isinstance(found, cls):
            found = cls.known[cls, key] = cls()
        return found

    async def _run(self, work: Callable[[IsolatedFunction], T]) -> T:
        """Run `work` in this key's thread. It must not hold a reference to this object."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, work, self._function)


def call_limited(
    function: IsolatedFunction, timeout_message: str, *arguments: Any, param: str | None = None
) -> Any:
    """The function's result. Raises InputError where it refuses, or exceeds a limit (then with
    `timeout_message`)."""
    try:
        kind, result = function.call(*arguments)
    except LimitExceeded:
        raise InputError(timeout_message, param=param) from None
    if kind == "refused":
        raise InputError(result, param=param)
    return result


class CheckProcess(KeyProcess):
    """Checks a text."""

    target = "keystroke.analysis.check.check_worker:check_in_worker"
    seconds = 10.0  # a file of thousands of lines takes under one
    memory = 1 << 30

    async def check(self, text: str, path: Path | None, root: Path | None) -> tuple[Diagnostic, ...]:
        """Raises InputError for a text that is too long, or takes too long."""
        timeout_message = (
            f"The text could not be checked in {self.seconds:g} s and was left alone; is it data?"
        )
        plain = (text, "" if path is None else str(path), None if root is None else str(root))
        return await self._run(
            lambda function: diagnostics_from_plain(
                call_limited(function, timeout_message, *plain, param="buffer")
            )
        )


class RefactorProcess(KeyProcess):
    """Plans refactorings of open buffers."""

    target = "keystroke.analysis.refactor.refactor_worker:refactor_in_worker"
    seconds = 60.0  # renaming in 100,000 lines takes about ten
    memory = 2 << 30

    async def plan(
        self,
        request: live.RefactorAsk,
        path: Path | None,
        root: Path | None,
        text: str,
        open_files: Mapping[Path, tuple[str, str]],
    ) -> live.Changes:
        """Plan a refactoring. `open_files`: name and text of buffers by path. Raises InputError where it
        cannot be done, or not in time."""
        timeout_message = (
            f"The refactoring took more than {self.seconds:g} s or {self.memory >> 30} GB and was stopped; "
            "nothing was changed. Open a smaller folder."
        )
        return await self._run(
            lambda function: _plan(function, timeout_message, request, path, root, text, open_files)
        )


def _plan(
    function: IsolatedFunction,
    timeout_message: str,
    request: live.RefactorAsk,
    path: Path | None,
    root: Path | None,
    text: str,
    open_files: Mapping[Path, tuple[str, str]],
) -> live.Changes:
    from keystroke.analysis.refactor.refactor_worker import UNTITLED, refactoring_from_plain

    home, name, names = None, UNTITLED, {UNTITLED: (request.buffer, text)}
    if path is not None and path.is_file():
        home, name = _locate(path, root)
        names = {
            file.resolve().relative_to(home).as_posix(): opened
            for file, opened in open_files.items()
            if file.resolve().is_relative_to(home)
        }
    texts = {known: content for known, (_, content) in names.items()}
    arguments = (request.kind, None if home is None else str(home), texts, name)
    result = call_limited(function, timeout_message, *arguments, request.start, request.end, request.name)
    plan = refactoring_from_plain(result)
    if plan.moves:
        raise InputError("That would rename files, which an editor must do itself; rename the file there.")
    files = [
        live.FileEdits(
            edits=to_deltas(edits),
            buffer=names[known][0] if known in names else None,
            path=None if known in names or home is None else str(home / known),
        )
        for known, edits in plan.edits.items()
    ]
    return live.Changes(**request.place, title=plan.title, files=files)


def _locate(path: Path, root: Path | None) -> tuple[Path, str]:
    """The workspace a file is refactored in, and the file's name there."""
    path = path.resolve()
    home = root.resolve() if root is not None else path.parent
    if not path.is_relative_to(home):
        home = path.parent
    return home, path.relative_to(home).as_posix()


def to_deltas(edits: tuple[Edit, ...]) -> list[live.BufferEdit]:
    return [live.BufferEdit(edit.start, edit.end, edit.text) for edit in edits]
