"""Extracts from an English instruction the names written as code, words, line numbers and things to add."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

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
_DOING = """
add remove set get make change update delete create move count check find use write read load save sort print
run start stop open close return take put list show call pass keep give let define implement introduce insert
append replace rename reset clear copy merge split join format parse convert handle fix raise throw log skip
push pop filter map send fetch build render validate compute test wrap
"""
_VERBS = frozenset(_DOING.split())
_GIVING = ("give", "let", "make", "teach", "have", "extend")  # a noun follows: "give parse a limit"
_RAISED = ("raise", "raises", "throw", "throws", "raising", "throwing", "instead of")
_ALTERING = "set|raise|lower|increase|decrease|change|rename|remove|delete|double|reduce|extend|make|turn|add"
_PLAIN = """
the a an and or of to in is it be as at by for from with not no if then else when should must that this its
are was so do does than all any only into on but can will has have which instead there where also return
returns raise raises use uses make makes given same one two first last new add change fix self
"""
_DULL = frozenset(_PLAIN.split())


@dataclass(frozen=True, slots=True)
class Mention:
    """A word of the instruction. `code`: it is written as code somewhere: quoted, with an underscore or a
    call, or after "function"."""

    text: str
    code: bool
    is_location: bool = True  # False for an error that is raised


def read_mentions(instruction: str) -> list[Mention]:
    """The words of an instruction in order, without verbs that only look like names."""
    known: dict[str, Mention] = {}
    for mention in _find_mentions(instruction):
        if mention.text not in known or mention.code:
            known[mention.text] = mention
    return list(known.values())


def _find_mentions(instruction: str) -> Iterator[Mention]:
    quoted = {
        name
        for quote in re.findall(r"`([^`]+)`|'([^'\s]+)'|\"([^\"\s]+)\"", instruction)
        for name in _WORD.findall(" ".join(quote))
    }
    before = ""
    for found in _WORD.finditer(instruction):
        text = found[0].replace("::", ".")
        called = re.match(r"\(|\s*=", instruction[found.end() :]) is not None  # or assigned
        shape = bool(re.search(r"_|\.|[a-z][A-Z]|\d", text)) or called or _is_constant(text)
        following = _NAME.match(instruction, found.end() + 1)
        next_word = following[0].lower() if following is not None else ""
        noun = before.lower() in _NOUNS or next_word in _NOUNS
        verb = next_word in _ARTICLES and text.lower() in _VERBS and not shape
        verb = verb and before.lower() not in _GIVING
        # "Raise LIMIT to five" raises no error.
        error = before.lower() in _RAISED and not _is_constant(text)
        error = error or text.endswith(("Error", "Exception")) or bool(re.match(r"Err[A-Z]", text))
        code = shape or found[0] in quoted or (noun and not verb and text.lower() not in _DULL)
        if not verb or code:
            yield Mention(text, code, not error)
        before = text


def listed_names(instruction: str, known: Collection[str]) -> set[str]:
    """Known names in a list of names: "Get and Total" names two."""
    named = "|".join(sorted(map(re.escape, known), key=len, reverse=True))
    if not named:
        return set()
    row = re.compile(rf"\b(?:{named})\b(?:(?:\(\))?(?:,| and| or|, and| &) (?:{named})\b)+")
    return {name for found in row.findall(instruction) for name in _NAME.findall(found) if name in known}


def changes_value(instruction: str, name: str) -> bool:
    word = rf"`?\b{re.escape(name)}\b`?"
    before = rf"\b(?:{_ALTERING})\b[\w ]* {word}"
    after = rf"{word}\s*(?:=|\b(?:to|should|must|needs?|has to|with)\b)"
    return re.search(f"(?i:{before})|{after}", instruction) is not None


def _is_constant(text: str) -> bool:
    return len(text) > 2 and text.isupper()


def asks_for_definition(instruction: str, mentions: Sequence[Mention], known: set[str]) -> bool:
    """Whether the instruction asks for a new definition."""
    if not _ADDING.search(instruction):
        return False
    names = {m.text.rpartition(".")[2] for m in mentions if m.code}
    return not names or any(name not in known for name in names)


def line_spans(instruction: str, path: str) -> list[tuple[int, int]]:
    """Lines the instruction names, from 0, end excluded. `File "x.py", line 3` counts for x.py alone."""
    spans = []
    for found in _LINES.finditer(instruction):
        before = re.search(r"[\"'`]?([\w./-]+\.\w+)[\"'`]?,?\s*$", instruction[: found.start()])
        if before is not None and not (path.endswith(before[1]) or before[1].endswith(path)):
            continue
        first = int(found[1])
        spans.append((first - 1, int(found[2] or first)))
    return spans


def is_common_word(word: str) -> bool:
    return word.lower() in _DULL


def name_words(name: str) -> list[str]:
    return [piece.lower() for piece in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]


def stem(word: str) -> str:
    word = word.lower()
    for ending in ("ies", "ing", "es", "ed", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)] + ("y" if ending == "ies" else "")
    return word
