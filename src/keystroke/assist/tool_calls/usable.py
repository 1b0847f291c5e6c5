"""Decides which of its tools a small model may call next, and with which arguments.

Models of one or two billion parameters act before they read, undo their work and repeat themselves. So they
must first read a file that the user names, then may change it if that was requested, and create and delete
files only on request. A call that changes a file which was read only names the file: the server generates its
text. Larger models are not restricted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keystroke.assist.tool_calls.tools import CONTENTS, PATHS, REPLACED, ShownTool, Toolset, name_words
from keystroke.assist.tool_calls.user_request import named_files as named_files
from keystroke.assist.tool_calls.user_request import read_request
from keystroke.assist.tool_calls.user_request import strip_lead as strip_lead

LONGEST_COMMAND = 600  # characters of a small model's command; longer ones repeat themselves
SHORT_FILE = 60  # lines that a small model rewrites without losing any

_OF_TESTS = re.compile(r"(?:^|/)test_|_test\.|\.(?:test|spec)\.")
_READS = frozenset(("read", "view", "cat", "open"))
_COMMANDS = ("cmd", "command")
_TEXTS = frozenset((*CONTENTS, "old", "new", *(name for pair in REPLACED for name in pair)))
_CONSTRAINED = frozenset(("pattern", "maxLength", "enum", "const"))  # keys of a constrained schema


@dataclass(frozen=True, slots=True)
class ToolConstraints:
    """What the conversation implies for the tools. `only`: names of the allowed tools. `seen_lines`: lines
    that may be quoted. `request`: the user's last message. `exhausted`: tools that gave nothing new.
    `written`: files that this turn wrote; `copied`: those it wrote unchanged; `known`: files that it had read
    when it wrote. `short`: short files that were read completely. `made`: files that were read completely and
    whose new text the server generates. `looked`: files that this turn tried to read; `absent`: those of
    them that do not exist. `has_acted`: the turn has called a tool. `closed`: no tool is left once all are
    exhausted; otherwise they become usable again."""

    only: Collection[str] | None = None
    seen_lines: Sequence[str] = ()
    request: str = ""
    exhausted: Collection[str] = ()
    written: Sequence[str] = ()
    copied: Sequence[str] = ()
    known: Sequence[str] = ()
    short: Sequence[str] = ()
    made: Sequence[str] = ()
    looked: Sequence[str] = ()
    absent: Sequence[str] = ()
    has_acted: bool = True
    closed: bool = False


def usable_tools(toolset: Toolset, bounds: ToolConstraints) -> Toolset:
    """The shown tools that may be called now; none where the work is done, or all are exhausted and `closed`
    is set."""
    if is_done(toolset, bounds):
        return replace(toolset, shown=())
    allowed = tuple(s for s in toolset.shown if bounds.only is None or s.tool.name in bounds.only)
    if must_read_first(toolset, bounds):
        return replace(toolset, shown=_reading_tools(allowed, bounds))
    creates = read_request(bounds.request).creates
    if toolset.short:
        allowed = tuple(map(_limit_commands, allowed))
        if not creates:
            allowed = tuple(_restrict_paths(s, bounds) or s for s in allowed)
    whole = bounds.short and len(bounds.seen_lines) <= SHORT_FILE and any(map(_writes_whole, allowed))
    usable = tuple(s for s in allowed if _is_usable(s, bounds) and not (whole and s.grounded))
    if toolset.short and not creates:
        usable = tuple(_naming_tool(s, bounds) or s for s in usable)
    if must_edit_next(toolset, bounds) and (edits := tuple(filter(_is_naming, usable))):
        return replace(toolset, shown=edits)
    fresh = tuple(s for s in usable if s.tool.name not in bounds.exhausted)
    if bounds.closed and bounds.exhausted and allowed:
        return replace(toolset, shown=fresh)
    return replace(toolset, shown=fresh or usable or allowed)


def must_read_first(toolset: Toolset, bounds: ToolConstraints) -> bool:
    """Whether the next answer must read a file: the user names one and none was read, or asks for a change of
    several and the turn has not tried to read all of them."""
    intent = read_request(bounds.request)
    if not toolset.short or not _unread_files(bounds) or intent.creates or intent.deletes:
        return False
    begun = bounds.has_acted or bounds.seen_lines
    if begun and (bounds.written or bounds.copied or not (bounds.made or bounds.looked)):
        return False
    if begun and not intent.changes:
        return False
    allowed = [s for s in toolset.shown if bounds.only is None or s.tool.name in bounds.only]
    return any(not begun or s.tool.name not in bounds.exhausted for s in _reading_tools(allowed, bounds))


def must_edit_next(toolset: Toolset, bounds: ToolConstraints) -> bool:
    """Whether the next answer must change a file: the user asks for a change of files that were all read, and
    nothing was written or tried in vain. A small model would rather show the change in words."""
    intent = read_request(bounds.request)
    if not toolset.short or not bounds.made or bounds.written or bounds.copied:
        return False
    if not intent.files or not intent.changes:
        return False
    known = (*bounds.made, *bounds.absent)
    if any(_OF_TESTS.search(name) or not _is_among(name, known) for name in intent.files):
        return False
    allowed = [s for s in toolset.shown if bounds.only is None or s.tool.name in bounds.only]
    return any(_naming_tool(s, bounds) is not None and s.tool.name not in bounds.exhausted for s in allowed)


def is_done(toolset: Toolset, bounds: ToolConstraints) -> bool:
    """Whether the user asked only for a change and it is done: every file that the user names was written, or
    had been read when another one was. A small model would go on for thousands of tokens."""
    if not toolset.short or not bounds.closed or not bounds.written:
        return False
    intent, known = read_request(bounds.request), (*bounds.written, *bounds.known, *bounds.absent)
    if not intent.files or not all(_is_among(name, known) for name in intent.files):
        return False
    return intent.changes and not intent.continues


def _unread_files(bounds: ToolConstraints) -> list[str]:
    """The files that the user names and that no call has read."""
    known = (*bounds.made, *bounds.short, *bounds.looked)
    return [name for name in read_request(bounds.request).files if not _is_among(name, known)]


def _is_usable(shown: ShownTool, bounds: ToolConstraints) -> bool:
    """Lines can be replaced only after they were read, and files edited until all named ones are written. A
    file is deleted only on request, and written whole where the user asks to create one, names none, or one
    was read."""
    if shown.grounded and not bounds.seen_lines:
        return False
    if shown.is_edit and bounds.written and _all_written(bounds):
        return False
    intent = read_request(bounds.request)
    if shown.is_edit and shown.name == "delete_file":
        return intent.deletes
    if shown.is_edit and _writes_whole(shown):
        wanted = not intent.files or intent.creates
        is_short = 0 < len(bounds.seen_lines) <= SHORT_FILE and not bounds.written and not bounds.copied
        return wanted or bool(bounds.short) or is_short
    return True


def _all_written(bounds: ToolConstraints) -> bool:
    """Whether the request names files, and each of them was written."""
    named = read_request(bounds.request).files
    return bool(named) and all(_is_among(name, bounds.written) for name in named)


def _writes_whole(shown: ShownTool) -> bool:
    """Whether its calls give the whole text of a file."""
    properties = shown.properties
    return any(name in properties for name in CONTENTS) and any(name in properties for name in PATHS)


def _restrict_paths(shown: ShownTool, bounds: ToolConstraints) -> ShownTool | None:
    """A tool that writes whole files, restricted to files that were read or that the user names."""
    named = [name for name in read_request(bounds.request).files if not _is_among(name, bounds.short)]
    files = [*bounds.short, *(name for name in named if not _is_among(name, bounds.written))]
    return _constrain(shown, PATHS, {"enum": files}) if files and _writes_whole(shown) else None


def _naming_tool(shown: ShownTool, bounds: ToolConstraints) -> ShownTool | None:
    """A tool that changes files, whose call names one of those that were read and brings no text; None where
    there are no such files or it has other parameters."""
    properties = shown.properties
    texts = set(properties) - set(PATHS)
    if not bounds.made or not texts or len(properties) - len(texts) != 1 or not texts <= _TEXTS:
        return None
    paths = {"type": "string", "enum": list(bounds.made)}
    constraint = {name: {"const": ""} if name in texts else paths for name in properties}
    return replace(shown, parameters={**shown.parameters, "properties": constraint}, grounded=frozenset())


def _is_naming(shown: ShownTool) -> bool:
    return {"const": ""} in shown.properties.values()


def _is_among(name: str, paths: Sequence[str]) -> bool:
    """Whether the named file is one of `paths`."""
    return any(f"/{path}".endswith(f"/{name.removeprefix('./')}") for path in paths)


def _reading_tools(shown: Sequence[ShownTool], bounds: ToolConstraints) -> tuple[ShownTool, ...]:
    """Tools for reading files; if there are none, command tools restricted to reading commands."""
    made = tuple(filter(reads_files, shown))
    constraint = {
        "pattern": _reading_command(_unread_files(bounds), whole=read_request(bounds.request).changes)
    }
    return made or tuple(r for s in shown if (r := _constrain(s, _COMMANDS, constraint)) is not None)


def _reading_command(files: Sequence[str], *, whole: bool) -> str:
    """The pattern of a command that prints one of `files` or, unless it must be shown `whole`, a part of it
    or a folder. Searches are excluded, since a small model confuses their output with the file; so are names
    of folders, which it makes up."""
    named = "|".join(re.escape(name).replace("/", r"\/") for name in dict.fromkeys(files))
    return rf"^cat ({named})$" if whole else rf"^(ls|(cat|head -n [0-9]{{1,4}}) ({named}))$"


def reads_files(shown: ShownTool) -> bool:
    return not shown.tool.custom and bool(_READS & name_words(shown.name))


def may_read(shown: ShownTool) -> bool:
    """Whether the tool reads files or runs commands."""
    return reads_files(shown) or any(name in shown.properties for name in _COMMANDS)


def _limit_commands(shown: ShownTool) -> ShownTool:
    """The tool with commands of a bounded length."""
    return _constrain(shown, _COMMANDS, {"maxLength": LONGEST_COMMAND}) or shown


def _constrain(shown: ShownTool, names: Sequence[str], constraint: Mapping[str, Any]) -> ShownTool | None:
    """The tool with the first of its parameters `names` constrained; None where it has none of them or they
    are constrained already."""
    for name in names:
        schema = shown.properties.get(name)
        if (
            isinstance(schema, Mapping)
            and schema.get("type") == "string"
            and not schema.keys() & _CONSTRAINED
        ):
            changed = {**shown.properties, name: {**schema, **constraint}}
            return replace(shown, parameters={**shown.parameters, "properties": changed})
    return None
