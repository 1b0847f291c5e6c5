"""Splits a Python text into pieces of whole top-level statements and caches their syntax trees.

The pieces joined are the text, and each parses by itself as it does inside the whole. A text that cannot be
split is one piece; a text that does not parse has none.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

from keystroke.analysis.check.scope import PythonSource, parse_source

# Strings and comments (in which no statement starts), and starts of lines.
_TOKENS = re.compile(
    r'("""(?:[^\\]|\\.)*?"""|'
    r"'''(?:[^\\]|\\.)*?'''|"
    r'"(?:[^"\\\n]|\\.)*"|'
    r"'(?:[^'\\\n]|\\.)*'|#[^\n]*)"
    r"|^(?=[^\s#)\]}\"'\\])",  # a lone backslash continues the line
    re.MULTILINE | re.DOTALL,
)
_HEAD = re.compile(r"@|(?:async\s+)?def\s+(\w+)|class\s+(\w+)|(?:else|elif|except|finally)\b")
_RUN = 2000  # characters of plain statements that stay together
_TRIES = 6  # pieces joined with the next ones because a bracket or a line continues
_KEPT = 4_000_000  # characters of pieces that are remembered


@dataclass(frozen=True)
class CodePiece:
    """Part of a text: positions in `source` count from its own beginning."""

    text: str
    source: PythonSource

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self.text))

    @cached_property
    def cache(self) -> dict[object, object]:
        """Results about this piece that other modules cache, under their own keys."""
        return {}


class _Memory:
    """The most recently used pieces by their text; safe to use from several threads."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[str, CodePiece] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def piece(self, text: str) -> CodePiece | None:
        with self._lock:
            found = self._pieces.get(text)
            if found is not None:
                self._pieces.move_to_end(text)
                return found
        source = parse_source(text)
        if source is None:
            return None
        piece = CodePiece(text, source)
        with self._lock:
            if text not in self._pieces:
                self._pieces[text] = piece
                self._size += len(text)
                while self._size > _KEPT and len(self._pieces) > 1:
                    self._size -= len(self._pieces.popitem(last=False)[0])
        return piece


_memory = _Memory()


def single_piece(text: str) -> list[CodePiece] | None:
    """The text as one piece; None if it does not parse."""
    piece = _memory.piece(text)
    return None if piece is None else [piece]


def split_pieces(text: str) -> list[CodePiece] | None:
    """The text in pieces; None if it does not parse."""
    if "\r" in text.replace("\r\n", "") or "\f" in text:
        return single_piece(text)  # a piece cannot count such line ends
    cuts = [*_possible_starts(text), len(text)]
    found: list[CodePiece] = []
    at = 0
    while at < len(cuts) - 1:
        for upto in range(at + 1, min(at + 1 + _TRIES, len(cuts))):
            piece = _memory.piece(text[cuts[at] : cuts[upto]])
            if piece is not None:
                found.append(piece)
                at = upto
                break
        else:
            rest = _memory.piece(text[cuts[at] :])
            if rest is None:
                return None
            return [*found, rest]
    return found or single_piece(text)


def _possible_starts(text: str) -> list[int]:
    """Offsets of the statements at which a piece may start."""
    cuts = [0]
    last, run, decorated, name, above = 0, True, False, "", ""
    begun = False  # the text above the first statement belongs to it
    for token in _TOKENS.finditer(text):
        start = token.start()
        if token.lastindex and (text[start] == "#" or (start and text[start - 1] != "\n")):
            continue
        head = _HEAD.match(text, start)
        if head is None:
            if begun and (not run or start - last > _RUN):
                cuts.append(start)
                last = start
            run = begun = True
            decorated, name = False, ""
            continue
        if head[0] in ("else", "elif", "except", "finally"):
            continue
        own = head[1] or head[2] or ""
        if decorated:  # the definition below the decorators
            decorated, name = head[0] == "@", own
            if own and own == above and len(cuts) > 1:
                cuts.pop()  # overloads stay together
            continue
        if own and own == name:
            continue
        if begun:
            cuts.append(start)
        above = name
        last, run, begun, decorated, name = start, False, True, head[0] == "@", own
    return cuts
