"""Reads calls of a client's tools that change files, and rewrites them for another result.

A client's file must not be worse after a call than before. Where the file was read in the conversation, its
new text is known before the call is sent: it passes the checks of every other change, and a call whose result
was repaired is rewritten. Supported are patches, tools that write a whole file, and tools that replace one
text by another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from keystroke.assist.edit.operations import EditFailure, Removal
from keystroke.assist.edit.resolve import parse_answer, resolve
from keystroke.assist.edit.validation import validate_change
from keystroke.assist.tool_calls.patches import join_patches, patch_from_call
from keystroke.assist.tool_calls.segments import (
    Segment,
    TextSegment,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallSegment,
    ToolCallStart,
)
from keystroke.assist.tool_calls.tools import CONTENTS, PATHS, REPLACED, OfferedTool, decode_arguments
from keystroke.text.compare import common_ends

# A patch that only names the file: its hunk is empty.
_NAMED = re.compile(r"\*\*\* Begin Patch\n\*\*\* Update File: ([^\n]+)\n@@\n\*\*\* End Patch\n?")


@dataclass(frozen=True, slots=True)
class ClientFileEdit:
    """A call's effect on one file. `old` is None where the file was not read; `new` is its text after the
    call, None where that is unknown; `written`: the text in the call itself."""

    path: str
    old: str | None
    new: str | None
    written: str


def edits_files(tool: OfferedTool) -> bool:
    """Whether calls of the tool change files in a way that can be understood."""
    if tool.custom:
        return tool.is_patch
    properties = tool.parameters.get("properties", {})
    if not any(name in properties for name in PATHS):
        return False
    pairs = any(old in properties and new in properties for old, new in REPLACED)
    return pairs or any(name in properties for name in CONTENTS)


def known_text(path: str, files: Mapping[str, str]) -> str | None:
    """The text of a file that was read, also under a shorter or longer path."""
    return next((text for known, text in files.items() if same_file(path, known)), None)


def same_file(one: str, other: str) -> bool:
    """Whether two paths name the same file, where one of them may be shorter."""
    one, other = f"/{one.removeprefix('./')}", f"/{other.removeprefix('./')}"
    return one.endswith(other) or other.endswith(one)


def read_edit(tool: OfferedTool, payload: str, files: Mapping[str, str]) -> ClientFileEdit | None:
    """The effect of a call on one file; None where it is not understood, or where several files change."""
    if tool.custom:
        return _read_patch(payload, files)
    arguments = decode_arguments(payload)
    path = next((arguments[name] for name in PATHS if isinstance(arguments.get(name), str)), None)
    if path is None:
        return None
    old = known_text(path, files)
    for name in CONTENTS:
        if isinstance(arguments.get(name), str):
            return ClientFileEdit(path, old, arguments[name], arguments[name])
    for before, after in REPLACED:
        quoted, written = arguments.get(before), arguments.get(after)
        if isinstance(quoted, str) and isinstance(written, str):
            new = None
            if old is not None and quoted and quoted in old:
                new = old.replace(quoted, written, -1 if arguments.get("replace_all") else 1)
            elif not quoted and not old:
                new = written
            return ClientFileEdit(path, old, new, written)
    return None


def _read_patch(payload: str, files: Mapping[str, str]) -> ClientFileEdit | None:
    if (match := _NAMED.fullmatch(payload)) is not None:
        return ClientFileEdit(match[1], known_text(match[1], files), None, "")
    operations = parse_answer(payload, tuple(files))
    if isinstance(operations, EditFailure) or len({operation.path for operation in operations}) != 1:
        return None
    path = operations[0].path
    if any(isinstance(operation, Removal) for operation in operations):
        return None
    old = known_text(path, files)
    written = "\n".join(line[1:] for line in payload.split("\n") if line.startswith("+"))
    if payload.split("\n")[1:2] and payload.split("\n")[1].startswith("*** Add File"):
        return ClientFileEdit(path, old, f"{written}\n" if written else "", written)
    found = resolve(operations, lambda name: known_text(name, files))
    new = found.texts.get(path) if not found.failures else None
    return ClientFileEdit(path, old, new, written)


def edit_call(tool: OfferedTool, payload: str, edit: ClientFileEdit, new: str) -> str | None:
    """The payload of the same call with which the file becomes `new`; None where it cannot be written."""
    if tool.custom:
        if edit.old is None:
            return patch_from_call("write_file", {"path": edit.path, "content": new})
        return _update_patch(edit.path, edit.old, new)
    arguments = decode_arguments(payload)
    arguments |= {name: edit.path for name in PATHS if isinstance(arguments.get(name), str)}
    for name in CONTENTS:
        if isinstance(arguments.get(name), str):
            return msgspec.json.encode({**arguments, name: new}).decode()
    for before, after in REPLACED:
        if isinstance(arguments.get(before), str) and edit.old is not None:
            quoted, written = _smallest_replacement(edit.old, new)
            arguments = {key: value for key, value in arguments.items() if key != "replace_all"}
            return msgspec.json.encode({**arguments, before: quoted, after: written}).decode()
    return None


def edit_calls(tool: OfferedTool, payload: str, edits: Mapping[ClientFileEdit, str]) -> list[str] | None:
    """The payloads of calls with which each file becomes its new text; one patch changes all of them."""
    calls = [edit_call(tool, payload, edit, new) for edit, new in edits.items()]
    payloads = [call for call in calls if call is not None]
    if len(payloads) < len(calls):
        return None
    return [join_patches(payloads)] if tool.custom else payloads


def _update_patch(path: str, old: str, new: str) -> str | None:
    quoted, written = _smallest_replacement(old, new)
    return patch_from_call("replace_lines", {"path": path, "old": quoted, "new": written})


def _smallest_replacement(old: str, new: str) -> tuple[str, str]:
    """Whole lines of `old`, once in it, and what replaces them; with up to three lines around."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    head, tail = common_ends(before, after)
    for around in (3, 10, 40, len(before)):
        start, end = max(0, head - around), min(len(before), len(before) - tail + around)
        quoted = "".join(before[start:end])
        if quoted and old.count(quoted) == 1:
            written = [
                *before[start:head],
                *after[head : len(after) - tail],
                *before[len(before) - tail : end],
            ]
            return quoted, "".join(written)
    return old, new


