"""Decides which of its tools a small model may call next, and with which arguments.

Models of one or two billion parameters act before they read, undo their work and repeat themselves. So they
first read a file that the user names, create and delete files only on request, and rewrite short files whole
instead of replacing lines. Larger models are not restricted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keystroke.assist.tool_calls.tools import ShownTool, Toolset

LONGEST_COMMAND = 600  # characters of a command by a small model: one that goes on repeats itself
SHORT_FILE = 60  # lines that a small model writes anew without losing any; more take longer than an edit

_FILE = r"[\w./-]*\w\.[A-Za-z]\w{0,7}"
_NAMED = re.compile(rf"(?<![\w@:/.-])(?!e\.g\b|i\.e\b){_FILE}(?![\w(/]|\.\w)")
_OBJECT = rf"(?:(?!in\b|to\b|from\b|of\b|into\b)\w+\s+){{0,3}}?[`'\"]?(?:files?\b|{_FILE})"
_DELETES = re.compile(rf"\b(?:delet|remov|eras|drop|unlink|rm\b|get rid of)\w*\s+{_OBJECT}", re.IGNORECASE)
_CREATES = re.compile(rf"\b(?:creat|writ|generat|sav|mak|new\b)\w*\s+{_OBJECT}", re.IGNORECASE)
_READS = frozenset(("read", "view", "cat", "open"))
_COMMAND = ("cmd", "command")
PATHS = ("path", "filePath", "file_path", "file")  # what tools call the file they are about
_CONTENTS = ("content", "contents", "file_text")
_SAID = frozenset(("pattern", "maxLength", "enum", "const"))  # of a parameter, by whoever offers the tool


@dataclass(frozen=True, slots=True)
class ToolConstraints:
    """What a conversation says of the tools. `only`: of these, by the names they were offered under. `seen`:
    lines that may be quoted. `asked`: the user's last words. `spent`: tools that led nowhere. `written`: the
    files that this turn wrote; `copied`: those it wrote just as they were. `short`: files that were read
    whole and are short. `acted`: whether the turn has called anything. `closed`: whether, with all of them
    spent, no tool is left; else those spent are open again."""

    only: Collection[str] | None = None
    seen_lines: Sequence[str] = ()
    request: str = ""
    exhausted: Collection[str] = ()
    written: Sequence[str] = ()
    copied: Sequence[str] = ()
    short: Sequence[str] = ()
    has_acted: bool = True
    closed: bool = False


def usable_tools(toolset: Toolset, bounds: ToolConstraints) -> Toolset:
    """Of the tools that a model is shown, those that it may call now; none where all led nowhere and the
    bounds are `closed`."""
    allowed = tuple(s for s in toolset.shown if bounds.only is None or s.tool.name in bounds.only)
    if must_read_first(toolset, bounds):
        return replace(toolset, shown=_readers(allowed, bounds.request))
    if toolset.short:
        allowed = tuple(map(_bounded, allowed))
        if not _CREATES.search(bounds.request):
            allowed = tuple(_rewriting(s, bounds) or s for s in allowed)
    whole = bounds.short and len(bounds.seen_lines) <= SHORT_FILE and any(map(_writes_whole, allowed))
    usable = tuple(s for s in allowed if _usable(s, bounds) and not (whole and s.grounded))
    fresh = tuple(s for s in usable if s.tool.name not in bounds.exhausted)
    if bounds.closed and bounds.exhausted and allowed:
        return replace(toolset, shown=fresh)
    return replace(toolset, shown=fresh or usable or allowed)


def must_read_first(toolset: Toolset, bounds: ToolConstraints) -> bool:
    """Whether the next answer must read a file: the user names one, and nobody has looked."""
    if not toolset.short or bounds.has_acted or bounds.seen_lines or not named_files(bounds.request):
        return False
    if _CREATES.search(bounds.request) or _DELETES.search(bounds.request):
        return False
    allowed = [s for s in toolset.shown if bounds.only is None or s.tool.name in bounds.only]
    return bool(_readers(allowed, bounds.request))


def named_files(asked: str) -> list[str]:
    """The files that a request names: words with a short ending behind a dot."""
    return [m[0] for m in _NAMED.finditer(asked)]


def _usable(shown: ShownTool, bounds: ToolConstraints) -> bool:
    """Lines nobody has read cannot be replaced, nor files be edited once all that the user names were; a file
    is deleted where the user speaks of that, and written whole where the user speaks of creating, or names no
    file, or one was read: else it is written over by one who has not looked."""
    if shown.grounded and not bounds.seen_lines:
        return False
    if shown.is_edit and bounds.written and _all_written(bounds):
        return False
    if shown.is_edit and shown.name == "delete_file":
        return bool(_DELETES.search(bounds.request))
    if shown.is_edit and _writes_whole(shown):
        asked = bounds.request
        wanted = not named_files(asked) or bool(_CREATES.search(asked))
        looked = 0 < len(bounds.seen_lines) <= SHORT_FILE and not bounds.written and not bounds.copied
        return wanted or bool(bounds.short) or looked
    return True


def _all_written(bounds: ToolConstraints) -> bool:
    """Whether the request names files, and each of them was written."""
    named = named_files(bounds.request)
    return bool(named) and all(_among(name, bounds.written) for name in named)


def _writes_whole(shown: ShownTool) -> bool:
    """Whether its calls give the whole text of a file."""
    properties = shown.parameters.get("properties", ())
    return any(name in properties for name in _CONTENTS) and any(name in properties for name in PATHS)


def _rewriting(shown: ShownTool, bounds: ToolConstraints) -> ShownTool | None:
    """The tool, if it writes whole files, held to those that were read, and to others that the user names:
    none is written over by one who has not looked."""
    named = [name for name in named_files(bounds.request) if not _among(name, bounds.short)]
    files = [*bounds.short, *(name for name in named if not _among(name, bounds.written))]
    return _held(shown, PATHS, {"enum": files}) if files and _writes_whole(shown) else None


def _among(name: str, paths: Sequence[str]) -> bool:
    """Whether a file that the user names so is one of `paths`."""
    return any(f"/{path}".endswith(f"/{name.removeprefix('./')}") for path in paths)


def _readers(shown: Sequence[ShownTool], asked: str) -> tuple[ShownTool, ...]:
    """Those made for reading files; where there are none, those that run commands, held to such as read."""
    made = tuple(filter(reads_files, shown))
    held = {"pattern": _looking(named_files(asked))}
    return made or tuple(r for s in shown if (r := _commanded(s, held)) is not None)


def _looking(files: Sequence[str]) -> str:
    """The pattern of a command that shows the text of one of `files`, or what is in a folder. Its text and
    nothing else: of a search a small model takes the name of a file, or a line's number, for the file. The
    name and nothing before it: it makes folders up."""
    named = "|".join(re.escape(name).replace("/", r"\/") for name in dict.fromkeys(files))
    return rf"^(ls|(cat|head -n [0-9]{{1,4}}) ({named}))$"


def reads_files(shown: ShownTool) -> bool:
    """Whether the tool is made for reading files."""
    return not shown.tool.custom and bool(_READS & set(_words(shown.name)))


def may_read(shown: ShownTool) -> bool:
    """Whether the tool reads files or runs commands, which can."""
    return reads_files(shown) or any(name in shown.parameters.get("properties", ()) for name in _COMMAND)


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def _bounded(shown: ShownTool) -> ShownTool:
    """The tool with commands of a bounded length."""
    return _commanded(shown, {"maxLength": LONGEST_COMMAND}) or shown


def _commanded(shown: ShownTool, held: Mapping[str, Any]) -> ShownTool | None:
    """The tool with its command held to a schema; None where it takes none, or one that says more already."""
    return _held(shown, _COMMAND, held)


def _held(shown: ShownTool, names: Sequence[str], held: Mapping[str, Any]) -> ShownTool | None:
    """The tool with the first of its parameters `names` held to a schema; None where it has none of them, or
    one that says more already."""
    properties = shown.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return None
    for name in names:
        schema = properties.get(name)
        if isinstance(schema, Mapping) and schema.get("type") == "string" and not schema.keys() & _SAID:
            changed = {**properties, name: {**schema, **held}}
            return replace(shown, parameters={**shown.parameters, "properties": changed})
    return None
