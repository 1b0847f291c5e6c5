"""The next edit as one question about several places: where, and to what, in one short answer.

One builder for training and for live use, over lines and an encoder alone; it knows no buffers and no
engine. For a model of the ChatML family with an adapter that was trained on this format. History comes first,
newest last, so that the KV cache of earlier changes stays valid.

    <|im_start|>user\\nTASK
    <|file_sep|>PATH\\n-OLD\\n+NEW\\n                                     each change, oldest first
    <|file_sep|>PATH\\n                                                 the file asked about, then each place:
    1\\nENCLOSING ALINE\\nBLINE\\n...M\\n<|im_end|>\\n<|im_start|>assistant\\n
    the answer: 0 (nothing is left to do), or PLACE FROM TO \\n NEW; then <|im_end|>

A place is at most twelve lines, each behind a letter that is a token of its own; the letter after its last
line stands for its end. Lines FROM up to TO of the place become NEW. So the first token of an answer chooses
among all places and no change, three tokens give the lines, and unchanged lines are not written.
`<|fim_pad|>` stands before the cursor's line. Lines that enclose a place (by indentation) are shown above
it without a letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keystroke.assist.next_edit.prompt import (
    Decode,
    Encode,
    LineRange,
    RecentChange,
    fitting_region,
    join_lines,
    join_newest,
    short_path,
)
from keystroke.engine.tokenizer import Tokenizer
from keystroke.text.compare import common_ends

VERSION = 3  # of the format; an adapter states which one it was trained on
MOST_PLACES = 6
REGION = 12  # lines of a place
HISTORY_TOKENS, CHANGE_TOKENS, CHANGES = 480, 120, 8
ANSWER_TOKENS = 384  # at most, of an answer
_ENCLOSING = 2  # lines shown above a place
_LETTERS = "ABCDEFGHIJKLM"
_TASK = (
    "Below are changes just made, oldest first, and then numbered places of a file. Which place has to "
    "change next? Answer with its number, the letter of the first line to replace, the letter after the "
    "last one, and the new lines; or 0 if nothing is left to do.\n"
)


@dataclass(frozen=True, slots=True)
class PlaceMarks:
    """The ids of the tokens between the parts."""

    start: int  # <|im_start|>
    end: int  # <|im_end|>
    file: int
    cursor: int
    numbers: tuple[int, ...]  # "0" (nothing), "1" ...
    letters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacesPrompt:
    """`places` in the order in which they are numbered, `lines` what stands in each. `shared`: how many
    tokens come before the places."""

    tokens: tuple[int, ...]
    shared: int
    places: tuple[LineRange, ...]
    lines: tuple[tuple[str, ...], ...]
    end: int


@dataclass(frozen=True, slots=True)
class PlacesAnswer:
    """Place `place` of a prompt becomes `lines`."""

    place: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacesFormat:
    """Builds prompts about several places and parses the answers. `encode` must not turn text into special
    tokens."""

    encode: Encode
    decode: Decode
    marks: PlaceMarks

    def build(
        self,
        history: Sequence[RecentChange],
        path: str,
        lines: Sequence[str],
        places: Sequence[LineRange],
        cursor: int | None = None,
    ) -> PlacesPrompt:
        """The question which of `places` of `lines` changes after `history` (oldest first). `cursor`: the
        cursor's line. The prompt holds the places in the order of the file, at most as many as there are
        numbers."""
        marks = self.marks
        ordered = tuple(sorted(places, key=lambda place: (place.first, place.last))[: len(marks.numbers) - 1])
        front = [
            marks.start, *self.encode("user\n" + _TASK), *self._encode_history(history),
            marks.file, *self.encode(short_path(path)),
        ]  # fmt: skip
        newline = list(self.encode("\n"))
        body: list[int] = []
        for number, place in enumerate(ordered, start=1):
            body += [marks.numbers[number], *newline]
            body += self.encode(join_lines(enclosing_lines(lines, place.first)))
            inside = lines[place.first : place.last]
            for letter, line in zip(marks.letters, inside, strict=False):
                at_cursor = [marks.cursor] if cursor == place.first + marks.letters.index(letter) else []
                body += [letter, *at_cursor, *self.encode(f"{line}\n")]
            body += [marks.letters[len(inside)], *newline]
        tail = [marks.end, *newline, marks.start, *self.encode("assistant\n")]
        shown = tuple(tuple(lines[place.first : place.last]) for place in ordered)
        return PlacesPrompt((*front, *body, *tail), len(front), ordered, shown, marks.end)

    def region(self, lines: Sequence[str], line: int, size: int = REGION) -> LineRange:
        """The lines to show when `line` may have to change: at most `size`, fewer where they are long."""
        return fitting_region(
            lines, line, size, lambda part: sum(len(self.encode(f"{row}\n")) for row in part)
        )

    def encode_answer(self, prompt: PlacesPrompt, answer: PlacesAnswer | None) -> list[int]:
        """The tokens of an answer: the smallest run of lines that differs; "0" where it is None or changes
        nothing."""
        if answer is None or answer.lines == prompt.lines[answer.place]:
            return [self.marks.numbers[0], self.marks.end]
        old, new = prompt.lines[answer.place], answer.lines
        first, same = common_ends(old, new)
        marks = self.marks
        place = [marks.numbers[answer.place + 1], marks.letters[first], marks.letters[len(old) - same]]
        text = join_lines(new[first : len(new) - same])
        return [*place, *self.encode("\n"), *self.encode(text), marks.end]

    def parse(self, prompt: PlacesPrompt, tokens: Sequence[int]) -> PlacesAnswer | None:
        """The place with its new lines; None where the answer is "0". Raises ValueError for any other answer
        (no end, no such place, lines out of order)."""
        marks = self.marks
        if prompt.end not in tokens:
            raise ValueError("the answer does not end")
        ids = list(tokens[: list(tokens).index(prompt.end)])
        if ids == [marks.numbers[0]]:
            return None
        numbers = marks.numbers[1 : len(prompt.places) + 1]
        if len(ids) < 3 or ids[0] not in numbers:
            raise ValueError("the answer names no place")
        place = numbers.index(ids[0])
        old = prompt.lines[place]
        letters = marks.letters[: len(old) + 1]
        if ids[1] not in letters or ids[2] not in letters:
            raise ValueError("the answer names no lines")
        first, last = letters.index(ids[1]), letters.index(ids[2])
        text = self.decode(ids[3:])
        if last < first or (text and not text.startswith("\n")):
            raise ValueError("the answer's lines are out of order")
        text = text.removeprefix("\n")
        new = text.removesuffix("\n").split("\n") if text else []
        return PlacesAnswer(place, (*old[:first], *new, *old[last:]))

    def _encode_history(self, history: Sequence[RecentChange]) -> list[int]:
        parts = []
        for change in reversed(history[-CHANGES:]):
            sides = (_prefix_lines("-", change.before), _prefix_lines("+", change.after))
            removed, added = (list(self.encode(side))[:CHANGE_TOKENS] for side in sides)
            parts.append([self.marks.file, *self.encode(short_path(change.path)), *removed, *added])
        return join_newest(parts, HISTORY_TOKENS, least=1)


def _prefix_lines(sign: str, text: str) -> str:
    return "".join(f"{sign}{line}\n" for line in text.removesuffix("\n").split("\n")) if text else ""


def enclosing_lines(lines: Sequence[str], first: int) -> list[str]:
    """The lines above `first` that the line there is indented under, the outermost of them first."""
    if first >= len(lines):
        return []
    inside = next((line for line in lines[first:] if line.strip()), "")
    depth = len(inside) - len(inside.lstrip())
    found: list[str] = []
    for line in reversed(lines[max(0, first - 400) : first]):
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent < depth and line.strip() not in ("{", "}", ")", "):", "]"):
            found.append(line[:120])
            depth = indent
            if not depth or len(found) == _ENCLOSING:
                break
    return found[::-1]


def places_format(tokenizer: Tokenizer) -> PlacesFormat | None:
    """The format over a tokenizer of the ChatML family; None for any other."""
    special = [tokenizer.special(n) for n in ("<|im_start|>", "<|im_end|>", "<|file_sep|>", "<|fim_pad|>")]
    plain = [tokenizer.encode(sign) for sign in ("0123456"[: MOST_PLACES + 1] + _LETTERS)]
    if any(i is None for i in special) or any(len(ids) != 1 for ids in plain):
        return None
    start, end, file, cursor = (i for i in special if i is not None)
    ids = tuple(one for (one,) in plain)
    marks = PlaceMarks(start, end, file, cursor, ids[: MOST_PLACES + 1], ids[MOST_PLACES + 1 :])
    return PlacesFormat(tokenizer.encode, tokenizer.decode, marks)


def adapter_places_format(tokenizer: Tokenizer, learned: Mapping[str, str]) -> PlacesFormat | None:
    """The format of a model whose adapter was trained on this version; None for any other."""
    return places_format(tokenizer) if learned.get("next_edit") == str(VERSION) else None
