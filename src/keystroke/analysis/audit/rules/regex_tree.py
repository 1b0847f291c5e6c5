"""Parses regular expressions of Python, JavaScript, Java and Go into a tree.

Raises ValueError for unknown syntax and bounds nesting. Characters become bit sets of code points, with bit
256 for all above 255. Of the flags only "verbose" matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

ANY = (1 << 257) - 1
_MAX_NESTING = 100
_NEWLINE = 1 << 10
_RETURN = 1 << 13
_COUNT = re.compile(r"\{(\d{0,9})(?:(,)(\d{0,9}))?\}")
_NAME = re.compile(r"<[^>]+>")
_NAMED = re.compile(r"\?P?<(?![=!])")
_CODE = re.compile(
    r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|u\{([0-9a-fA-F]+)\}|x\{([0-9a-fA-F]+)\}"
)
_OCTAL = re.compile(r"[0-3]?[0-7]{2}|0")
_THREE = re.compile(r"[0-3][0-7]{2}")
_PROPERTY = re.compile(r"[pP](?:\{\^?[^}]*\}|[A-Z])")
_FLAGS = re.compile(r"\?(?:([a-zA-Z]*)(?:-[a-zA-Z]+)?)([:)])")
_PLAIN = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7, "e": 27}
_POSIX = re.compile(r"\[:\^?\w+:\]")


@dataclass(frozen=True, slots=True)
class RegexChars:
    """One character out of a set."""

    options: int


@dataclass(frozen=True, slots=True)
class RegexRepeat:
    """`high` is None for an unbounded repetition."""

    low: int
    high: int | None
    body: RegexSequence


@dataclass(frozen=True, slots=True)
class RegexGroup:
    body: RegexSequence


@dataclass(frozen=True, slots=True)
class RegexAlternation:
    branches: tuple[RegexSequence, ...]


@dataclass(frozen=True, slots=True)
class RegexLookaround:
    """A lookahead or lookbehind assertion."""

    body: RegexSequence


@dataclass(frozen=True, slots=True)
class RegexAtomic:
    """An atomic group or possessive quantifier."""

    body: RegexSequence


@dataclass(frozen=True, slots=True)
class RegexAnchor:
    """A zero-width anchor such as `$` or `\\b`."""


@dataclass(frozen=True, slots=True)
class RegexBackreference:
    """A backreference."""


RegexNode = (
    RegexChars
    | RegexRepeat
    | RegexGroup
    | RegexAlternation
    | RegexLookaround
    | RegexAtomic
    | RegexAnchor
    | RegexBackreference
)
RegexSequence = tuple[RegexNode, ...]


def parse(pattern: str, *, script: bool = False) -> RegexSequence:
    """The tree of `pattern`, of JavaScript if `script` (`.` matches no carriage return). ValueError."""
    any_character = ANY ^ _NEWLINE ^ (_RETURN if script else 0)
    try:
        return _parse(pattern, any_character, scripted=True)
    except ValueError:
        if "[^]" not in pattern:
            raise
        return _parse(pattern, any_character, scripted=False)


def _parse(pattern: str, any_character: int, *, scripted: bool) -> RegexSequence:
    reader = _Reader(pattern, any_character, scripted)
    tree = reader.choice(0)
    if reader.at < len(pattern):
        raise ValueError("a group is closed that was not opened")
    return tree


class _Reader:
    def __init__(self, text: str, any_character: int, scripted: bool) -> None:
        self._text = text
        self._any = any_character  # what `.` matches
        self._scripted = scripted  # `[^]` is any character, as in JavaScript, not the start of a set
        self._verbose = False
        self._opened = 0  # capturing groups so far
        self._captured: dict[int, RegexNode] = {}  # those of plain characters, by number
        self.at = 0

    def choice(self, depth: int) -> RegexSequence:
        """Alternatives up to the end of the group."""
        if depth > _MAX_NESTING:
            raise ValueError("too many groups inside groups")
        branches = [tuple(self._sequence(depth))]
        while self._take("|"):
            branches.append(tuple(self._sequence(depth)))
        return branches[0] if len(branches) == 1 else (RegexAlternation(tuple(branches)),)

    def _sequence(self, depth: int) -> Iterator[RegexNode]:
        while self.at < len(self._text) and self._text[self.at] not in "|)":
            node = self._one(depth)
            if node is not None:
                yield self._with_quantifiers(node)

    def _one(self, depth: int) -> RegexNode | None:
        sign = self._next()
        match sign:
            case "(":
                return self._group(depth)
            case "[":
                return RegexChars(self._bracket())
            case ".":
                return RegexChars(self._any)
            case "^" | "$":
                return RegexAnchor()
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise ValueError("nothing to repeat")
            case "#" if self._verbose:
                end = self._text.find("\n", self.at)
                self.at = len(self._text) if end < 0 else end
                return None
            case _ if self._verbose and sign.isspace():
                return None
            case _:
                return RegexChars(_bit(ord(sign)))

    def _with_quantifiers(self, node: RegexNode) -> RegexNode:
        """`node` with its quantifiers."""
        while True:
            if self._take("*"):
                low, high = 0, None
            elif self._take("+"):
                low, high = 1, None
            elif self._take("?"):
                low, high = 0, 1
            elif (count := _COUNT.match(self._text, self.at)) and (count[1] or count[3]):
                self.at = count.end()
                low = int(count[1] or 0)
                high = low if not count[2] else int(count[3]) if count[3] else None
                if high is not None and high < low:
                    raise ValueError("a repetition from more to less")
            else:
                return node
            if (low, high) != (1, 1):  # once is the node itself
                node = RegexRepeat(low, high, (node,))
            if self._take("+"):
                node = RegexAtomic((node,))
            else:
                self._take("?")

    def _group(self, depth: int) -> RegexNode | None:
        if self._take("?#"):
            self.at = self._text.index(")", self.at) + 1
            return None
        if self._take("?P="):
            self.at = self._text.index(")", self.at) + 1
            return RegexBackreference()
        kind: type[RegexGroup | RegexLookaround | RegexAtomic] = RegexGroup
        counted = self._text[self.at : self.at + 1] != "?" or bool(_NAMED.match(self._text, self.at))
        if any(self._take(look) for look in ("?=", "?!", "?<=", "?<!")):
            kind = RegexLookaround
        elif self._take("?>"):
            kind = RegexAtomic
        elif self._take("?("):  # a conditional: both branches are alternatives
            self.at = self._text.index(")", self.at) + 1
        elif self._text.startswith(("?P<", "?<"), self.at):
            self.at = self._text.index("<", self.at)
            if (name := _NAME.match(self._text, self.at)) is None:
                raise ValueError("a group without a name")
            self.at = name.end()
        elif flags := _FLAGS.match(self._text, self.at):
            self.at = flags.end()
            self._verbose |= "x" in flags[1]
            if flags[2] == ")":
                return None
        elif self._take("?"):
            raise ValueError("an unknown kind of group")
        if counted:
            self._opened += 1
        number = self._opened
        body = self.choice(depth + 1)
        if not self._take(")"):
            raise ValueError("a group is not closed")
        if counted and all(isinstance(node, RegexChars) for node in body):
            self._captured[number] = RegexGroup(body)
        return kind(body)

    def _escape(self) -> RegexNode:
        sign = self._text[self.at : self.at + 1]
        if sign and sign in "bBAZzG":
            self.at += 1
            return RegexAnchor()
        if sign and sign in "123456789" and not _THREE.match(self._text, self.at):
            begun = self.at
            while self._text[self.at : self.at + 1].isdigit():
                self.at += 1
            # It matches what its group matched, so one of plain characters is read as them.
            return self._captured.get(int(self._text[begun : self.at]), RegexBackreference())
        if sign == "k" and (name := _NAME.match(self._text, self.at + 1)):
            self.at = name.end()
            return RegexBackreference()
        return RegexChars(self._escape_set())

    def _escape_set(self) -> int:
        """The set that an escape stands for."""
        if property_ := _PROPERTY.match(self._text, self.at):
            self.at = property_.end()
            return _kind("W" if property_[0][0] == "P" else "w")
        if code := _CODE.match(self._text, self.at):
            self.at = code.end()
            return _bit(int(next(filter(None, code.groups())), 16))
        sign = self._next()
        if sign in "dDwWsS":
            return _kind(sign)
        if octal := _OCTAL.match(self._text, self.at - 1):
            self.at = octal.end()
            return _bit(int(octal[0], 8))
        if sign == "c":
            return _bit(ord(self._next()) & 31)
        return _bit(_PLAIN.get(sign, ord(sign)))

    def _bracket(self) -> int:
        negated = self._take("^")
        found, first = 0, True
        if negated and self._scripted and self._take("]"):
            return ANY
        while first or not self._take("]"):
            if posix := _POSIX.match(self._text, self.at):
                self.at, low = posix.end(), _kind("w")
            else:
                low = self._member()
            if self._text.startswith("-", self.at) and not self._text.startswith("-]", self.at):
                self.at += 1
                high = self._member()
                if low & (low - 1) or high & (high - 1):
                    low |= high | _bit(ord("-"))  # `[\w-.]`: no range
                elif high < low:
                    raise ValueError("a range from more to less")
                else:
                    low = (high << 1) - low
            found |= low
            first = False
        return ANY ^ found if negated else found

    def _member(self) -> int:
        sign = self._next()
        if sign != "\\":
            return _bit(ord(sign))
        if self._take("b"):
            return _bit(8)
        return self._escape_set()

    def _next(self) -> str:
        if self.at >= len(self._text):
            raise ValueError("the expression ends too early")
        self.at += 1
        return self._text[self.at - 1]

    def _take(self, sign: str) -> bool:
        if not self._text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        return True


def _bit(code: int) -> int:
    return 1 << min(code, 256)


def _kind(name: str) -> int:
    """`\\d`, `\\w`, `\\s` and their opposites."""
    found = 0
    for code in range(256):
        char = chr(code)
        if (
            (name in "dD" and char.isdigit() and code < 128)
            or (name in "sS" and char.isspace())
            or (name in "wW" and (char == "_" or (char.isalnum() and code < 128)))
        ):
            found |= 1 << code
    return ANY ^ found if name.isupper() else found
