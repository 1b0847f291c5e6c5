"""Chooses the lines an instruction is about, before a model is asked.

It compares names, words and line numbers of the instruction with the outline of the files, and reports
whether the choice is certain. If it is not, the caller asks the model to choose, or takes a larger region.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from keystroke.analysis.outline import OutlineUnit, UnitKind, outline, walk_units
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.mentions import (
    Mention,
    asks_for_definition,
    changes_value,
    is_common_word,
    line_spans,
    listed_names,
    name_words,
    read_mentions,
    stem,
)
from keystroke.assist.edit.rewrite import Region

CLASS = 60  # lines of a class that is rewritten whole where several of its members are chosen
CURSOR = 20  # lines above and below the cursor that are chosen where nothing else decides
_NEAR = 12  # lines between two regions that are merged
_ENOUGH = 2.0  # the least score
_SHARE = 0.6  # of the best score, for other parts to be chosen too
_USERS = 2  # parts that use a constant and are chosen in its place
_MOST = 6  # parts; more concern the whole file
_MEMBER = re.compile(r"\b(?:method|property|getter|setter|constructor)\b", re.IGNORECASE)
_TAIL = 12  # lines after the last definition that a new one includes: exports, a main part


@dataclass(frozen=True, slots=True)
class _Scored:
    named: float  # by its name or its lines
    content: float  # by the words in it
    path: str
    unit: OutlineUnit

    @property
    def score(self) -> float:
        return self.named + self.content


@dataclass(frozen=True, slots=True)
class RegionChoice:
    """Regions in the order of the files. `certain`: names or line numbers decided."""

    regions: tuple[Region, ...]
    certain: bool


def choose_regions(
    files: Mapping[str, str], instruction: str, *, near: tuple[str, int] | None = None
) -> RegionChoice:
    """The regions an instruction is about; none where nothing in the files matches it. `near`: the cursor,
    which decides where nothing else does."""
    outlines = {path: outline(text, language_of(path)) for path, text in files.items()}
    mentions = read_mentions(instruction)
    known = {unit.short for units in outlines.values() for unit in walk_units(units)}
    places = [mention for mention in mentions if mention.is_location]
    mentioned = {mention.text for mention in places}
    places += [
        Mention(name, False) for name in listed_names(instruction, _function_names(outlines)) - mentioned
    ]
    found = [
        _Scored(named, content + _at_cursor(near, path, unit), path, unit)
        for path, units in outlines.items()
        for named, content, unit in _score_parts(files[path], units, places, line_spans(instruction, path))
    ]
    values = [item for item in found if item.named and _is_only_referred_to(item.unit, instruction)]
    found = [item for item in found if item not in values]
    if values and not any(item.named for item in found):
        users = [item for item in found if _uses_any(files[item.path], item, values)]
        found = [replace(item, named=3.0) for item in users] if 0 < len(users) <= _USERS else found
    sure = any(item.named for item in found)
    if sure:
        found = [item for item in found if item.named]
    best = max((item.score for item in found), default=0.0)
    least = max(_ENOUGH, _SHARE * best)
    owners = {
        (item.path, _owner_name(item.unit))
        for item in found
        if item.score >= least and _owner_name(item.unit)
    }
    selected = [
        (item.path, item.unit)
        for item in found
        # Beside a chosen member, a plain word is enough to choose another member of its class.
        if item.score >= least or (item.named and (item.path, _owner_name(item.unit)) in owners)
    ]
    defines = asks_for_definition(instruction, mentions, known)
    place = _place_for_definition(outlines, mentions, instruction) if defines else None
    if place is not None:
        selected = [place, *(pair for pair in selected if sure and pair[1] != place[1])]
    chosen: dict[str, list[OutlineUnit]] = {}
    for path, unit in selected if len(selected) <= _MOST else []:
        chosen.setdefault(path, []).append(unit)
    if not chosen and near is not None and near[0] in files:
        return RegionChoice((_region_at_cursor(near, files[near[0]], outlines[near[0]]),), True)
    regions = [r for path, units in chosen.items() for r in _merge_regions(path, units, outlines[path])]
    return RegionChoice(tuple(regions), place is not None or sure)


def enclosing_region(region: Region, text: str) -> Region:
    """The next larger region: the class around it, else the whole file."""
    lines = len(text.split("\n"))
    start, end = region.start, lines if region.end is None else region.end
    around = [
        unit
        for unit in walk_units(outline(text, language_of(region.path)))
        if unit.start <= start and end <= unit.end and unit.size > end - start
    ]
    if not around:
        return Region(region.path)
    unit = min(around, key=lambda unit: unit.size)
    return Region(region.path, unit.start, unit.end)


def regions_for(path: str, units: Sequence[OutlineUnit], text: str) -> list[Region]:
    """Parts of a file as regions."""
    return list(_merge_regions(path, units, outline(text, language_of(path)))) if units else []


# ── scores ──


def _score_parts(
    text: str, units: Sequence[OutlineUnit], mentions: Sequence[Mention], lines: Sequence[tuple[int, int]]
) -> Iterator[tuple[float, float, OutlineUnit]]:
    """Scores by name and by content, of the parts without members and of classes that are named while none of
    their members is."""
    rows = text.split("\n")
    every = list(walk_units(units))
    parts = [unit for unit in every if not unit.members and unit.kind is not UnitKind.IMPORTS]
    part_names = [set(re.findall(r"[A-Za-z_]\w*", "\n".join(rows[u.start : u.end]))) for u in parts]
    common = Counter(name for names in part_names for name in names)
    words = {stem(mention.text) for mention in mentions}
    texts = {mention.text for mention in mentions}
    named: set[str] = set()
    for unit, names in zip(parts, part_names, strict=True):
        by_name = sum(_name_score(unit, mention) for mention in mentions)
        if any(first < unit.end and unit.start < last for first, last in lines):
            by_name += 20
        if by_name:
            named.add(unit.name)
        score = 0.0
        for mention in mentions:
            last = mention.text.rpartition(".")[2]
            if last in names and last != unit.short and (mention.code or not is_common_word(last)):
                score += (1.5 if mention.code else 0.8) / math.sqrt(common[last])
        owner, _, short = unit.name.rpartition(".")
        if owner and owner in texts and short not in texts:
            score += 0.3
        words_of = name_words(short)
        if (len(words_of) > 1 or short.startswith("__")) and short not in texts:
            score += 2 * sum(stem(piece) in words for piece in words_of) / len(words_of)
        if not unit.name and unit.header.startswith(('"""', "'''", '"', "'")):
            continue  # a docstring matches everything
        if score or by_name:
            yield by_name, score, unit
    for unit in every:
        inside = any(name.startswith(f"{unit.name}.") for name in named)
        if unit.members and unit.name and not inside:
            by_name = sum(_name_score(unit, mention) for mention in mentions)
            if by_name:
                yield by_name, 0.0, unit


