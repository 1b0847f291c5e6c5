"""Puts back definitions that a rewrite left out, moved or wrote alone.

Models that are asked to add a method often write only the method, or the class with only that method in it.
"""

from __future__ import annotations

import re
import textwrap

from keystroke.analysis.outline import OutlineUnit, UnitKind, outline, walk_units
from keystroke.analysis.syntax import INDENTED

_DEFINES = (UnitKind.FUNCTION, UnitKind.CLASS)


def add_definitions(written: str, inside: str, language: str | None) -> str:
    """The rewritten part. If the model only wrote new definitions, they are appended to the old text."""
    old, new = _defined_names(inside, language), _defined_names(written, language)
    if (
        language is None
        or not old
        or not new
        or set(old) & set(new)
        or not _only_definitions(written, language)
    ):
        return written
    classes = [unit for unit in outline(textwrap.dedent(inside), language) if unit.kind is UnitKind.CLASS]
    body = textwrap.dedent(written).strip("\n")
    margin = _least_indent(inside)
    if len(classes) == 1 and _is_method(body, language):
        # A method for the only class in the part.
        members = [line for line in inside.split("\n")[1:] if line.strip()]
        margin = _least_indent("\n".join(members)) if members else f"{margin}    "
        text = textwrap.indent(body, margin, lambda line: bool(line.strip()))
        if language not in INDENTED:
            head, brace, tail = inside.rstrip().rpartition("}")
            return f"{head.rstrip()}\n\n{text}\n{_least_indent(inside)}{brace}{tail}\n" if brace else written
        return f"{inside.rstrip()}\n\n{text}\n"
    gap = "\n\n\n" if language == "python" and not margin else "\n\n"
    text = textwrap.indent(body, margin, lambda line: bool(line.strip()))
    return f"{inside.rstrip()}{gap}{text}\n"


def restore_lost(old: str, new: str, language: str | None) -> str:
    """`new` with the definitions of `old` that it left out, each after its former predecessor."""
    for unit in find_lost(old, new, language):
        new = _put_back(old, new, unit, language)
    return new


def find_lost(old: str, new: str, language: str | None) -> list[OutlineUnit]:
    """Definitions of the old text that the new one does not have, outermost first."""
    if language is None:
        return []
    have = {unit.name for unit in walk_units(outline(new, language))}
    result: list[OutlineUnit] = []
    for unit in _definitions(old, language):
        inside = any(other.start <= unit.start and unit.end <= other.end for other in result)
        if unit.name not in have and not inside:
            result.append(unit)
    return result


def find_duplicate(old: str, new: str, language: str | None) -> str | None:
    """A name that the new text defines twice where the old one did once; None where there is none."""
    before = [unit.name for unit in _definitions(old, language)]
    after = [unit.name for unit in _definitions(new, language)]
    return next((name for name in after if after.count(name) > max(1, before.count(name))), None)


def find_stray_method(old: str, new: str, language: str | None) -> str | None:
    """A new Python function that takes `self` and is in no class, in a file that had none of that kind."""
    if language != "python" or _loose_methods(old):
        return None
    return next(iter(_loose_methods(new)), None)


def _loose_methods(text: str) -> list[str]:
    lines = text.split("\n")
    takes_self = re.compile(r"^(?:async\s+)?def \w+\(\s*self\b", re.MULTILINE)
    return [
        unit.name
        for unit in outline(text, "python")
        if unit.kind is UnitKind.FUNCTION and takes_self.search("\n".join(lines[unit.start : unit.end]))
    ]


def _definitions(text: str, language: str | None) -> list[OutlineUnit]:
    return [unit for unit in walk_units(outline(text, language)) if unit.kind in _DEFINES and unit.name]


def _put_back(old: str, new: str, unit: OutlineUnit, language: str | None) -> str:
    source, target = old.splitlines(keepends=True), new.splitlines(keepends=True)
    text = source[unit.start : unit.end]
    target = _remove_copy(target, "".join(text), unit, language)
    owner = unit.name.rpartition(".")[0]
    siblings = [
        u for u in walk_units(outline(old, language)) if u.name.rpartition(".")[0] == owner and u.name
    ]
    there = {u.name: u for u in walk_units(outline("".join(target), language)) if u.name}
    at: int | None = None
    for sibling in siblings:
        if sibling.start >= unit.start:
            break
        if sibling.name in there:
            at = there[sibling.name].end
    if at is None:
        later = [s for s in siblings if s.start > unit.start and s.name in there]
        at = there[later[0].name].start if later else None
        if at is not None:
            return "".join([*target[:at], *text, *_blank_lines_above(source, unit), *target[at:]])
    if at is None:
        at = there[owner].end if owner in there else len(target)
    if target and at and not target[at - 1].endswith("\n"):
        target[at - 1] += "\n"
    return "".join([*target[:at], *_blank_lines_above(source, unit), *text, *target[at:]])


def _remove_copy(target: list[str], text: str, unit: OutlineUnit, language: str | None) -> list[str]:
    """`target` without the same definition under another owner, such as a function moved into a class."""
    wanted = text.split()
    for other in walk_units(outline("".join(target), language)):
        elsewhere = other.kind is unit.kind and other.short == unit.short and other.name != unit.name
        if elsewhere and "".join(target[other.start : other.end]).split() == wanted:
            start = other.start
            while start > 0 and not target[start - 1].strip():
                start -= 1
            return [*target[:start], *target[other.end :]]
    return target


def _blank_lines_above(source: list[str], unit: OutlineUnit) -> list[str]:
    """The blank lines that stood above a definition."""
    start = unit.start
    while start > 0 and not source[start - 1].strip():
        start -= 1
    return source[start : unit.start]


def _defined_names(text: str, language: str | None) -> list[str]:
    return [
        unit.short for unit in outline(textwrap.dedent(text), language) if unit.kind in _DEFINES and unit.name
    ]


def _only_definitions(text: str, language: str) -> bool:
    units = outline(textwrap.dedent(text), language)
    return bool(units) and all(unit.kind in _DEFINES or unit.kind is UnitKind.IMPORTS for unit in units)


def _is_method(body: str, language: str) -> bool:
    first = body.lstrip().split("\n", 1)[0]
    if language == "python":
        return bool(
            re.match(r"(?:@\w[\w.]*(?:\(.*\))?\s*)?$|(?:async\s+)?def \w+\(\s*(?:self|cls)\b", first)
        ) or ("def " in body and bool(re.search(r"def \w+\(\s*(?:self|cls)\b", body)))
    return language in ("javascript", "typescript", "tsx", "java", "csharp", "kotlin", "cpp", "swift", "php")


def _least_indent(text: str) -> str:
    indents = [line[: len(line) - len(line.lstrip())] for line in text.split("\n") if line.strip()]
    return min(indents, key=len, default="")
