"""Guesses from the English words of a user's request what is to be done with which files.

The guess limits what a small model may call next (usable.py); nothing else depends on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class RequestIntent:
    """`files`: those that the request names. `creates`, `deletes`: it asks for that of a file. `changes`: it
    asks to change what is there. `continues`: it asks for more than a change, such as to run the tests."""

    files: tuple[str, ...]
    creates: bool
    deletes: bool
    changes: bool
    continues: bool


@lru_cache(maxsize=64)
def read_request(request: str) -> RequestIntent:
    rest = strip_lead(request)
    creates, deletes = (_CREATES, _DELETES) if rest == request else (_CREATES_THEN, _DELETES_THEN)
    creating, deleting = bool(creates.search(rest)), bool(deletes.search(rest))
    only_looks = _LOOKS.search(request) and not _CHANGES.search(request)
    return RequestIntent(
        files=tuple(named_files(request)),
        creates=creating,
        deletes=deleting,
        changes=not (_ASKS.search(request) or creating or deleting or only_looks),
        continues=bool(_CONTINUES.search(request)),
    )


def named_files(request: str) -> list[str]:
    """The files that a request names: words with the ending of a file."""
    return [found[0] for found in _NAMED.finditer(request)]


def strip_lead(request: str) -> str:
    """The request without the files at its head: what is to be done in them."""
    return _LEAD.sub("", request, count=1)


def _any_of(words: str) -> str:
    """The pattern of any of these words, which are patterns themselves; `_` is a space."""
    return "(?:" + "|".join(word.replace("_", r"\ ") for word in words.split()) + ")"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE | re.VERBOSE)


# Files. The ending says that `a.py` is one, and that `self.hits` and `strings.Join` are names of code; behind
# a folder any ending will do.

_ENDING = _any_of(
    "pyi? pyx ipynb [cm]?jsx? [cm]?tsx? vue svelte c h cc hh cpp hpp cxx go java rs rb php kts? swift cs lua "
    "sh bash zsh ps1 bat scala html? s?css jsonl? ya?ml exs hs clj dart zig jl sql proto md rst txt csv tsv "
    "toml ini cfg xml svg tf gradle tex"
)
_FILE = rf"(?: [\w./-]*\w\.{_ENDING}\b | [\w.-]*/[\w./-]*\w\.[A-Za-z]\w{{0,7}}\b )"
_QUOTED = rf"[`'\"]? {_FILE} [`'\"]?"
_LIST = rf"(?:the\s+)? (?:files?\s+)? {_QUOTED} (?: (?: \s*,\s*and | \s*, | \s+and ) \s+ {_QUOTED} )*"
_NAMED = re.compile(rf"(?<![\w@:/.-]) (?!(?:self|this|cls)\.) {_FILE} (?! [\w(/] | \.\w )", re.VERBOSE)
# "In a.py and b.py: ...", "Please edit a.py: ..."
_EDITS = r"(?:please\s+)? (?:edit|change|modify|update)"
_LEAD = _pattern(rf"\A \s* (?: in\s+ {_LIST} \s*[:,] | {_EDITS} \s+ {_LIST} \s*: ) \s+ (?=\S)")

# Creating and deleting. "Delete the old file" and "create a.py"; not "delete the file handler", and not "make
# a.py print x".

_BEHIND = _any_of("in at from named called and or if when that which with under for")
_FILE_ITSELF = rf"files?\b (?= \W* (?: \Z | [.,:;!?\n] | {_FILE} | {_BEHIND}\b ) )"
_SOME_WORDS = r"(?: (?! (?:in|to|from|of|into)\b ) \w+\s+ ){0,3}? [`'\"]?"
_OBJECT = rf"\s+ {_SOME_WORDS} (?: {_FILE_ITSELF} | {_FILE} )"
_NOT_DOING = _any_of(r"that\b which\b with\b contain for\b to\b and\b")
_MAKES_IT_DO = rf"mak\w+\s+ {_QUOTED} \s+ (?!{_NOT_DOING}) \w"
_CREATE, _DELETE = (
    _any_of(r"creat writ generat sav mak new\b"),
    _any_of(r"delet remov eras drop unlink rm\b get_rid_of"),
)
_CREATES = _pattern(rf"\b (?!{_MAKES_IT_DO}) {_CREATE}\w* {_OBJECT}")
_DELETES = _pattern(rf"\b {_DELETE}\w* {_OBJECT}")

# Behind the files at its head, a request asks for that where a clause begins; elsewhere these words say what
# the code does with files.

_CLAUSE = r"(?: \A | [.,;!?\n]\s* | \band\s+ | \bthen\s+ ) (?: (?:please|also|then|and)\s+ )*"
_OBJECT_THEN = rf"\s+ {_SOME_WORDS} {_FILE}"
_CREATES_THEN = _pattern(rf"{_CLAUSE} (?!{_MAKES_IT_DO}) (?:create|write|generate|save|make) {_OBJECT_THEN}")
_DELETES_THEN = _pattern(rf"{_CLAUSE} (?:delete|remove|erase|drop|rm) {_OBJECT_THEN}")

# Changing, asking, looking, going on.

_CHANGE = _any_of(
    "must should shall add fix correct chang replac renam remov mak let use implement convert refactor mov "
    "rais return rewrit updat extend support handl leav keep insert set allow ignor mend repair"
)
_ASK = _any_of("what why how where which who explain describe summari[sz]e review tell")
_LOOK = _any_of("run execute show list print read open look find search count check test compare go")
_GO_ON = _any_of("run execute verify check test commit install build lint")
_CHANGES = _pattern(rf"\b {_CHANGE}")
_ASKS = _pattern(rf"\? \s* $ | ^ \W* (?:please\s+)? {_ASK}\b")
_LOOKS = _pattern(rf"^ \W* (?: in\ [^:]*: \s* )? (?:please\s+)? {_LOOK}\b")
_CONTINUES = _pattern(  # in a clause of its own: code may check, and raise an error then
    rf"(?: [.,;!] | \band | \bthen ) \s+ (?:also\s+)? {_GO_ON}\b | [.,;] \s+ then\b"
    r"| \bpytest\b | \b (?:the|all|unit|a|your|our) \s+ tests?\b"
)
