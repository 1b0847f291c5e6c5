"""Performs instructions that only rename something, without a model.

The whole instruction must be the renaming, the old name must be defined exactly once and the new one must be
unused; otherwise nothing is done here and a model is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from keystroke.analysis.outline import OutlineUnit, UnitKind, outline, walk_units
from keystroke.analysis.syntax import language_of, parse_tree, walk

_RENAME = re.compile(
    r"\s*(?:please\s+)?rename\s+(?:the\s+)?(?P<kind>function|method|class|constant|attribute|field|property|"
    r"struct|type|interface|enum|module[- ]level variable|global variable)?\s*"
    r"[`'\"]?(?P<old>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)?)(?:\(\))?[`'\"]?\s+(?:to|into|as)\s+"
    r"[`'\"]?(?P<new>[A-Za-z_]\w*)(?:\(\))?[`'\"]?"
    r"(?:\s+(?:everywhere|throughout|in all (?:the )?files"
    r"|in the (?:whole |entire )?(?:file|module|project|code)"
    r"|(?:and|including) (?:update )?(?:all )?(?:its |the )?(?:callers|uses|usages|references|call sites)))*"
    r"\s*[.!]?\s*",
    re.IGNORECASE,
)
_MEMBERS = ("attribute", "field", "property", "method")
_SHORTHAND = (
    "shorthand_property_identifier",
    "shorthand_property_identifier_pattern",
    "field_initializer_shorthand",
)


@dataclass(frozen=True, slots=True)
class RenameInstruction:
    """`qualified` is the old name as written (`Account.transfer`); `member`: it belongs to a class."""

    qualified: str
    new: str
    member: bool

    @property
    def old(self) -> str:
        return self.qualified.rpartition(".")[2]


def parse_renaming(instruction: str) -> RenameInstruction | None:
    """The renaming that the instruction consists of; None for any other instruction."""
    found = _RENAME.fullmatch(instruction)
    if found is None:
        return None
    member = (found["kind"] or "").lower() in _MEMBERS or "." in found["old"]
    return RenameInstruction(found["old"], found["new"], member)


def apply_renaming(files: Mapping[str, str], instruction: str) -> dict[str, str] | None:
    """The files that the renaming changes; None where the instruction is not certainly a renaming."""
    renaming = parse_renaming(instruction)
    if renaming is None:
        return None
    old, new, member = renaming.old, renaming.new, renaming.member
    if old == new or any(re.search(rf"\b{new}\b", text) for text in files.values()):
        return None
    if not _defined_once(files, old, member=member):
        return None
    changed = {path: _replace_name(files, path, old, new, member=member) for path in files}
    if any(text is None for text in changed.values()):
        return None
    result = {path: text for path, text in changed.items() if text is not None and text != files[path]}
    return result or None


def ambiguous_definitions(files: Mapping[str, str], instruction: str) -> str | None:
    """A question for the user where the instruction is a renaming and several unrelated definitions have the
    name; None otherwise."""
    renaming = parse_renaming(instruction)
    if renaming is None:
        return None
    defining = (UnitKind.FUNCTION, UnitKind.CLASS)
    found = [place for place in find_definitions(files, renaming) if place[1].kind in defining]
    if len({(path, unit.name) for path, unit in found}) < 2:
        return None
    return f"{describe_definitions(renaming, found)}; say which one, as CLASS.NAME or in one file"


def find_definitions(files: Mapping[str, str], renaming: RenameInstruction) -> list[tuple[str, OutlineUnit]]:
    """The parts of the files that have the old name, each with its file."""
    return [
        (path, unit)
        for path, text in files.items()
        for unit in walk_units(outline(text, language_of(path)))
        if unit.short == renaming.old and f".{unit.name}".endswith(f".{renaming.qualified}")
    ]


def describe_definitions(renaming: RenameInstruction, found: Sequence[tuple[str, OutlineUnit]]) -> str:
    listed = ", ".join(f"{path} line {unit.start + 1} ({unit.name})" for path, unit in found[:5])
    return f"{renaming.old} is defined {len(found)} times: {listed}"


def _defined_once(files: Mapping[str, str], name: str, *, member: bool) -> bool:
    """Whether all uses of the name refer to one definition."""
    owners: set[str] = set()
    for path, text in files.items():
        language = language_of(path)
        if language is None:
            return False
        for unit in walk_units(outline(text, language)):
            if unit.short == name and (unit.name or unit.kind is not UnitKind.STATEMENT):
                owners.add(unit.name.rpartition(".")[0])
        if member:
            for unit in outline(text, language):
                inside = "\n".join(text.split("\n")[unit.start : unit.end])
                if unit.kind is UnitKind.CLASS and re.search(
                    rf"\b(?:self|this)\.{name}\s*(?::[^=\n]+)?=[^=]", inside
                ):
                    owners.add(unit.name)
    if member:
        return len(owners - {""}) == 1
    return owners == {""}


def _replace_name(files: Mapping[str, str], path: str, old: str, new: str, *, member: bool) -> str | None:
    """The file with the name changed; None where one of its uses is unclear."""
    text = files[path]
    modules = {name.rpartition("/")[2].partition(".")[0] for name in files}
    declared = _find_declarations(text, path, old) if member else set()
    places: list[int] = []
    for start, kind in _find_uses(text, path, old):
        before = text[:start].rstrip()
        dotted = before.endswith((".", "->", "::"))
        keyword = before.endswith(("(", ",")) and re.match(r"\s*=(?!=)", text[start + len(old) :])
        if kind in _SHORTHAND or keyword:
            return None
        if member and not dotted and text.count("\n", 0, start) not in declared:
            continue  # a variable of the same name
        if not member and dotted and re.split(r"\W+", before.rstrip(".:->"))[-1] not in modules:
            return None  # a member of something else
        places.append(start)
    for start in reversed(places):
        text = text[:start] + new + text[start + len(old) :]
    return text


def _find_declarations(text: str, path: str, name: str) -> set[int]:
    """The lines on which classes declare the member."""
    lines = text.split("\n")
    found: set[int] = set()
    for unit in walk_units(outline(text, language_of(path))):
        if unit.short == name and "." in unit.name:
            heads = (n for n in range(unit.start, unit.end) if lines[n].strip() == unit.header)
            found |= set(range(unit.start, next(heads, unit.start) + 1))
    return found


def _find_uses(text: str, path: str, name: str) -> Iterator[tuple[int, str]]:
    for node in walk(parse_tree(text, language_of(path) or "")):
        if "identifier" in node.kind() and not node.children() and node.text() == name:
            yield node.range().start.index, node.kind()
