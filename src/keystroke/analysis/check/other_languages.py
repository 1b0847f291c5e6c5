"""Syntax errors in languages other than Python.

Grammars have gaps, so an error is reported only if the parser has read the file without errors before, or the
saved file parses; templates are never reported. Every fix was parsed: the text has fewer errors with it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from keystroke.analysis.check.diagnostic import Diagnostic, Fix, Level
from keystroke.analysis.syntax import language_name, language_of, parse_tree
from keystroke.text import Edit, apply_edits

_TREES = {"javascript", "typescript", "tsx", "go", "java", "c", "cpp"}
_MACROS = {"c", "cpp"}  # languages with a preprocessor
LANGUAGES = frozenset({*_TREES, "json", "yaml", "toml"})
_PREPROCESSED = re.compile(
    r"^\s*#\s*(?:define|if|ifdef|ifndef|undef)\b|\b(?:[A-Z][A-Z0-9_]{2,}|__?\w+)\b|\$\{", re.M
)
_TEMPLATED = re.compile(r"\{\{|\{%|<%|\$\{\{|<<<<<<<")
_COMMENTED = re.compile(r"(?:^|\s)(?://|/\*)")  # JSON as some configuration files have it
_LENIENT = re.compile(
    r"(?:^|/)(?:[tj]sconfig[^/]*\.json|\.[^/]*rc(?:\.json)?|\.vscode/.*|.*\.jsonc|.*\.code-\w+"
    r"|devcontainer\.json|\.swcrc)$"
)
_OPENERS, _CLOSERS = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}
_MAX_SAVED = 2_000_000
_SHOWN = 20  # errors reported at once; one mistake causes many


@dataclass(frozen=True, slots=True)
class SyntaxSlip:
    """A syntax error; `missing` is the token that the parser expects there."""

    message: str
    start: int
    end: int
    missing: str = ""


def other_language(path: str | Path) -> str | None:
    """The language of a file, if its syntax can be checked."""
    if Path(path).suffix.lower() == ".toml":
        return "toml"
    language = language_of(str(path))
    return language if language in LANGUAGES else None


def syntax_errors(text: str, path: str | Path) -> tuple[Diagnostic, ...]:
    language = other_language(path)
    if language is None or not text.strip():
        return ()
    found = find_syntax_slips(text, language)
    if not found:
        mark_parsed(path)
        return ()
    if _is_silenced(text, language, Path(path)):
        return ()
    return tuple(
        Diagnostic("syntax-error", Level.ERROR, item.message, item.start, item.end, item.missing)
        for item in found[:_SHOWN]
    )


def find_syntax_slips(text: str, language: str) -> list[SyntaxSlip]:
    """The syntax errors that the parser of a language reports, in order."""
    if language == "json":
        return list(_json_slips(text))
    if language == "toml":
        return list(_toml_slips(text))
    if language == "yaml":
        return list(_yaml_slips(text))
    return list(_tree_slips(text, language))


def other_language_fixes(text: str, found: Diagnostic, path: str | Path, limit: int) -> tuple[Fix, ...]:
    """Fixes with which the text has fewer errors."""
    language = other_language(path)
    if language is None:
        return ()
    before = len(find_syntax_slips(text, language))
    kept: list[Fix] = []
    for fix in _candidate_fixes(text, found, language):
        if len(kept) < limit and len(find_syntax_slips(apply_edits(text, fix.edits), language)) < before:
            kept.append(fix)
    return tuple(kept)


def _candidate_fixes(text: str, found: Diagnostic, language: str) -> Iterator[Fix]:
    if found.subject:
        end = len(text[: found.start].rstrip())
        for at in dict.fromkeys((end, found.start)):
            yield Fix(f"Add `{found.subject}`", (Edit(at, at, found.subject),))
    if language == "json":
        comma = re.compile(r",\s*$").search(text, 0, found.start + 1) or re.compile(r",\s*(?=[\]}])").search(
            text
        )
        if comma:
            yield Fix("Remove the comma", (Edit(comma.start(), comma.start() + 1, ""),))
        end = len(text[: found.start].rstrip())
        yield Fix("Add a comma", (Edit(end, end, ","),))
    if text[found.start : found.start + 1] in _CLOSERS:
        yield Fix("Remove the bracket that closes nothing", (Edit(found.start, found.start + 1, ""),))
    opener = text[found.start : found.start + 1]
    if opener in _OPENERS:
        end = len(text.rstrip())
        line = text.find("\n", found.start)
        line = len(text) if line < 0 else line
        for at in dict.fromkeys((len(text[:line].rstrip()), len(text[:line].rstrip(" \t;,")), end)):
            if at > found.start:
                new = f"\n{_OPENERS[opener]}" if at == end and opener == "{" else _OPENERS[opener]
                yield Fix(f"Close with `{_OPENERS[opener]}`", (Edit(at, at, new),))


_clean: OrderedDict[str, None] = OrderedDict()  # files that parsed whole at some time
_REMEMBERED = 1000


def mark_parsed(path: str | Path) -> None:
    """Record that the grammar parsed this file without errors, so that later errors are reported."""
    if Path(path).is_absolute():
        _clean[str(path)] = None
        _clean.move_to_end(str(path))
        while len(_clean) > _REMEMBERED:
            _clean.popitem(last=False)


def _is_silenced(text: str, language: str, path: Path) -> bool:
    if language == "json":
        return bool(_LENIENT.search(path.as_posix()) or _COMMENTED.search(text) or _TEMPLATED.search(text))
    if language in ("yaml", "toml"):
        return _TEMPLATED.search(text) is not None
    if str(path) in _clean:
        return False
    saved = _saved_file_parses(path, language)
    if saved is None:
        return language in _MACROS and _PREPROCESSED.search(text) is not None
    return not saved


def _saved_file_parses(path: Path, language: str) -> bool | None:
    """Whether the saved file parses; None if it does not exist or is empty."""
    try:
        info = path.stat()
    except (OSError, ValueError):
        return None
    if not info.st_size:
        return None
    return info.st_size <= _MAX_SAVED and _parses(path, language, info.st_mtime_ns, info.st_size)


@lru_cache(maxsize=256)
def _parses(path: Path, language: str, _stamp: int, _size: int) -> bool:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError):
        return False
    return not find_syntax_slips(text, language)


def _json_slips(text: str) -> Iterator[SyntaxSlip]:
    mark = len(text) - len(text.removeprefix("\ufeff"))
    try:
        json.loads(text[mark:])
    except json.JSONDecodeError as error:
        at = min(error.pos + mark, max(0, len(text) - 1))
        yield SyntaxSlip(f"{error.msg}", at, min(at + 1, len(text)))
    except RecursionError:
        return


def _toml_slips(text: str) -> Iterator[SyntaxSlip]:
    try:
        tomllib.loads(text.replace("\r\n", "\n"))
    except tomllib.TOMLDecodeError as error:
        words, _, place = str(error).partition(" (at ")
        numbers = [int(number) for number in re.findall(r"\d+", place)]
        at = _offset_of(text, numbers[0] - 1, numbers[1] - 1) if len(numbers) == 2 else max(0, len(text) - 1)
        yield SyntaxSlip(words, at, min(at + 1, len(text)))
    except RecursionError:
        return


def _yaml_slips(text: str) -> Iterator[SyntaxSlip]:
    """An error only if both parsers fail: one knows only YAML 1.1, the other is lenient."""
    if not parse_tree(text, "yaml").find_all(kind="ERROR"):
        return
    import yaml  # type: ignore[import-untyped] # only where it is needed: a tenth of a second

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        for _ in yaml.parse(text, Loader=loader):
            pass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = _offset_of(text, mark.line, mark.column) if mark is not None else 0
        yield SyntaxSlip((error.problem or "not valid YAML").capitalize(), at, min(at + 1, len(text)))
    except (yaml.YAMLError, RecursionError):
        return


def _tree_slips(text: str, language: str) -> Iterator[SyntaxSlip]:
    whole = text if text.endswith("\n") else f"{text}\n"  # a missing final newline is no error
    root = parse_tree(whole, language)
    found: list[SyntaxSlip] = []
    for node in root.find_all(kind="ERROR"):
        span = node.range()
        found.append(_describe_error(text, node.children(), span.start.index, span.end.index, language))
    for node in root.find_all(regex="^$"):
        kind, at = node.kind(), node.range().start.index
        if node.is_leaf() and not kind.isidentifier() and kind.strip() and at <= len(text):
            found.append(SyntaxSlip(f"Missing `{kind}`", at, min(at + 1, len(text)), kind))
    yield from sorted(found, key=lambda item: item.start)


def _describe_error(text: str, children: list[object], start: int, end: int, language: str) -> SyntaxSlip:
    """The message of an error node: an unmatched bracket if there is one."""
    opened: list[tuple[str, int]] = []
    for child in children:
        kind, at = child.kind(), child.range().start.index  # type: ignore[attr-defined]
        if kind in _OPENERS:
            opened.append((kind, at))
        elif kind in _CLOSERS:
            if not opened or _OPENERS[opened[-1][0]] != kind:
                return SyntaxSlip(f"`{kind}` closes nothing", at, at + 1)
            opened.pop()
    if opened:
        sign, at = opened[-1]
        return SyntaxSlip(f"`{sign}` is never closed", at, at + 1)
    end = min(end, len(text))
    line = text.find("\n", start)
    last = min(end, line if line >= 0 else end)
    words = text[start:last].strip()
    shown = f"`{words[:40]}` is not expected here" if words else "this cannot be read"
    return SyntaxSlip(f"{shown} ({language_name(language)})", start, max(last, min(start + 1, len(text))))


def _offset_of(text: str, line: int, column: int) -> int:
    start = 0
    for _ in range(line):
        start = text.find("\n", start) + 1
        if not start:
            return max(0, len(text) - 1)
    return min(start + column, len(text))
