"""Decides where a completion ends.

A completion is one line, a number of lines, or a block. It never repeats what already follows the cursor.
While text is still being generated, it is cut only where later text cannot move the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

_OPENERS = (":", "{", "(", "[", "=>", "->", " do", " then")
_CLOSERS = ("}", ")", "]", "end", "fi", "done", "esac")
_FENCE = "```"  # chat models close a code block that they did not open
_LONGEST_BLOCK = 40  # lines; bounds a model that repeats itself


@dataclass(frozen=True, slots=True)
class TrimmedCompletion:
    """The part of the generated text to insert. `done`: more text cannot change it."""

    text: str
    done: bool


@dataclass(frozen=True, slots=True)
class Ending:
    lines: int  # at most; 0: a block, by its indentation
    before: str  # the cursor's line, left of the cursor
    rest: str  # right of the cursor
    following: str  # the next line that is not blank
    floor: int | None = None  # of a whole block: the indentation of the line that opens it

    @classmethod
    def at(cls, prefix: str, suffix: str, lines: int = 0) -> Ending:
        return cls.at_cursor(prefix + suffix, len(prefix), lines)

    @classmethod
    def at_cursor(cls, text: str, cursor: int, lines: int = 0, floor: int | None = None) -> Ending:
        """Copies no more of `text` than the lines it needs."""
        before = text[text.rfind("\n", 0, cursor) + 1 : cursor]
        end = text.find("\n", cursor)
        rest = text[cursor : end if end >= 0 else len(text)].rstrip()
        following = ""
        while end >= 0 and not following:
            start, end = end + 1, text.find("\n", end + 1)
            following = text[start : end if end >= 0 else len(text)].rstrip()
        # Text right of the cursor means that the cursor is inside a line: only that line is completed.
        return cls(1 if rest else lines, before, rest, following, floor)

    def cut(self, text: str, *, final: bool = False) -> TrimmedCompletion:
        """Cut `text`, all that was generated so far; `final`: nothing more will be generated."""
        lines = text.split("\n")
        kept: list[str] = []
        for index, line in enumerate(lines):
            complete = final or index + 1 < len(lines)
            if line.lstrip().startswith(_FENCE) or (complete and self._repeats(line, index)):
                return TrimmedCompletion(self._join_lines(kept), True)
            if not self.lines and index and self._is_outside(line, kept, complete):
                if self._closes(line, kept):
                    if not complete:
                        break  # more text could follow the bracket on this line
                    kept.append(line)
                return TrimmedCompletion(self._join_lines(kept), True)
            kept.append(line)
            if complete and len(kept) == (self.lines or _LONGEST_BLOCK):
                return TrimmedCompletion(self._join_lines(kept), True)
        return TrimmedCompletion(self._join_lines(kept), final)

    def may_repeat(self, text: str) -> bool:
        """Whether a line that starts with `text` may still turn out to repeat the one below the cursor."""
        return bool(self.following) and self.following.startswith(f"{self.before}{text}".rstrip())

    def _repeats(self, line: str, index: int) -> bool:
        """Whether this line equals the one below the cursor."""
        shown = f"{self.before}{line}" if index == 0 else line
        return bool(self.following) and shown.rstrip() == self.following

    def _is_outside(self, line: str, kept: list[str], complete: bool) -> bool:
        """Whether a line after the first is no longer part of the block."""
        if self.floor is not None:
            return bool(line.strip()) and indent_width(line) <= self.floor
        first = f"{self.before}{kept[0]}"
        opened = first.rstrip().endswith(_OPENERS)
        if not line.strip():
            # A blank line ends plain statements; inside an opened block it may be part of it.
            return complete and not opened and any(k.strip() for k in kept)
        if not any(f"{self.before}{k}".strip() for k in kept):
            return False
        base = indent_width(first)
        return indent_width(line) <= base if opened else indent_width(line) < base

    def _closes(self, line: str, kept: list[str]) -> bool:
        """Whether a line outside the block is the bracket or keyword that closes it."""
        if line.strip().rstrip(";,)").removesuffix("}") not in ("", *_CLOSERS):
            return False
        if self.floor is not None:
            return indent_width(line) == self.floor and line.strip() != self.following.strip()
        first = f"{self.before}{kept[0]}"
        return first.rstrip().endswith(_OPENERS) and indent_width(line) == indent_width(first)

    def _join_lines(self, kept: list[str]) -> str:
        text = "\n".join(kept).rstrip()
        if self.rest:
            first = text.partition("\n")[0]
            for size in range(min(len(first), len(self.rest)), 0, -1):
                if first.endswith(self.rest[:size]):
                    return first[: len(first) - size]
        return text


def indent_width(line: str) -> int:
    """The columns of white space that the line begins with."""
    expanded = line.expandtabs(4)
    return len(expanded) - len(expanded.lstrip())
