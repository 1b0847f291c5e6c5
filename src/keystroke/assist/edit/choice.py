"""Which lines an instruction is about: the program's own choice, made before a model is asked.

Law: pure and cheap. It reads names, words and line numbers in the instruction against the outline of the
files. It says whether it is sure; where it is not, the caller asks the model to point, or takes more than
need be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from keystroke.analysis.outline import Kind, Unit, flattened, outline
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.rewrite import Region

WHOLE = 60  # lines; a file that is not longer is rewritten whole: nothing can be chosen wrong
CLASS = 60  # lines of a class that is rewritten whole where several of its members are meant
CURSOR = 20  # lines above and below a cursor that are meant where nothing else is said
_NEAR = 12  # lines between two regions that are taken together
_ENOUGH = 2.5  # a part that scores less is not meant
_SHARE = 0.5  # of the best part's score, for others to be meant too
_MOST = 6  # parts; an instruction that means more is about the file
_WORD = re.compile(r"[A-Za-z_]\w*(?:(?:\.|::)[A-Za-z_]\w*)*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_LINES = re.compile(r"\blines?\s+(\d{1,6})(?:\s*(?:-|–|to|and|through)\s*(\d{1,6}))?", re.IGNORECASE)
_NOUNS = ("function", "method", "class", "def", "field", "parameter", "attribute", "property", "variable",
          "constant", "struct", "type", "interface", "called", "named", "argument", "option",
          "enum")  # fmt: skip
_ADDING = re.compile(
    r"\b(?:add|create|implement|define|introduce|write|provide|insert|give|append)\b"
    r"[^.;]*?\b(?:function|method|class|propert(?:y|ies)|helper|constructor|subclass|test|operator|decorator|"
    r"command|__\w+__)\b",
    re.IGNORECASE,
)
_ARTICLES = ("a", "an", "the", "one", "some", "another", "new", "support", "all", "any", "it", "this", "that",
             "type", "two", "missing", "proper", "and", "to", "only", "every", "each")  # fmt: skip
_PLAIN = """
the a an and or of to in is it be as at by for from with not no if then else when should must that this
its are was so do does than all any only into on but can will has have which instead there where also
return returns raise raises use uses make makes given same one two first last new add change fix self
"""
_DULL = frozenset(_PLAIN.split())


@dataclass(frozen=True, slots=True)
class Choice:
    """Regions in the order of the files. `sure`: names or line numbers decided, not chance."""

    regions: tuple[Region, ...]
    sure: bool


@dataclass(frozen=True, slots=True)
class Mention:
    text: str
    code: bool  # written as code: in quotes, with an underscore or a call, after "function"


def choose(
    files: Mapping[str, str],
    instruction: str,
    *,
    near: tuple[str, int] | None = None,
    whole: int | None = None,
) -> Choice:
    """The regions an instruction is about; none where nothing in the files answers to it. `whole`: files of
    at most so many lines are taken whole. `near`: where the cursor stands; what nothing else decides is
    meant there."""
    whole = WHOLE if whole is None else whole
    found: list[tuple[float, str, Unit]] = []
    outlines = {path: outline(text, language_of(path)) for path, text in files.items()}
    mentions = list(read_mentions(instruction))
    known = {unit.short for units in outlines.values() for unit in flattened(units)}
    for path, units in outlines.items():
        scored = _scored(files[path], units, mentions, instruction, path)
        found += [(score, path, unit) for score, unit in scored]
    if near is not None:
        at = [_at_cursor(near[1], unit, path == near[0]) for _, path, unit in found]
        found = [(score + extra, path, unit) for extra, (score, path, unit) in zip(at, found, strict=True)]
    best = max((score for score, _, _ in found), default=0.0)
    adding = _adds(instruction, mentions, known, files)
    sure = best >= _ENOUGH
    chosen: dict[str, list[Unit]] = {}
    if adding and (place := _addition(outlines, mentions, files)):
        path, unit = place
        chosen[path] = [unit]
        sure = True
    meant = [(path, unit) for score, path, unit in found if score >= max(_ENOUGH, _SHARE * best)]
    for path, unit in meant if len(meant) <= _MOST else []:
        chosen.setdefault(path, []).append(unit)
    if not chosen and near is not None and near[0] in files:
        return Choice((_around(near, files[near[0]], outlines[near[0]]),), True)
    regions: list[Region] = []
    for path, text in files.items():
        count = len(text.splitlines())
        if path not in chosen and not (len(files) == 1 and count <= whole):
            continue
        if count <= whole:
            regions.append(Region(path))
        else:
            regions += _spans(path, chosen[path], outlines[path])
    return Choice(tuple(regions), sure or (len(files) == 1 and bool(regions)))


def _at_cursor(line: int, unit: Unit, same: bool) -> float:
    """A word that fits two places means the one where the cursor stands."""
    return 1.5 if same and unit.start <= line < unit.end else 0.0


def _around(near: tuple[str, int], text: str, units: Sequence[Unit]) -> Region:
    """The part at the cursor; where that is a single statement, the lines around it."""
    path, line = near
    inside = [unit for unit in flattened(units) if unit.start <= line < unit.end and not unit.members]
    if inside and inside[-1].kind is Kind.FUNCTION:
        return Region(path, inside[-1].start, inside[-1].end)
    count = len(text.split("\n"))
    return Region(path, max(0, line - CURSOR), min(count, line + CURSOR + 1))


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


def read_mentions(instruction: str) -> Iterator[Mention]:
    """The words of an instruction, and which of them are written as code."""
    quoted = {
        name
        for quote in re.findall(r"`([^`]+)`|'([^'\s]+)'|\"([^\"\s]+)\"", instruction)
        for name in _WORD.findall(" ".join(quote))
    }
    before = ""
    for found in _WORD.finditer(instruction):
        text = found[0].replace("::", ".")
        after = instruction[found.end() : found.end() + 1]
        shape = bool(re.search(r"_|\.|[a-z][A-Z]|\d", text)) or after == "("
        noun = before.lower() in _NOUNS
        following = _NAME.match(instruction, found.end() + 1)
        called = following is not None and following[0].lower() in _NOUNS and text.lower() not in _DULL
        verb = following is not None and following[0].lower() in _ARTICLES and not shape
        code = shape or found[0] in quoted or ((noun or called) and not verb and text.lower() not in _DULL)
        if not verb or code:
            yield Mention(text, code)
        before = text


def _scored(
    text: str, units: Sequence[Unit], mentions: Sequence[Mention], instruction: str, path: str
) -> Iterator[tuple[float, Unit]]:
    """How much each part that holds no other is meant."""
    lines = text.split("\n")
    parts = [unit for unit in flattened(units) if not unit.members]
    numbered = _numbered(instruction, path)
    held = [set(_NAME.findall("\n".join(lines[unit.start : unit.end]))) for unit in parts]
    words = {_stem(mention.text) for mention in mentions}
    classes = {mention.text for mention in mentions}
    common: dict[str, int] = {}
    for names in held:
        for name in names:
            common[name] = common.get(name, 0) + 1
    for unit, names in zip(parts, held, strict=True):
        score = 0.0
        owner, _, short = unit.name.rpartition(".")
        for mention in _once(mentions):
            last = mention.text.rpartition(".")[2]
            if unit.name and unit.name.endswith(f".{mention.text}") | (unit.name == mention.text):
                score += 10 if "." in mention.text else 6 if mention.code else 3
            elif last in names and (mention.code or last.lower() not in _DULL):
                rare = 1 / math.sqrt(common[last])
                score += (3 if mention.code else 1.2) * rare
        if owner and owner in classes and short not in classes:
            score += 0.5 if unit.kind is Kind.FUNCTION else 0.2
        pieces = _pieces(short)
        if len(pieces) > 1 and short not in classes:
            score += 2 * sum(_stem(piece) in words for piece in pieces) / len(pieces)
        if any(first < unit.end and unit.start < last for first, last in numbered):
            score += 20
        if score:
            yield score, unit


def _once(mentions: Sequence[Mention]) -> list[Mention]:
    """Each word once, as code if it was written so anywhere."""
    known: dict[str, Mention] = {}
    for mention in mentions:
        if mention.text not in known or mention.code:
            known[mention.text] = mention
    return list(known.values())


def _numbered(instruction: str, path: str) -> list[tuple[int, int]]:
    """Lines the instruction names, from 0, end excluded. `File "x.py", line 3` counts for x.py alone."""
    spans = []
    for found in _LINES.finditer(instruction):
        before = re.search(r"[\"'`]?([\w./-]+\.\w+)[\"'`]?,?\s*$", instruction[: found.start()])
        if before is not None and not (path.endswith(before[1]) or before[1].endswith(path)):
            continue
        first = int(found[1])
        spans.append((first - 1, int(found[2] or first)))
    return spans


def _pieces(name: str) -> list[str]:
    """The words a name is made of."""
    return [piece.lower() for piece in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]


def _stem(word: str) -> str:
    word = word.lower()
    for ending in ("ies", "ing", "es", "ed", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)] + ("y" if ending == "ies" else "")
    return word


def _adds(instruction: str, mentions: Sequence[Mention], known: set[str], files: Mapping[str, str]) -> bool:
    """Whether the instruction asks for a definition that is not there yet."""
    if not _ADDING.search(instruction):
        return False
    names = {m.text.rpartition(".")[2] for m in mentions if m.code}
    return not names or any(name not in known for name in names)


def _addition(
    outlines: Mapping[str, Sequence[Unit]], mentions: Sequence[Mention], files: Mapping[str, str]
) -> tuple[str, Unit] | None:
    """Where a new definition goes: into the class that is mentioned, else behind the last definition."""
    names = {name for mention in mentions for name in (mention.text, mention.text.partition(".")[0])}
    for path, units in outlines.items():
        for unit in reversed(list(flattened(units))):
            if unit.kind is Kind.CLASS and unit.name and unit.short in names:
                functions = [m for m in unit.members if m.kind is Kind.FUNCTION]
                return path, unit if unit.size <= CLASS or not functions else functions[-1]
    if len(outlines) == 1:
        path, units = next(iter(outlines.items()))
        defined = [unit for unit in units if unit.kind in (Kind.FUNCTION, Kind.CLASS)]
        if defined:
            last = defined[-1]
            return path, last if last.size <= CLASS or not last.members else last.members[-1]
    return None


def _spans(path: str, units: Sequence[Unit], every: Sequence[Unit]) -> Iterator[Region]:
    """The parts as regions: near ones together, several of one small class as that class."""
    for owner in every:
        inside = [unit for unit in units if owner.start <= unit.start and unit.end <= owner.end]
        if owner.members and len(inside) > 1 and owner.size <= CLASS:
            units = [*(unit for unit in units if unit not in inside), owner]
    spans = sorted({(unit.start, unit.end) for unit in units})
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start - merged[-1][1] <= _NEAR:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    for start, end in merged:
        yield Region(path, start, end)
