"""Refactoring as a function of plain values, to be run in a process of its own with a time limit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from keystroke.analysis.refactor.refactoring import Refactoring, RefactoringPlan
from keystroke.errors import InputError, KeystrokeError

UNTITLED = "untitled.py"  # what a text without a file is called in its plan


def refactor_in_worker(
    kind: str, root: str | None, texts: Mapping[str, str], path: str, start: int, end: int, name: str
) -> tuple[str, Any]:
    """("plan", a RefactoringPlan) or ("refused", the message of the error). `texts`: open buffers by
    workspace path. Without a root the text at `path` is a workspace of its own."""
    try:
        if root is not None:
            return "plan", msgspec.to_builtins(_plan(Path(root), texts, kind, path, start, end, name))
        with tempfile.TemporaryDirectory(prefix="keystroke-") as alone:
            (Path(alone) / path).write_bytes(b"")
            plan = _plan(Path(alone).resolve(), texts, kind, path, start, end, name)
            return "plan", msgspec.to_builtins(plan)
    except KeystrokeError as error:
        return "refused", error.message


def refactoring_from_plain(plain: Any) -> RefactoringPlan:
    """The plan that `refactor_in_worker` returned."""
    return msgspec.convert(plain, RefactoringPlan)


def _plan(
    root: Path, texts: Mapping[str, str], kind: str, path: str, start: int, end: int, name: str
) -> RefactoringPlan:
    work = Refactoring(root, texts)
    try:
        match kind:
            case "rename":
                return work.rename(path, start, name)
            case "extract_function":
                return work.extract_function(path, start, end, name)
            case "extract_variable":
                return work.extract_variable(path, start, end, name)
            case "inline":
                return work.inline(path, start)
            case "move":
                return work.move(path, start, name)
            case "change_signature":
                return work.change_signature(path, start, name)
            case "organise_imports":
                return work.organise_imports(path)
            case _:
                raise InputError(f"{kind!r} is not a refactoring")
    finally:
        work.close()
