"""Plans refactorings of open buffers in a process that can be terminated. Nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from keystroke.errors import InputError
from keystroke.gateway.live.key_process import KeyProcess, call_limited
from keystroke.isolation import IsolatedFunction
from keystroke.protocol import live_messages as live
from keystroke.text import Edit


class RefactorProcess(KeyProcess):
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
