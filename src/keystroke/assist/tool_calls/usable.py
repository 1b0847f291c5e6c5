"""Decides which of its tools a small model may call next, and with which arguments.

Models of one or two billion parameters act before they read, undo their work and repeat themselves. So they
first read a file that the user names, then change it if that was asked for, and create and delete files only
on request. A call that changes a file which was read only names the file: the server makes its text. Larger
models are not restricted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keystroke.assist.tool_calls.tools import ShownTool, Toolset

LONGEST_COMMAND = 600  # characters of a small model's command; longer ones repeat themselves
SHORT_FILE = 60  # lines that a small model rewrites without losing any

# Endings of files; `self.hits` and `strings.Join` are names of code.
_ENDINGS = (
    "pyi?|pyx|ipynb|[cm]?jsx?|[cm]?tsx?|vue|svelte|c|h|cc|hh|cpp|hpp|cxx|go|java|rs|rb|php|kts?|swift|cs|lua|"
    "sh|bash|zsh|ps1|bat|scala|html?|s?css|jsonl?|ya?ml|exs|hs|clj|dart|zig|jl|sql|proto|md|rst|txt|csv|tsv|"
    "toml|ini|cfg|xml|svg|tf|gradle|tex"
)
_FILE = rf"(?:[\w./-]*\w\.(?:{_ENDINGS})\b|[\w.-]*/[\w./-]*\w\.[A-Za-z]\w{{0,7}}\b)"
_NAMED = re.compile(rf"(?<![\w@:/.-])(?!(?:self|this|cls)\.){_FILE}(?![\w(/]|\.\w)")
_QUOTED = rf"[`'\"]?{_FILE}[`'\"]?"
_LISTED = rf"{_QUOTED}(?:(?:\s*,\s*and|\s*,|\s+and)\s+{_QUOTED})*"
# The files at the head of a request: "In a.py and b.py: ..."
_LEAD = re.compile(
    rf"\A\s*(?:in\s+(?:the\s+)?(?:files?\s+)?{_LISTED}\s*[:,]"
    rf"|(?:please\s+)?(?:edit|change|modify|update)\s+(?:the\s+)?(?:files?\s+)?{_LISTED}\s*:)\s+(?=\S)",
    re.IGNORECASE,
)
# A file, not its handler or its argument; "make a.py print x" makes no file.
_BEHIND = (
    rf"(?=\W*(?:\Z|[.,:;!?\n]|{_FILE}|"
    r"(?:in|at|from|named|called|and|or|if|when|that|which|with|under|for)\b))"
)
_WORDS = r"(?:(?!in\b|to\b|from\b|of\b|into\b)\w+\s+){0,3}?[`'\"]?"
_OBJECT = rf"{_WORDS}(?:files?\b{_BEHIND}|{_FILE})"
_MAKES_DO = rf"mak\w+\s+{_QUOTED}\s+(?!that\b|which\b|with\b|contain|for\b|to\b|and\b)\w"
_DELETES = re.compile(rf"\b(?:delet|remov|eras|drop|unlink|rm\b|get rid of)\w*\s+{_OBJECT}", re.IGNORECASE)
_CREATES = re.compile(rf"\b(?!{_MAKES_DO})(?:creat|writ|generat|sav|mak|new\b)\w*\s+{_OBJECT}", re.IGNORECASE)
# Behind the files at the head of a request; elsewhere it says what the code does with files.
_CLAUSE = r"(?:\A|[.,;!?\n]\s*|\band\s+|\bthen\s+)(?:please\s+|also\s+|then\s+|and\s+)*"
_DELETES_THEN = re.compile(rf"{_CLAUSE}(?:delete|remove|erase|drop|rm)\s+{_WORDS}{_FILE}", re.IGNORECASE)
_CREATES_THEN = re.compile(
    rf"{_CLAUSE}(?!{_MAKES_DO})(?:create|write|generate|save|make)\s+{_WORDS}{_FILE}", re.IGNORECASE
)
_CHANGES = re.compile(
    r"\b(?:must|should|shall|add|fix|correct|chang|replac|renam|remov|mak|let|use|implement|convert|refactor|mov|"
    r"rais|return|rewrit|updat|extend|support|handl|leav|keep|insert|set|allow|ignor|mend|repair)\w*\b",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"\?\s*$|^\W*(?:please\s+)?(?:what|why|how|where|which|who|explain|describe|summari[sz]e|review|tell)\b",
    re.IGNORECASE,
)
_LOOKS = re.compile(
    r"^\W*(?:in [^:]*:\s*)?(?:please\s+)?"
    r"(?:run|execute|show|list|print|read|open|look|find|search|count|check|test|compare|go)\b",
    re.IGNORECASE,
)
_MORE = re.compile(  # beyond a change; code may check, and raise an error then
    r"(?:[.,;!]|\band|\bthen)\s+(?:also\s+)?(?:run|execute|verify|check|test|commit|install|build|lint)\b"
    r"|[.,;]\s+then\b|\bpytest\b|\b(?:the|all|unit|a|your|our)\s+tests?\b",
    re.IGNORECASE,
)
_OF_TESTS = re.compile(r"(?:^|/)test_|_test\.|\.(?:test|spec)\.")
_READS = frozenset(("read", "view", "cat", "open"))
_COMMAND = ("cmd", "command")
PATHS = ("path", "filePath", "file_path", "file")  # parameter names for a file
_CONTENTS = ("content", "contents", "file_text")
_TEXTS = frozenset(
    (*_CONTENTS, "old", "new", "old_string", "new_string", "oldString", "newString", "old_str", "new_str")
)
_CONSTRAINED = frozenset(
    ("pattern", "maxLength", "enum", "const")
)  # keys of a schema that is already constrained


@dataclass(frozen=True, slots=True)
class ToolConstraints:
    """What the conversation implies for the tools. `only`: names of the allowed tools. `seen_lines`: lines
    that may be quoted. `request`: the user's last message. `exhausted`: tools that led nowhere. `written`:
    files that this turn wrote; `copied`: those it wrote unchanged; `known`: files that it had read when it
    wrote. `short`: short files that were read completely. `made`: files that were read completely and whose
    new text the server makes. `looked`: files that this turn tried to read; `absent`: those of them that are
    not there. `has_acted`: the turn has called a tool. `closed`: with all tools exhausted none is left;
    otherwise they become usable again."""

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
        return replace(toolset, shown=_readers(allowed, bounds))
    if toolset.short:
        allowed = tuple(map(_bounded, allowed))
        if not _creates(bounds.request):
            allowed = tuple(_rewriting(s, bounds) or s for s in allowed)
    whole = bounds.short and len(bounds.seen_lines) <= SHORT_FILE and any(map(_writes_whole, allowed))
    usable = tuple(s for s in allowed if _usable(s, bounds) and not (whole and s.grounded))
    if toolset.short and not _creates(bounds.request):
        usable = tuple(_naming(s, bounds) or s for s in usable)
    if must_edit_next(toolset, bounds) and (edits := tuple(filter(_is_naming, usable))):
        return replace(toolset, shown=edits)
    fresh = tuple(s for s in usable if s.tool.name not in bounds.exhausted)
    if bounds.closed and bounds.exhausted and allowed:
        return replace(toolset, shown=fresh)
    return replace(toolset, shown=fresh or usable or allowed)


def must_read_first(toolset: Toolset, bounds: ToolConstraints) -> bool:
    """Whether the next answer must read a file: the user names one and none was read, or asks for a change of
    several and one of them was not looked at yet."""
    if not toolset.short or not _unread(bounds):
        return False
    if _creates(bounds.request) or _deletes(bounds.request):
        return False
    begun = bounds.has_acted or bounds.seen_lines
    if begun and (bounds.written or bounds.copied or not (bounds.made or bounds.looked)):
        return False
    if begun and not _asks_for_change(bounds.request):
        return False
    allowed = [s for s in toolset.shown if bounds.only is None or s.tool.name in bounds.only]
    return any(not begun or s.tool.name not in bounds.exhausted for s in _readers(allowed, bounds))


def must_edit_next(toolset: Toolset, bounds: ToolConstraints) -> bool:
    """Whether the next answer must change a file: the user asks for a change of files that were all read, and
    nothing was written or tried in vain. A small model would rather show the change in words."""
    named = named_files(bounds.request)
    if not toolset.short or not bounds.made or bounds.written or bounds.copied or not named:
        return False
    if not _asks_for_change(bounds.request):
        return False
    known = (*bounds.made, *bounds.absent)
    if any(_OF_TESTS.search(name) or not _among(name, known) for name in named):
        return False
    allowed = [s for s in toolset.shown if bounds.only is None or s.tool.name in bounds.only]
    return any(_naming(s, bounds) is not None and s.tool.name not in bounds.exhausted for s in allowed)


def is_done(toolset: Toolset, bounds: ToolConstraints) -> bool:
    """Whether a change was all that was asked for, and it was made: every file that the user names was
    written, or was known when another one was. A small model goes on for thousands of tokens if it is
    let."""
    if not toolset.short or not bounds.closed or not bounds.written:
        return False
    named, known = named_files(bounds.request), (*bounds.written, *bounds.known, *bounds.absent)
    if not named or not all(_among(name, known) for name in named):
        return False
    return _asks_for_change(bounds.request) and not _MORE.search(bounds.request)


def _asks_for_change(asked: str) -> bool:
    if _ASKS.search(asked) or _creates(asked) or _deletes(asked):
        return False
    return _LOOKS.search(asked) is None or _CHANGES.search(asked) is not None


def _creates(asked: str) -> bool:
    """Whether a file is to be created."""
    rest = without_lead(asked)
    return (_CREATES if rest == asked else _CREATES_THEN).search(rest) is not None


def _deletes(asked: str) -> bool:
    """Whether a file is to be deleted."""
    rest = without_lead(asked)
    return (_DELETES if rest == asked else _DELETES_THEN).search(rest) is not None


def named_files(asked: str) -> list[str]:
    """The files that a request names: words with the ending of a file."""
    return [m[0] for m in _NAMED.finditer(asked)]


def without_lead(asked: str) -> str:
    """The request without the files at its head: what is to be done in them."""
    return _LEAD.sub("", asked, count=1)


def _unread(bounds: ToolConstraints) -> list[str]:
    """The files that the user names and nobody looked at."""
    known = (*bounds.made, *bounds.short, *bounds.looked)
    return [name for name in named_files(bounds.request) if not _among(name, known)]


def _usable(shown: ShownTool, bounds: ToolConstraints) -> bool:
    """Lines can be replaced only after they were read, and files edited until all named ones are written. A
    file is deleted only on request, and written whole where the user asks to create one, names none, or one
    was read."""
    if shown.grounded and not bounds.seen_lines:
        return False
    if shown.is_edit and bounds.written and _all_written(bounds):
        return False
    if shown.is_edit and shown.name == "delete_file":
        return _deletes(bounds.request)
    if shown.is_edit and _writes_whole(shown):
        asked = bounds.request
        wanted = not named_files(asked) or _creates(asked)
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
    """A tool that writes whole files, restricted to files that were read or that the user names."""
    named = [name for name in named_files(bounds.request) if not _among(name, bounds.short)]
    files = [*bounds.short, *(name for name in named if not _among(name, bounds.written))]
    return _held(shown, PATHS, {"enum": files}) if files and _writes_whole(shown) else None


def _naming(shown: ShownTool, bounds: ToolConstraints) -> ShownTool | None:
    """A tool that changes files, whose call names one of those that were read and brings no text; None where
    there are no such files or it has other parameters."""
    properties = shown.parameters.get("properties", {})
    texts = set(properties) - set(PATHS)
    if not bounds.made or not texts or len(properties) - len(texts) != 1 or not texts <= _TEXTS:
        return None
    paths = {"type": "string", "enum": list(bounds.made)}
    held = {name: {"const": ""} if name in texts else paths for name in properties}
    return replace(shown, parameters={**shown.parameters, "properties": held}, grounded=frozenset())


def _is_naming(shown: ShownTool) -> bool:
    return {"const": ""} in shown.parameters.get("properties", {}).values()


def _among(name: str, paths: Sequence[str]) -> bool:
    """Whether the named file is one of `paths`."""
    return any(f"/{path}".endswith(f"/{name.removeprefix('./')}") for path in paths)


def _readers(shown: Sequence[ShownTool], bounds: ToolConstraints) -> tuple[ShownTool, ...]:
    """Tools for reading files; if there are none, command tools restricted to reading commands."""
    made = tuple(filter(reads_files, shown))
    held = {"pattern": _looking(_unread(bounds), whole=_asks_for_change(bounds.request))}
    return made or tuple(r for s in shown if (r := _commanded(s, held)) is not None)


def _looking(files: Sequence[str], *, whole: bool) -> str:
    """The pattern of a command that prints one of `files` or, unless it must be shown `whole`, a part of it
    or a folder. Searches are excluded, since a small model confuses their output with the file; so are
    folders, which it invents."""
    named = "|".join(re.escape(name).replace("/", r"\/") for name in dict.fromkeys(files))
    return rf"^cat ({named})$" if whole else rf"^(ls|(cat|head -n [0-9]{{1,4}}) ({named}))$"


def reads_files(shown: ShownTool) -> bool:
    """Whether the tool reads files."""
    return not shown.tool.custom and bool(_READS & set(_words(shown.name)))


def may_read(shown: ShownTool) -> bool:
    """Whether the tool reads files or runs commands."""
    return reads_files(shown) or any(name in shown.parameters.get("properties", ()) for name in _COMMAND)


def _words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def _bounded(shown: ShownTool) -> ShownTool:
    """The tool with commands of a bounded length."""
    return _commanded(shown, {"maxLength": LONGEST_COMMAND}) or shown


def _commanded(shown: ShownTool, held: Mapping[str, Any]) -> ShownTool | None:
    """The tool with its command constrained; None where it has none or is constrained already."""
    return _held(shown, _COMMAND, held)


def _held(shown: ShownTool, names: Sequence[str], held: Mapping[str, Any]) -> ShownTool | None:
    """The tool with the first of its parameters `names` constrained; None where it has none of them or they
    are constrained already."""
    properties = shown.parameters.get("properties")
    if not isinstance(properties, Mapping):
        return None
    for name in names:
        schema = properties.get(name)
        if (
            isinstance(schema, Mapping)
            and schema.get("type") == "string"
            and not schema.keys() & _CONSTRAINED
        ):
            changed = {**properties, name: {**schema, **held}}
            return replace(shown, parameters={**shown.parameters, "properties": changed})
    return None
