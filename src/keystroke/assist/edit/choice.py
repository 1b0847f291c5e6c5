"""Which lines an instruction is about: the program's own choice, made before a model is asked.

Pure and cheap. It reads names, words and line numbers in the instruction against the outline of the
files. It says whether it is sure; where it is not, the caller asks the model to point, or takes more than
need be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from keystroke.analysis.outline import Kind, Unit, flattened, outline
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.mentions import (
    Mention,
    adds,
    altered,
    listed,
    numbered,
    pieces,
    plain_word,
    read_mentions,
    stem,
)
from keystroke.assist.edit.rewrite import Region

CLASS = 60  # lines of a class that is rewritten whole where several of its members are meant
CURSOR = 20  # lines above and below a cursor that are meant where nothing else is said
_NEAR = 12  # lines between two regions that are taken together
_ENOUGH = 2.0  # a part that scores less is not meant
_SHARE = 0.6  # of the best part's score, for others to be meant too
_USERS = 2  # parts that use a value, where naming the value means them
_MOST = 6  # parts; an instruction that means more is about the file
_MEMBER = re.compile(r"\b(?:method|property|getter|setter|constructor)\b", re.IGNORECASE)
_TAIL = 12  # lines behind the last definition that belong to a new one: exports, a main part


@dataclass(frozen=True, slots=True)
class _Scored:
    named: float  # by its name or its lines
    content: float  # by the words in it
    path: str
    unit: Unit

    @property
    def score(self) -> float:
        return self.named + self.content


@dataclass(frozen=True, slots=True)
class Choice:
    """Regions in the order of the files. `sure`: names or line numbers decided, not chance."""

    regions: tuple[Region, ...]
    sure: bool


def choose(files: Mapping[str, str], instruction: str, *, near: tuple[str, int] | None = None) -> Choice:
    """The regions an instruction is about; none where nothing in the files answers to it. `near`: where the
    cursor stands; what nothing else decides is meant there."""
    outlines = {path: outline(text, language_of(path)) for path, text in files.items()}
    mentions = read_mentions(instruction)
    known = {unit.short for units in outlines.values() for unit in flattened(units)}
    places = [mention for mention in mentions if mention.place]
    said = {mention.text for mention in places}
    places += [Mention(name, False) for name in listed(instruction, _functions(outlines)) - said]
    found = [
        _Scored(named, content + _at_cursor(near, path, unit), path, unit)
        for path, units in outlines.items()
        for named, content, unit in _scored(files[path], units, places, numbered(instruction, path))
    ]
    values = [item for item in found if item.named and _only_referred_to(item.unit, instruction)]
    found = [item for item in found if item not in values]
    if values and not any(item.named for item in found):
        users = [item for item in found if _uses(files[item.path], item, values)]
        found = [replace(item, named=3.0) for item in users] if 0 < len(users) <= _USERS else found
    sure = any(item.named for item in found)
    if sure:
        found = [item for item in found if item.named]
    best = max((item.score for item in found), default=0.0)
    least = max(_ENOUGH, _SHARE * best)
    owners = {(item.path, _owner(item.unit)) for item in found if item.score >= least and _owner(item.unit)}
    meant = [
        (item.path, item.unit)
        for item in found
        # Members that stand beside one that is surely meant are meant by a plain word, too.
        if item.score >= least or (item.named and (item.path, _owner(item.unit)) in owners)
    ]
    place = _addition(outlines, mentions, files, instruction) if adds(instruction, mentions, known) else None
    if place is not None:
        meant = [place, *(pair for pair in meant if sure and pair[1] != place[1])]
    chosen: dict[str, list[Unit]] = {}
    for path, unit in meant if len(meant) <= _MOST else []:
        chosen.setdefault(path, []).append(unit)
    if not chosen and near is not None and near[0] in files:
        return Choice((_around(near, files[near[0]], outlines[near[0]]),), True)
    regions = [r for path, units in chosen.items() for r in _spans(path, units, outlines[path])]
    return Choice(tuple(regions), place is not None or sure)


def enclosing(region: Region, text: str) -> Region:
    """The next larger region: the class around it, else the whole file."""
    lines = len(text.split("\n"))
    start, end = region.start, lines if region.end is None else region.end
    around = [
        unit
        for unit in flattened(outline(text, language_of(region.path)))
        if unit.start <= start and end <= unit.end and unit.size > end - start
    ]
    if not around:
        return Region(region.path)
    unit = min(around, key=lambda unit: unit.size)
    return Region(region.path, unit.start, unit.end)


def spans(path: str, units: Sequence[Unit], text: str) -> list[Region]:
    """Parts of a file as regions."""
    return list(_spans(path, units, outline(text, language_of(path)))) if units else []


# ── how much a part is meant ──────────────────────────────────────────────────────────────────


def _scored(
    text: str, units: Sequence[Unit], mentions: Sequence[Mention], lines: Sequence[tuple[int, int]]
) -> Iterator[tuple[float, float, Unit]]:
    """How much the parts that hold no other are meant, by their names and by what is in them; and classes
    that are named while none of their members is."""
    rows = text.split("\n")
    every = list(flattened(units))
    parts = [unit for unit in every if not unit.members and unit.kind is not Kind.IMPORTS]
    held = [set(re.findall(r"[A-Za-z_]\w*", "\n".join(rows[u.start : u.end]))) for u in parts]
    common: dict[str, int] = {}
    for names in held:
        for name in names:
            common[name] = common.get(name, 0) + 1
    words = {stem(mention.text) for mention in mentions}
    texts = {mention.text for mention in mentions}
    named: set[str] = set()
    for unit, names in zip(parts, held, strict=True):
        by_name = sum(_name_score(unit, mention) for mention in mentions)
        if any(first < unit.end and unit.start < last for first, last in lines):
            by_name += 20
        if by_name:
            named.add(unit.name)
        score = 0.0
        for mention in mentions:
            last = mention.text.rpartition(".")[2]
            if last in names and last != unit.short and (mention.code or not plain_word(last)):
                score += (1.5 if mention.code else 0.8) / math.sqrt(common[last])
        owner, _, short = unit.name.rpartition(".")
        if owner and owner in texts and short not in texts:
            score += 0.3
        words_of = pieces(short)
        if (len(words_of) > 1 or short.startswith("__")) and short not in texts:
            score += 2 * sum(stem(piece) in words for piece in words_of) / len(words_of)
        if not unit.name and unit.header.startswith(('"""', "'''", '"', "'")):
            continue  # a docstring is about everything
        if score or by_name:
            yield by_name, score, unit
    for unit in every:
        inside = any(name.startswith(f"{unit.name}.") for name in named)
        if unit.members and unit.name and not inside:
            by_name = sum(_name_score(unit, mention) for mention in mentions)
            if by_name:
                yield by_name, 0.0, unit


