"""Parses patches written by others: the `apply_patch` envelope and unified diffs.

Line counts, which models get wrong, are ignored; a line number only chooses between equal places.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from keystroke.assist.edit.operations import (
    Addition,
    EditFailure,
    Move,
    Operation,
    Removal,
    Replacement,
    SearchReplace,
)
from keystroke.assist.edit.operations import EditFailureReason as Reason

_BEGIN, _END = "*** Begin Patch", "*** End Patch"
_FILE = re.compile(r"^\*\*\* (Add|Delete|Update) File: (.*\S)")
_MOVE = re.compile(r"^\*\*\* Move to: (.*\S)")
_HUNK = re.compile(r"^@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_OLD = re.compile(r"^--- ([^\t]*[^\t\s])")  # a tab ends the name; a time stamp may follow
_NEW = re.compile(r"^\+\+\+ ([^\t]*[^\t\s])")
_NO_NEWLINE = "\\ No newline"
_NOWHERE = "/dev/null"


def is_envelope(answer: str) -> bool:
    return any(line.strip() == _BEGIN for line in answer.split("\n"))  # as `parse_envelope` splits


def is_unified(answer: str) -> bool:
    return any(_OLD.match(a) and _NEW.match(b) for a, b in pairwise(answer.splitlines()))


# ── the envelope ──


class UnreadablePatch(Exception):
    """A patch that cannot be parsed, and why."""

    def __init__(self, reason: Reason, path: str, message: str) -> None:
        super().__init__(message)
        self.failure = EditFailure(reason, path, message)


def parse_envelope(answer: str) -> list[Operation]:
    lines = answer.replace("\r\n", "\n").split("\n")
    start = next(i for i, line in enumerate(lines) if line.strip() == _BEGIN)
    end = next((i for i, line in enumerate(lines) if i > start and line.strip() == _END), None)
    if end is None:
        raise UnreadablePatch(Reason.TRUNCATED, "", f"the patch has no {_END!r} line; write it completely")
    operations: list[Operation] = []
    body = lines[start + 1 : end]
    heads = [(i, found) for i, line in enumerate(body) if (found := _FILE.match(line))]
    for (head, found), after in zip(heads, [*(i for i, _ in heads[1:]), len(body)], strict=False):
        kind, path, section = found[1], found[2], body[head + 1 : after]
        if kind == "Delete":
            operations.append(Removal(path))
        elif kind == "Add":
            text = "".join(f"{line[1:]}\n" for line in section if line.startswith("+"))
            operations.append(Addition(path, text))
        else:
            operations += _parse_update(path, section)
    if not operations:
        message = "the patch names no file; begin each part with *** Update File: PATH"
        raise UnreadablePatch(Reason.NO_HUNKS, "", message)
    return operations


def _parse_update(path: str, section: Sequence[str]) -> list[Operation]:
    """The hunks of one file. Consecutive @@ lines narrow the place down step by step."""
    operations: list[Operation] = []
    to: str | None = None
    within: list[str] = []
    hunk: list[str] = []
    at_end = False

    def close() -> None:
        nonlocal within, hunk, at_end
        if hunk:
            split = _split_sides(hunk, path, "; correct it")
            operations.append(Replacement(path, (split,), within=tuple(within), at_end=at_end, in_order=True))
            within, hunk, at_end = [], [], False

    for line in section:
        if found := _MOVE.match(line):
            to = found[1]
        elif line.startswith("@@"):
            close()
            if header := re.sub(r"^@@\s?|\s*@@\s*$", "", line):
                within.append(header)
        elif line.strip() == "*** End of File":
            at_end = True
        else:
            hunk.append(line)
    # A blank line before the next file is not part of the hunk.
    while hunk and not hunk[-1]:
        hunk.pop()
    close()
    if to is not None:
        operations.append(Move(path, to))
    if not operations:
        raise UnreadablePatch(Reason.NO_HUNKS, path, "the patch changes nothing in this file")
    return operations


def _split_sides(hunk: Sequence[str], path: str, advice: str = "") -> SearchReplace:
    """The two sides of a hunk. An empty line is an empty context line whose space was lost."""
    if any(line[:1] not in ("", " ", "-", "+") for line in hunk):
        message = f"a hunk line begins with neither ' ', '-' nor '+'{advice}"
        raise UnreadablePatch(Reason.TRUNCATED, path, message)
    search = tuple(line[1:] for line in hunk if line[:1] != "+")
    replace = tuple(line[1:] for line in hunk if line[:1] != "-")
    return SearchReplace(search, replace)


# ── unified diffs ──


def parse_unified(answer: str) -> list[Operation]:
    lines = answer.replace("\r\n", "\n").split("\n")
    operations: list[Operation] = []
    index = 0
    while index < len(lines):
        old = _OLD.match(lines[index])
        new = _NEW.match(lines[index + 1]) if index + 1 < len(lines) else None
        if old is None or new is None:
            index += 1
            continue
        index, hunks = _parse_hunks(lines, index + 2)
        before, after = _strip_prefix(old[1], "a/"), _strip_prefix(new[1], "b/")
        if not hunks:
            message = "the diff of this file holds no @@ hunk; write it completely"
            raise UnreadablePatch(Reason.TRUNCATED, after, message)
        if before == _NOWHERE:
            operations.append(_make_addition(after, hunks))
        elif after == _NOWHERE:
            operations.append(Removal(before))
        else:
            operations += [_make_replacement(before, start, hunk) for start, hunk in hunks]
            if after != before:
                operations.append(Move(before, after))
    return operations


def _strip_prefix(path: str, prefix: str) -> str:
    path = path.strip('"')
    return path if path == _NOWHERE else path.removeprefix(prefix)


def _parse_hunks(lines: Sequence[str], index: int) -> tuple[int, list[tuple[int, list[str]]]]:
    """Hunks from `index` on: the old line number each claims, and its lines."""
    hunks: list[tuple[int, list[str]]] = []
    while index < len(lines) and lines[index].startswith("@@"):
        found = _HUNK.match(lines[index])
        start, old_left, new_left = 0, 0, 0
        if found:
            old_left, new_left = (int(found[n]) if found[n] is not None else 1 for n in (2, 4))
            # A hunk that removes nothing goes after the line it names.
            start = int(found[1]) - (1 if old_left else 0)
        index += 1
        body: list[str] = []
        while index < len(lines):
            line = lines[index]
            unfinished = old_left > 0 or new_left > 0
            if not line.startswith((" ", "+", "-", "\\")) and not (line == "" and unfinished):
                break
            # Counts are trusted only to tell a removed "-- x" line from the next file's header.
            following = lines[index + 1] if index + 1 < len(lines) else ""
            if not unfinished and _OLD.match(line) and _NEW.match(following):
                break
            old_left -= line[:1] != "+" and line[:1] != "\\"
            new_left -= line[:1] != "-" and line[:1] != "\\"
            body.append(line)
            index += 1
        hunks.append((max(0, start), body))
        while index < len(lines) and lines[index] == "" and lines[index + 1 : index + 2] == ["@@"]:
            index += 1
    return index, hunks


def _make_addition(path: str, hunks: Sequence[tuple[int, list[str]]]) -> Addition:
    lines = [line for _, hunk in hunks for line in hunk]
    text = "".join(f"{line[1:]}\n" for line in lines if line.startswith("+"))
    return Addition(path, text.removesuffix("\n") if lines and lines[-1].startswith(_NO_NEWLINE) else text)


def _make_replacement(path: str, start: int, hunk: Sequence[str]) -> Replacement:
    final_newline: bool | None = None
    for line, following in zip(hunk, [*hunk[1:], ""], strict=False):
        if following.startswith(_NO_NEWLINE):
            # The note applies to the new file if it follows one of the new file's lines.
            final_newline = line[:1] == "-"
            if not final_newline:
                break
    split = _split_sides([line for line in hunk if not line.startswith("\\")], path)
    return Replacement(path, (split,), near=start, in_order=True, final_newline=final_newline)
