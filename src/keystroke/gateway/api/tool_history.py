"""What a conversation says about the tools that a small model may use next.

Reads items and changes none. A line counts as read where a tool's result or a fenced block of the user shows
it; an instruction is not a line of a file. Small models repeat themselves: a call made twice in vain and an
edit that failed are not allowed in the next turn, so that the model reads, does something else, or finishes.
Nor may it undo its own work, unless something failed since.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from keystroke.assist.tool_calls.file_edits import edits_files, read_edit, same_file
from keystroke.assist.tool_calls.patches import calls_from_patch
from keystroke.assist.tool_calls.seen import strip_line_numbers
from keystroke.assist.tool_calls.tools import PATHS, Toolset
from keystroke.assist.tool_calls.usable import SHORT_FILE, reads_files
from keystroke.protocol.items import Item, content_text

_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_REPORT = re.compile(r"\A(?:[A-Z][\w ]*:[^\n]*\n|Process [^\n]*\n)*Output:\n")  # Codex's header of a result
_FAILED = re.compile(r"\b(fail|error|not found|no such|could not|cannot|invalid)", re.IGNORECASE)
_MADE = re.compile(r"success|done|updated|wrote|edit applied|the file .* has been", re.IGNORECASE)
_WHOLE = re.compile(r"cat (?:-- )?['\"]?([\w./-]+)['\"]?")
# Around the lines that opencode shows, below what it says of the file.
_FRAME = re.compile(r"\A(?:<(path|type)>[^\n]*</\1>\n)*<(file|content)>\n(.*?)\n?</\2>\s*\Z", re.DOTALL)
_REMINDED = re.compile(r"\s*<system-reminder>.*?</system-reminder>\s*", re.DOTALL)
# What clients write in the place of lines; code may speak of "truncated" and have "Callable[..., int]".
_CUT = re.compile(
    r"…\s*\+?\d+ \w+(?: truncated)?\s*…"
    r"|^\W*(?:\.\.\.|…|\(|\[)[^\n]*\b(?:omitted|truncated|more lines|capped|showing lines)\b",
    re.IGNORECASE | re.MULTILINE,
)
_STATUS = re.compile(r"\bexit(?:ed with)? code:? ?[1-9]", re.IGNORECASE)


@dataclass(slots=True)
class WrittenEdits:
    """What the edits of this turn wrote. `copied`: files that were written exactly as they had been read.
    `known`: files that had been read before."""

    lines: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)

    def clear(self) -> None:
        self.lines.clear()
        self.paths.clear()
        self.known.clear()


def last_user_text(items: Sequence[Item]) -> str:
    """The last user message."""
    return next(
        (content_text(i.content) for i in reversed(items) if i.type == "message" and i.role == "user"), ""
    )


def texts_read(items: Sequence[Item], toolset: Toolset) -> list[str]:
    """The file contents that a model has read."""
    edits = {shown.tool.name for shown in toolset.shown if shown.is_edit}
    of_edits = {i.call_id for i in items if i.type in _CALLS and i.name in edits}
    texts: list[str] = []
    for item in items:
        if item.type in _OUTPUTS and item.call_id not in of_edits:
            texts.append(_REPORT.sub("", _output_text(item)))
        elif item.type == "message" and item.role == "user":
            texts += _FENCED.findall(content_text(item.content))
    return texts


def short_files(items: Sequence[Item], toolset: Toolset) -> tuple[str, ...]:
    """The paths of short files that were read whole since the last user message, by a reading tool or by a
    command that shows one file."""
    outputs = {item.call_id: _output_text(item) for item in items if item.type in _OUTPUTS}
    found: dict[str, None] = {}
    for call in calls_made(items):
        text = outputs.get(call.call_id)
        path = _path_read(call, toolset)
        if path is None or text is None or _has_status(text):
            continue
        lines = _REPORT.sub("", text).splitlines()
        refused = len(lines) == 1 and _FAILED.search(lines[0]) is not None  # only an error message
        if 0 < len(lines) <= SHORT_FILE and not refused:
            found[path] = None
    return tuple(found)


def files_read(items: Sequence[Item], toolset: Toolset) -> dict[str, str]:
    """The files that were read whole, by path, with the edits that were made since."""
    outputs = {item.call_id: _output_text(item) for item in items if item.type in _OUTPUTS}
    found: dict[str, str] = {}
    for call in items:
        text = outputs.get(call.call_id) if call.type in _CALLS else None
        if text is None or _has_status(text):
            continue
        shown = next((s for s in toolset.shown if s.tool.name == call.name), None)
        if shown is not None and edits_files(shown.tool):
            edit = read_edit(shown.tool, call.input or call.arguments or "", found)
            if edit is not None and not _edit_failed(text):
                _forget_file(edit.path, found)
                if edit.new is not None:
                    found[edit.path] = edit.new
            continue
        path = _path_read(call, toolset)
        body = _shown_text(text)
        lines = body.splitlines()
        refused = len(lines) <= 1 and _FAILED.search(body) is not None
        if path is not None and lines and not refused and not _CUT.search(text):
            found[path] = body if body.endswith("\n") else f"{body}\n"
    return found


def files_looked_at(items: Sequence[Item], toolset: Toolset) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files that calls since the last user message tried to read, and those that are not there."""
    outputs = {item.call_id: _output_text(item) for item in items if item.type in _OUTPUTS}
    looked: dict[str, bool] = {}
    for call in calls_made(items):
        path, text = _path_read(call, toolset), outputs.get(call.call_id)
        if path is not None and text is not None:
            body = _REPORT.sub("", text).strip()
            looked[path] = "\n" not in body and _FAILED.search(body) is not None
    return tuple(looked), tuple(path for path, absent in looked.items() if absent)