def check_edit(edit: ClientFileEdit, request: str) -> str | EditFailure | None:
    """The text that the file should have after a call, or its fault; None where the file was not read, so
    that neither is known."""
    if edit.new is None:
        # Only the text in the call can be judged.
        checked = validate_change("", edit.written, f"{edit.path}.txt", request, complete=False)
        return checked if isinstance(checked, EditFailure) else None
    if edit.old is None:
        return validate_change("", edit.new, edit.path, request, complete=False)
    return validate_change(edit.old, edit.new, edit.path, request)


def refusal(path: str, failure: EditFailure) -> TextSegment:
    """The text sent to the client in place of a call that would damage a file."""
    return TextSegment(f"I did not change {path}: {failure.message}.")


def check_segment(segment: ToolCallSegment, files: Mapping[str, str], request: str) -> Segment:
    """The call as it is, the repaired call, or a text that says why the call was dropped."""
    edit = read_edit(segment.tool, segment.payload, files)
    result = None if edit is None else check_edit(edit, request)
    if edit is None or result is None or result == edit.new:
        return segment
    if isinstance(result, EditFailure):
        return refusal(edit.path, result)
    payload = edit_call(segment.tool, segment.payload, edit, result)
    return segment if payload is None else ToolCallSegment(segment.tool, payload)


class SegmentSource(Protocol):
    def feed(self, text: str) -> list[Segment]: ...

    def finish(self) -> list[Segment]: ...


class WholeEditCalls:
    """Wraps a parser so that calls that change files are emitted in one piece, to be checked."""

    def __init__(self, parser: SegmentSource) -> None:
        self._parser = parser
        self._tool: OfferedTool | None = None
        self._payload: list[str] = []

    def feed(self, text: str) -> list[Segment]:
        return self._join_pieces(self._parser.feed(text))

    def finish(self) -> list[Segment]:
        out = self._join_pieces(self._parser.finish())
        if self._tool is not None:  # cut off: as the client would have seen it
            out += [ToolCallStart(self._tool), ToolArgumentsDelta("".join(self._payload))]
            self._tool = None
        return out

    def _join_pieces(self, segments: Sequence[Segment]) -> list[Segment]:
        out: list[Segment] = []
        for segment in segments:
            if isinstance(segment, ToolCallStart) and edits_files(segment.tool):
                self._tool, self._payload = segment.tool, []
            elif self._tool is not None and isinstance(segment, ToolArgumentsDelta):
                self._payload.append(segment.payload)
            elif self._tool is not None and isinstance(segment, ToolCallEnd):
                out.append(ToolCallSegment(self._tool, "".join(self._payload)))
                self._tool = None
            else:
                out.append(segment)
        return out
