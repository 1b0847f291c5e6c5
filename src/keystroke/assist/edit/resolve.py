"""Applies the operations of an answer to texts: the result is complete, or it lists the failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from keystroke.assist.edit.blocks import has_blocks, parse_blocks
from keystroke.assist.edit.matching import apply_replacement
from keystroke.assist.edit.operations import Addition, EditFailure, Move, Operation, Removal, Replacement
from keystroke.assist.edit.operations import EditFailureReason as Reason
from keystroke.assist.edit.patch import (
    UnreadablePatch,
    is_envelope,
    is_unified,
    parse_envelope,
    parse_unified,
)

Read = Callable[[str], str | None]  # the text of a file, None where there is none


@dataclass(frozen=True, slots=True)
class Resolution:
    """New texts by path (None: removed), or why there are none. `moves` maps old names to new ones."""

    texts: Mapping[str, str | None] = field(default_factory=dict)
    moves: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[EditFailure, ...] = ()


def parse_answer(answer: str, paths: Sequence[str]) -> list[Operation] | EditFailure:
    """The operations of an answer in any known format. `paths` are the files the model was shown."""
    try:
        if is_envelope(answer):
            found: list[Operation] | EditFailure = parse_envelope(answer)
        elif has_blocks(answer):
            found = parse_blocks(answer, paths)
        elif is_unified(answer):
            found = parse_unified(answer)
        else:
            message = "the answer holds no search/replace block and no patch"
            found = EditFailure(Reason.NO_HUNKS, "", message)
    except UnreadablePatch as error:
        return error.failure
    return found if isinstance(found, EditFailure) else [_normalise_path(operation) for operation in found]


def _normalise_path(operation: Operation) -> Operation:
    """The operation with a normalised path: `./a//b` becomes `a/b`. `..` stays and is refused later."""
    tidy = dataclasses.replace(operation, path=PurePosixPath(operation.path).as_posix())
    return dataclasses.replace(tidy, to=PurePosixPath(tidy.to).as_posix()) if isinstance(tidy, Move) else tidy


def resolve(operations: Sequence[Operation], read: Read) -> Resolution:
    """Apply every operation, each to the result of the ones before it."""
    state = _State(read)
    for operation in operations:
        state.apply(operation)
    if state.failures:
        return Resolution(failures=tuple(state.failures))
    texts = {path: text for path, text in state.texts.items() if text != state.originals[path]}
    if not texts:
        path = operations[0].path if operations else ""
        return Resolution(failures=(EditFailure(Reason.UNCHANGED, path, "the answer changes nothing"),))
    return Resolution(texts, state.moves)


class _State:
    def __init__(self, read: Read) -> None:
        self._read = read
        self.originals: dict[str, str | None] = {}
        self.texts: dict[str, str | None] = {}
        self.moves: dict[str, str] = {}
        self.failures: list[EditFailure] = []
        self._resume: dict[str, int] = {}  # line after the last hunk
        self._drift: dict[str, int] = {}  # lines gained by the hunks so far

    def apply(self, operation: Operation) -> None:
        path = operation.path
        text = self._read_text(path)
        if isinstance(operation, Addition):
            if text is not None and not operation.overwrite:
                self._fail(Reason.FILE_EXISTS, path, "the file to add exists already; change it instead")
            else:
                self.texts[path] = operation.text
            return
        if text is None:
            self._fail(Reason.UNKNOWN_FILE, path, "there is no such file among those that may be changed")
        elif isinstance(operation, Removal):
            self.texts[path] = None
        elif isinstance(operation, Move):
            self._move(path, operation.to, text)
        else:
            self._replace(operation, text)

    def _replace(self, operation: Replacement, text: str) -> None:
        path = operation.path
        drift = self._drift.get(path, 0)
        if operation.near is not None:
            # Line numbers refer to the original file; earlier hunks have moved the lines.
            operation = dataclasses.replace(operation, near=max(0, operation.near + drift))
        result = apply_replacement(text, operation, self._resume.get(path, 0) if operation.in_order else 0)
        if isinstance(result, EditFailure):
            self.failures.append(result)
        else:
            self.texts[path] = result.text
            self._resume[path] = result.resume
            self._drift[path] = drift + result.text.count("\n") - text.count("\n")

    def _move(self, path: str, to: str, text: str) -> None:
        if self._read_text(to) is not None:
            self._fail(Reason.FILE_EXISTS, to, f"{path} cannot be moved there: the file exists already")
            return
        self.texts[path], self.texts[to] = None, text
        self.moves[path] = to

    def _read_text(self, path: str) -> str | None:
        if path not in self.texts:
            self.originals[path] = self.texts[path] = self._read(path)
        return self.texts[path]

    def _fail(self, reason: Reason, path: str, message: str) -> None:
        self.failures.append(EditFailure(reason, path, message))
