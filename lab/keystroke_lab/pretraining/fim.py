"""Fill-in-the-middle: where a file is cut, and how the three parts become one token sequence.

The live order is suffix first ("spm"): while someone types, only the prefix grows, at the end of the prompt,
so everything before it stays cached. The other order ("psm") is trained beside it.

    spm:  <|fim_suffix|>SUFFIX<|fim_prefix|>PREFIX<|fim_middle|>MIDDLE<|endoftext|>
    psm:  <|fim_prefix|>PREFIX<|fim_suffix|>SUFFIX<|fim_middle|>MIDDLE<|endoftext|>
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from keystroke_lab.tokenizer import special


class Order(StrEnum):
    SPM = "spm"
    PSM = "psm"


class FimCut(StrEnum):
    """What is taken out: exactly what an editor will ask for, and the classic random span."""

    REST_OF_LINE = "rest_of_line"  # the cursor is somewhere in a line
    LINE = "line"  # the cursor is at the start of a line, after its indentation
    LINES = "lines"  # the next few lines
    BLOCK = "block"  # to the end of the indented block
    BODY = "body"  # everything under a header
    INSIDE = "inside"  # some of a line, more of it follows
    SPAN = "span"  # anything


MIX = {
    FimCut.REST_OF_LINE: 0.34,
    FimCut.LINE: 0.30,
    FimCut.LINES: 0.12,
    FimCut.BLOCK: 0.16,
    FimCut.SPAN: 0.08,
}
# What editors ask for: mostly the rest of a line or a line; a whole body where a header was just written.
LIVE_MIX = {
    FimCut.REST_OF_LINE: 0.4,
    FimCut.LINE: 0.3,
    FimCut.LINES: 0.06,
    FimCut.BODY: 0.08,
    FimCut.BLOCK: 0.08,
    FimCut.INSIDE: 0.08,
}
_INVITING = frozenset(" .(,=[{:\"'@")  # signs after which people wait for a suggestion
_OPENING = (":\n", "{\n")  # how a header ends
_STOPPING = frozenset(" .()[]{},:=+-*/")  # signs that may stand right of the cursor


@dataclass(frozen=True, slots=True)
class Parts:
    """A text cut in three; their concatenation is the text."""

    prefix: str
    middle: str
    suffix: str

    @property
    def text(self) -> str:
        return self.prefix + self.middle + self.suffix


@dataclass(frozen=True, slots=True)
class TokenParts:
    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _line_end(text: str, offset: int) -> int:
    end = text.find("\n", offset)
    return len(text) if end < 0 else end


def block_end(text: str, offset: int) -> int:
    """Where the block that the line at `offset` stands in ends: before the next line that is indented
    less."""
    start = text.rfind("\n", 0, offset) + 1
    depth = indentation(text[start : _line_end(text, start)])
    end = _line_end(text, offset)
    while end < len(text):
        following = _line_end(text, end + 1)
        line = text[end + 1 : following]
        if line.strip() and indentation(line) < max(depth, 1):
            break
        end = following
    return len(text[:end].rstrip("\n ")) if end > offset else end


def cut(text: str, kind: FimCut, rng: random.Random) -> Parts | None:
    """`text` cut at a random place in the way of `kind`; None where no such place was found."""
    for _ in range(8):
        start, end = _place(text, kind, rng)
        if start < end <= len(text) and text[start:end].strip():
            return Parts(text[:start], text[start:end], text[end:])
    return None


def _place(text: str, kind: FimCut, rng: random.Random) -> tuple[int, int]:
    offset = rng.randrange(len(text))
    if kind is FimCut.SPAN:
        return offset, min(len(text), offset + 1 + int(rng.expovariate(1 / 160)))
    line_start = text.rfind("\n", 0, offset) + 1
    line_end = _line_end(text, offset)
    content = line_start + indentation(text[line_start:line_end])
    if content >= line_end:
        return 0, 0  # an empty line
    if kind is FimCut.REST_OF_LINE:
        inviting = [i + 1 for i in range(content, line_end - 1) if text[i] in _INVITING]
        start = rng.choice(inviting) if inviting and rng.random() < 0.5 else max(offset, content + 1)
        return start, line_end
    if kind is FimCut.LINE:
        return content, line_end
    if kind is FimCut.INSIDE:
        start = max(offset, content)
        stops = [i for i in range(start + 1, line_end) if text[i] in _STOPPING and text[i - 1] != " "]
        return (start, rng.choice(stops)) if stops else (0, 0)
    if kind is FimCut.BODY:
        return _body(text, offset)
    start = content if rng.random() < 0.7 else max(offset, content)
    if kind is FimCut.BLOCK:
        return start, block_end(text, start)
    end = line_end
    for _ in range(rng.randint(1, 5)):
        end = _line_end(text, min(end + 1, len(text)))
    return start, len(text[:end].rstrip("\n "))


def _body(text: str, offset: int) -> tuple[int, int]:
    """The body of the first header from `offset` on, without its indentation; nothing where there is none."""
    header = min((at for sign in _OPENING if (at := text.find(sign, offset)) >= 0), default=-1)
    start = header + 2
    if header < 0 or start >= len(text):
        return 0, 0
    line = text[text.rfind("\n", 0, header) + 1 : header]
    depth = indentation(text[start : _line_end(text, start)])
    if depth <= indentation(line):
        return 0, 0
    return start + depth, block_end(text, start + depth)


def choose(rng: random.Random, mix: Mapping[FimCut, float] = MIX) -> FimCut:
    return rng.choices(list(mix), weights=list(mix.values()))[0]


def prompt_tokens(prefix: Sequence[int], suffix: Sequence[int], order: Order) -> list[int]:
    """What the model is given; it answers with the middle and then END."""
    if order is Order.SPM:
        return [special.FIM_SUFFIX, *suffix, special.FIM_PREFIX, *prefix, special.FIM_MIDDLE]
    return [special.FIM_PREFIX, *prefix, special.FIM_SUFFIX, *suffix, special.FIM_MIDDLE]


def join(parts: TokenParts, order: Order) -> list[int]:
    """The whole training sequence."""
    return [*prompt_tokens(parts.prefix, parts.suffix, order), *parts.middle, special.END]