def _function_names(outlines: Mapping[str, Sequence[OutlineUnit]]) -> set[str]:
    return {
        unit.short
        for units in outlines.values()
        for unit in walk_units(units)
        if unit.kind is UnitKind.FUNCTION and unit.name
    }


def _is_only_referred_to(unit: OutlineUnit, instruction: str) -> bool:
    """Whether a part is a constant that the instruction names without changing its value."""
    constant = unit.kind is UnitKind.STATEMENT and unit.short.isupper()
    return constant and not changes_value(instruction, unit.short)


def _uses_any(text: str, item: _Scored, values: Sequence[_Scored]) -> bool:
    inside = "\n".join(text.split("\n")[item.unit.start : item.unit.end])
    return any(re.search(rf"\b{re.escape(value.unit.short)}\b", inside) for value in values)


def _name_score(unit: OutlineUnit, mention: Mention) -> float:
    if not unit.name or not (unit.name == mention.text or unit.name.endswith(f".{mention.text}")):
        return 0.0
    if not mention.code and unit.kind is UnitKind.STATEMENT and "." in unit.name:
        return 0.0  # fields often have ordinary words as names
    return 10.0 if "." in mention.text else 6.0 if mention.code else 3.0


def _owner_name(unit: OutlineUnit) -> str:
    return unit.name.rpartition(".")[0]


def _at_cursor(near: tuple[str, int] | None, path: str, unit: OutlineUnit) -> float:
    """A bonus for the part at the cursor."""
    return 1.5 if near is not None and path == near[0] and unit.start <= near[1] < unit.end else 0.0


def _region_at_cursor(near: tuple[str, int], text: str, units: Sequence[OutlineUnit]) -> Region:
    """The part at the cursor; where that is a single statement, the lines around it."""
    path, line = near
    inside = [unit for unit in walk_units(units) if unit.start <= line < unit.end and not unit.members]
    if inside and inside[-1].kind is UnitKind.FUNCTION:
        return Region(path, inside[-1].start, inside[-1].end)
    count = len(text.split("\n"))
    return Region(path, max(0, line - CURSOR), min(count, line + CURSOR + 1))


# ── regions ──


def _place_for_definition(
    outlines: Mapping[str, Sequence[OutlineUnit]], mentions: Sequence[Mention], instruction: str
) -> tuple[str, OutlineUnit] | None:
    """The place of a new definition: in the class that is mentioned, else after the last definition."""
    names = {name for mention in mentions for name in (mention.text, mention.text.partition(".")[0])}
    if _MEMBER.search(instruction):
        names |= _single_class(outlines)  # with a single class, it need not be named
    for path, units in outlines.items():
        for unit in reversed(list(walk_units(units))):
            if unit.kind is UnitKind.CLASS and unit.name and unit.short in names:
                functions = [m for m in unit.members if m.kind is UnitKind.FUNCTION]
                if not functions and language_of(path) in ("c", "go", "rust"):
                    continue  # its functions are outside it
                return path, unit if unit.size <= CLASS or not functions else functions[-1]
    if len(outlines) > 1:
        return None
    path, units = next(iter(outlines.items()))
    defined = [unit for unit in units if unit.kind in (UnitKind.FUNCTION, UnitKind.CLASS)]
    if not defined:
        return None
    last = defined[-1]
    if last.size > CLASS and last.members:
        last = last.members[-1]
    end = max((unit.end for unit in units), default=last.end)
    if last is defined[-1] and end - last.end <= _TAIL:
        return path, OutlineUnit(last.kind, last.name, last.start, end, last.header)
    return path, last


def _single_class(outlines: Mapping[str, Sequence[OutlineUnit]]) -> set[str]:
    """The name of the only class with methods, if there is exactly one."""
    found = {
        unit.short
        for units in outlines.values()
        for unit in units
        if unit.kind is UnitKind.CLASS and any(member.kind is UnitKind.FUNCTION for member in unit.members)
    }
    return found if len(found) == 1 else set()


def _merge_regions(path: str, units: Sequence[OutlineUnit], every: Sequence[OutlineUnit]) -> Iterator[Region]:
    """The parts as regions; near ones are merged, several of one small class become that class."""
    for owner in every:
        inside = [unit for unit in units if owner.start <= unit.start and unit.end <= owner.end]
        if owner.members and len(inside) > 1 and owner.size <= CLASS:
            units = [*(unit for unit in units if unit not in inside), owner]
    merged: list[tuple[int, int]] = []
    for start, end in sorted({(unit.start, unit.end) for unit in units}):
        if merged and start - merged[-1][1] <= _NEAR:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    for start, end in merged:
        yield Region(path, start, end)
