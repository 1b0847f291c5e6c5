"""Adds the imports that a fix needs, and removes those it leaves unused in Go, where they are errors."""

from __future__ import annotations

import re
import sys

from keystroke.analysis.audit.flow.knowledge import family_of
from keystroke.text import Edit

_PYTHON = re.compile(r"^(?:import|from)\s", re.MULTILINE)
_GO_GROUP = re.compile(r"^import\s*\(\s*\n", re.MULTILINE)
_GO_SINGLE = re.compile(r"^import\s+[^\n(]*\"[^\n]*\n", re.MULTILINE)
_GO_PACKAGE = re.compile(r"^package\s+\w+[^\n]*\n", re.MULTILINE)
_GO_SPEC = re.compile(r"^[ \t]*(?:import\s+)?(?:(\w+|\.|_)\s+)?\"([^\"\n]+)\"[ \t]*(?:\r?\n|$)", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(if|endif|include)\w*\b[^\n]*(?:\n|$)", re.MULTILINE)
_FUTURE = re.compile(r"^from __future__ import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


_IMPORTED = {
    "python": re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w.]+)", re.MULTILINE),
    "javascript": re.compile(r"(?:\brequire\s*\(\s*|\bfrom\s+|\bimport\s+)[\"'](?:node:)?([^\"'\n]+)[\"']"),
    "go": re.compile(r"^[ \t]*(?:import\s+)?(?:[\w.]+\s+)?\"([\w./-]+)\"[ \t]*$", re.MULTILINE),
    "java": re.compile(r"^[ \t]*import\s+(?:static\s+)?([\w.]+)", re.MULTILINE),
    "c": re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"\n]+)", re.MULTILINE),
}


def imported(text: str, language: str) -> frozenset[str]:
    """The paths that a text imports; of Python's future features their names."""
    paths = frozenset(_IMPORTED[family_of(language)].findall(text))
    if "__future__" in paths:
        names = " ".join(_FUTURE.findall(text))
        return paths.union(f"__future__.{name}" for name in re.findall(r"\w+", names))
    return paths


def bound_name(need: str, language: str) -> str:
    """The name that an import binds; "" for none."""
    if language == "python":
        return need.split()[-1]
    if language == "go":
        return need.rsplit("/", 1)[-1]
    return ""


def import_edit(text: str, language: str, need: str) -> Edit | None:
    """The edit that adds an import; None if the file has it."""
    if language == "python":
        if re.search(rf"^{re.escape(need)}\s*(?:#.*)?$", text, re.MULTILINE):
            return None
        at = python_import_offset(text)
        return Edit(at, at, f"{need}\n")
    if language == "go":
        if any(found[2] == need and not found[1] for found in _GO_SPEC.finditer(text)):
            return None
        group = _GO_GROUP.search(text)
        if group is not None:
            return Edit(group.end(), group.end(), f'\t"{need}"\n')
        single = _GO_SINGLE.search(text) or _GO_PACKAGE.search(text)
        at = single.end() if single is not None else 0
        return Edit(
            at,
            at,
            f'import "{need}"\n' if single is None or "import" in single.group() else f'\nimport "{need}"\n',
        )
    if language in ("c", "cpp"):
        if re.search(rf"^[ \t]*#[ \t]*include[ \t]*{re.escape(need)}", text, re.MULTILINE):
            return None
        at = _include_offset(text)
        return Edit(at, at, f"#include {need}\n")
    return None


def _include_offset(text: str) -> int:
    """Behind the first include that is in the fewest conditions: Python.h and config.h must stay first."""
    depth, best, at = 0, sys.maxsize, 0
    for found in _DIRECTIVE.finditer(text):
        if found[1] != "include":
            depth += 1 if found[1] == "if" else -1
        elif depth < best:
            best, at = depth, found.end()
    return at


def python_import_offset(text: str) -> int:
    """The offset of a new Python import: before the first one, or after comments and docstring."""
    at = 0
    for line in text.splitlines(keepends=True):
        if not line.startswith("#"):
            break
        at += len(line)
    doc = re.compile(
        r'\s*[rR]?("""|\'\'\').*?\1[^\n]*\n?|\s*"[^"\n]*"[ \t]*\n|\s*\'[^\'\n]*\'[ \t]*\n', re.DOTALL
    ).match(text, at)
    at = doc.end() if doc else at
    future = re.compile(r"\s*from\s+__future__\s+import\b[^\n(]*(?:\([^)]*\)[^\n]*)?\n?")
    while (found := future.match(text, at)) is not None:
        at = found.end()
    first = _PYTHON.search(text, at)
    return first.start() if first is not None else at


# Comments and strings, in which a name is not used.
_GO_TEXT = re.compile(r"//[^\n]*|/\*.*?\*/|`[^`]*`|\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)'", re.DOTALL)


def unused_imports(before: str, after: str) -> list[Edit]:
    """Edits of `after` that remove the Go imports used in `before` and unused in `after`."""
    edits: list[Edit] = []
    code = _GO_TEXT.sub("", before)
    for found in _GO_SPEC.finditer(after):
        name = found[1] or found[2].rsplit("/", 1)[-1]
        if name in ("_", ".") or not name.isidentifier():
            continue
        used = re.compile(rf"\b{re.escape(name)}\.")
        if used.search(code) and not used.search(
            _GO_TEXT.sub("", _without(after, found.start(), found.end()))
        ):
            edits.append(Edit(found.start(), found.end(), ""))
    return edits


def _without(text: str, start: int, end: int) -> str:
    return text[:start] + text[end:]