def _has_status(output: str) -> bool:
    """Whether a command ended with an error, by what its report says; a file may speak of exit codes too."""
    report = _REPORT.match(output)
    lines = output.strip().split("\n")
    return _STATUS.search(report[0] if report else f"{lines[0]}\n{lines[-1]}") is not None


def _edit_failed(output: str) -> bool:
    """Whether an edit was refused; the report of one that was made may name a file such as errors.py, and
    list what a language server finds wrong."""
    first_line = _REPORT.sub("", output).strip().split("\n", 1)[0]
    return _has_status(output) or (_MADE.match(first_line) is None and _FAILED.search(first_line) is not None)


def _forget_file(path: str, found: dict[str, str]) -> None:
    for name in tuple(found):
        if same_file(name, path):
            del found[name]


def _shown_text(output: str) -> str:
    """The text of a file in the output of a tool that shows it."""
    text = _REMINDED.sub("", _REPORT.sub("", output))
    if (framed := _FRAME.match(text)) is not None:
        inside = strip_line_numbers(framed[3])
        if inside != framed[3]:  # else the tags are the file's own
            return inside
    return strip_line_numbers(text)


def _path_read(call: Item, toolset: Toolset) -> str | None:
    shown = toolset.find(call.name or "")
    try:
        arguments = msgspec.json.decode(call.arguments or "")
    except msgspec.DecodeError:
        return None
    if shown is None or not isinstance(arguments, dict):
        return None
    if reads_files(shown):
        paths = [arguments[name] for name in PATHS if isinstance(arguments.get(name), str)]
        return paths[0] if paths and len(arguments) == 1 else None
    for text in arguments.values():
        text = text[-1] if isinstance(text, list) and text else text  # bash -lc "cat FILE"
        if isinstance(text, str) and (match := _WHOLE.fullmatch(text.strip())) is not None:
            return match[1]
    return None


def calls_made(items: Sequence[Item]) -> list[Item]:
    """The calls since the last user message."""
    calls: list[Item] = []
    for item in items:
        if item.type == "message" and item.role == "user":
            calls.clear()
        elif item.type in _CALLS:
            calls.append(item)
    return calls


def exhausted_tools(items: Sequence[Item], toolset: Toolset) -> frozenset[str]:
    """The tools, by their offered names, that are not available in the next turn: an edit that has just
    failed, and any tool called twice in the same way since the last write."""
    calls = calls_made(items)
    if not calls:
        return frozenset()
    outputs = {item.call_id: _output_text(item) for item in items if item.type in _OUTPUTS}
    quoting = {shown.tool.name for shown in toolset.shown if shown.is_edit or shown.grounded}
    spent: set[str] = set()
    tried: set[tuple[Any, ...]] = set()
    for call in calls:
        name, failed = call.name or "", _edit_failed(outputs.get(call.call_id, ""))
        if _signature(call) in tried:
            spent.add(name)
        elif name in quoting and not failed:
            spent.discard(name)
            tried = {
                one for one in tried if one[1] in quoting
            }  # after a write, a command may have another result
            spent &= quoting
        tried.add(_signature(call))
    if calls[-1].name in quoting and _edit_failed(outputs.get(calls[-1].call_id, "")):
        spent.add(calls[-1].name or "")
    return frozenset(spent)


def written_edits(items: Sequence[Item], toolset: Toolset) -> WrittenEdits:
    """What the edits since the last user message wrote, unless something failed after them: a small model
    that reads its own work may take it for the task, and undo it. A file written exactly as it was read does
    not count."""
    names = {shown.tool.name for shown in toolset.shown if shown.is_edit}
    tools = {s.tool.name: s.tool for s in toolset.shown if not s.tool.custom and edits_files(s.tool)}
    edits: dict[str | None, list[tuple[str, dict[str, str]]]] = {}
    work = WrittenEdits()
    read: set[str] = set()
    known: set[str] = set()
    for item in items:
        if item.type == "message" and item.role == "user":
            work = WrittenEdits()
        elif item.type in _CALLS and item.name in names:
            edits[item.call_id] = calls_from_patch(item.input or "") or []
        elif item.type in _CALLS and (tool := tools.get(item.name or "")) is not None:
            edit = read_edit(tool, item.arguments or "", {})
            edits[item.call_id] = [("", {"path": edit.path, "new": edit.written})] if edit is not None else []
        elif item.type in _CALLS and (path := _path_read(item, toolset)) is not None:
            known.add(path)
        elif item.type in _OUTPUTS:
            if item.call_id not in edits:
                read.add(_REPORT.sub("", _output_text(item)).strip())
                if _FAILED.search(_output_text(item)) or _STATUS.search(_output_text(item)):
                    work.clear()  # the edits may be wrong
            elif not _edit_failed(_output_text(item)):
                for _, arguments in edits[item.call_id]:
                    if arguments.get("content", arguments.get("new", "")).strip() in read:
                        work.copied.add(arguments["path"])
                        continue
                    new = arguments.get("new", arguments.get("content", "")).split("\n")
                    old = set(arguments.get("old", "").split("\n"))
                    work.lines |= {line for line in new if line.strip() and line not in old}
                    work.paths.add(arguments["path"])
                    work.known |= known
    return work


def _signature(call: Item) -> tuple[Any, ...]:
    return call.type, call.name, call.arguments, call.input


def _output_text(item: Item) -> str:
    return content_text(None if isinstance(item.output, dict) else item.output)
