"""Where a completion ends, and what of it is kept.

Pure text. A completion is one line, a number of lines, or a block; it never repeats what already
follows the cursor, and it is cut only at places that more text could not move.
"""

from __future__ import annotations

from dataclasses import dataclass

_OPENERS = (":", "{", "(", "[", "=>", "->", " do", " then")
_CLOSERS = ("}", ")", "]", "end", "fi", "done", "esac")
_FENCE = "```"  # an instructed model closes the code block it imagines; that is never code
_LONGEST_BLOCK = 40  # lines; a model that repeats itself must end somewhere


@dataclass(frozen=True, slots=True)
class Cut:
    """What is kept of the text so far, and whether more text could still change it."""

    text: str
    done: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """`lines`: how many to keep at most; 0 means a block by its indentation."""

    lines: int
    before: str  # the cursor's line, left of the cursor
    rest: str  # right of the cursor
    following: str  # the next line that is not blank
    floor: int | None = None  # of a whole body: the indentation of the line that opened it

    @classmethod
    def at(cls, prefix: str, suffix: str, lines: int = 0, floor: int | None = None) -> Ending:
        before = prefix.rpartition("\n")[2]
        rest, _, below = suffix.partition("\n")
        following = next((line for line in below.split("\n") if line.strip()), "")
        # Something to the right means the cursor stands inside a line: only that line is completed.
        return cls(1 if rest.strip() else lines, before, rest.rstrip(), following.rstrip(), floor)

    def cut(self, text: str, *, final: bool = False) -> Cut:
        """`text` is all that was generated so far; `final`: there will be no more."""
        lines = text.split("\n")
        kept: list[str] = []
        for index, line in enumerate(lines):
            whole = final or index + 1 < len(lines)
            if line.lstrip().startswith(_FENCE) or (whole and self._repeats(line, index)):
                return Cut(self._tidied(kept), True)
            if not self.lines and index and self._outside(line, kept, whole):
                if self._closes(line, kept):
                    if not whole:
                        break  # more text could follow the bracket on this line
                    kept.append(line)
                return Cut(self._tidied(kept), True)
            kept.append(line)
            if whole and len(kept) == (self.lines or _LONGEST_BLOCK):
                return Cut(self._tidied(kept), True)
        return Cut(self._tidied(kept), final)

    def may_repeat(self, text: str) -> bool:
        """Whether the line begun with `text` may still become the one below the cursor, and be dropped."""
        return bool(self.following) and self.following.startswith(f"{self.before}{text}".rstrip())

    def _repeats(self, line: str, index: int) -> bool:
        """Whether this line is the one that stands below the cursor already."""
        shown = f"{self.before}{line}" if index == 0 else line
        return bool(self.following) and shown.rstrip() == self.following

    def _outside(self, line: str, kept: list[str], whole: bool) -> bool:
        """Whether a line after the first no longer belongs to the block."""
        if self.floor is not None:
            return bool(line.strip()) and _indent(line) <= self.floor
        first = f"{self.before}{kept[0]}"
        opened = first.rstrip().endswith(_OPENERS)
        if not line.strip():
            # A blank line ends plain statements; inside an opened block it may be part of it.
            return whole and not opened and any(k.strip() for k in kept)
        if not any(f"{self.before}{k}".strip() for k in kept):
            return False
        base = _indent(first)
        return _indent(line) <= base if opened else _indent(line) < base

    def _closes(self, line: str, kept: list[str]) -> bool:
        """Whether a line outside the block is the bracket or word that ends it."""
        first = f"{self.before}{kept[0]}"
        if self.floor is not None:
            closer = line.strip().rstrip(";,)").removesuffix("}") in ("", *_CLOSERS)
            return closer and _indent(line) == self.floor and line.strip() != self.following.strip()
        return (
            first.rstrip().endswith(_OPENERS)
            and _indent(line) == _indent(first)
            and line.strip().rstrip(";,)").removesuffix("}") in ("", *_CLOSERS)
        )

    def _tidied(self, kept: list[str]) -> str:
        text = "\n".join(kept).rstrip()
        if self.rest.strip():
            first = text.partition("\n")[0]
            for size in range(min(len(first), len(self.rest)), 0, -1):
                if first.endswith(self.rest[:size]):
                    return first[: len(first) - size]
        return text


def _indent(line: str) -> int:
    expanded = line.expandtabs(4)
    return len(expanded) - len(expanded.lstrip())