def _functions(outlines: Mapping[str, Sequence[Unit]]) -> set[str]:
    return {
        unit.short
        for units in outlines.values()
        for unit in flattened(units)
        if unit.kind is Kind.FUNCTION and unit.name
    }


def _only_referred_to(unit: Unit, instruction: str) -> bool:
    """Whether a part is a constant that the instruction speaks of and does not want to be another one: what
    is to be changed is what uses it."""
    constant = unit.kind is Kind.STATEMENT and unit.short.isupper()
    return constant and not altered(instruction, unit.short)


def _uses(text: str, item: _Scored, values: Sequence[_Scored]) -> bool:
    inside = "\n".join(text.split("\n")[item.unit.start : item.unit.end])
    return any(re.search(rf"\b{re.escape(value.unit.short)}\b", inside) for value in values)


def _name_score(unit: Unit, mention: Mention) -> float:
    if not unit.name or not (unit.name == mention.text or unit.name.endswith(f".{mention.text}")):
        return 0.0
    if not mention.code and unit.kind is Kind.STATEMENT and "." in unit.name:
        return 0.0  # fields have the names of ordinary words
    return 10.0 if "." in mention.text else 6.0 if mention.code else 3.0


def _owner(unit: Unit) -> str:
    return unit.name.rpartition(".")[0]


def _at_cursor(near: tuple[str, int] | None, path: str, unit: Unit) -> float:
    """A word that fits two places means the one where the cursor stands."""
    return 1.5 if near is not None and path == near[0] and unit.start <= near[1] < unit.end else 0.0


def _around(near: tuple[str, int], text: str, units: Sequence[Unit]) -> Region:
    """The part at the cursor; where that is a single statement, the lines around it."""
    path, line = near
    inside = [unit for unit in flattened(units) if unit.start <= line < unit.end and not unit.members]
    if inside and inside[-1].kind is Kind.FUNCTION:
        return Region(path, inside[-1].start, inside[-1].end)
    count = len(text.split("\n"))
    return Region(path, max(0, line - CURSOR), min(count, line + CURSOR + 1))


# ── from parts to lines ───────────────────────────────────────────────────────────────────────


def _addition(
    outlines: Mapping[str, Sequence[Unit]],
    mentions: Sequence[Mention],
    files: Mapping[str, str],
    instruction: str,
) -> tuple[str, Unit] | None:
    """Where a new definition goes: into the class that is mentioned, else behind the last definition."""
    names = {name for mention in mentions for name in (mention.text, mention.text.partition(".")[0])}
    if _MEMBER.search(instruction):
        names |= _only_class(outlines)  # a method needs no class to be named where there is one
    for path, units in outlines.items():
        for unit in reversed(list(flattened(units))):
            if unit.kind is Kind.CLASS and unit.name and unit.short in names:
                functions = [m for m in unit.members if m.kind is Kind.FUNCTION]
                if not functions and language_of(path) in ("c", "go", "rust"):
                    continue  # its functions stand beside it
                return path, unit if unit.size <= CLASS or not functions else functions[-1]
    if len(outlines) > 1:
        return None
    path, units = next(iter(outlines.items()))
    defined = [unit for unit in units if unit.kind in (Kind.FUNCTION, Kind.CLASS)]
    if not defined:
        return None
    last = defined[-1]
    if last.size > CLASS and last.members:
        last = last.members[-1]
    end = max((unit.end for unit in units), default=last.end)
    if last is defined[-1] and end - last.end <= _TAIL:
        return path, Unit(last.kind, last.name, last.start, end, last.header)
    return path, last


def _only_class(outlines: Mapping[str, Sequence[Unit]]) -> set[str]:
    """The name of the one class that has methods, if there is but one."""
    found = {
        unit.short
        for units in outlines.values()
        for unit in units
        if unit.kind is Kind.CLASS and any(member.kind is Kind.FUNCTION for member in unit.members)
    }
    return found if len(found) == 1 else set()


def _spans(path: str, units: Sequence[Unit], every: Sequence[Unit]) -> Iterator[Region]:
    """The parts as regions: near ones together, several of one small class as that class."""
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
