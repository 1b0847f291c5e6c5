"""An immutable snapshot of a text: its content, its version and its line index.

Offsets are code points; a position is a line and a column in UTF-8, UTF-16 or UTF-32 units, as in the
Language Server Protocol (lines end in LF, CRLF or CR). The line index is built on first use, and `apply`
updates it by rescanning only around the edits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keystroke.errors import InputError
from keystroke.text.edit import Edit, apply_edits, sorted_edits
from keystroke.text.position import Encoding, Position

if TYPE_CHECKING:
    from keystroke.text.line_index import Offsets


@dataclass(frozen=True, slots=True)
class Document:
    """`time` is the monotonic time of the snapshot, if its owner records one."""

    text: str
    version: int = 0
    time: float | None = None
    _starts: Offsets | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.text)

    @property
    def line_starts(self) -> Offsets:
        """The offset at which each line begins. The first is 0; a final line end opens one more line."""
        if self._starts is None:
            from keystroke.text.line_index import line_starts  # here: few commands need arrays to start

            starts = line_starts(self.text)
            object.__setattr__(self, "_starts", starts)
            return starts
        return self._starts

    @property
    def line_count(self) -> int:
        return len(self.line_starts)

    def line_span(self, line: int) -> tuple[int, int]:
        """Offsets of the line's first character and of its line end (or the end of the text)."""
        starts = self.line_starts
        if not 0 <= line < len(starts):
            raise InputError(f"line {line} does not exist; the document has lines 0 to {len(starts) - 1}")
        start = int(starts[line])
        if line + 1 == len(starts):
            return start, len(self.text)
        end = int(starts[line + 1]) - 1
        if end > start and self.text[end] == "\n" and self.text[end - 1] == "\r":
            end -= 1
        return start, end

    def line(self, line: int) -> str:
        """The text of a line without its line end."""
        start, end = self.line_span(line)
        return self.text[start:end]

    def offset(self, line: int, column: int, encoding: Encoding = "utf-16", *, clamp: bool = False) -> int:
        """The offset of a position. `clamp`: a column past the line's end means its end, a line past the last
        means the end of the text, and a column inside a character means its start; otherwise each raises
        InputError."""
        if line < 0 or column < 0:
            raise InputError(f"line {line}, column {column}: both must be 0 or more")
        if clamp and line >= self.line_count:
            return len(self.text)
        start, end = self.line_span(line)
        if encoding == "utf-32" or self.text.isascii():
            inside, length = min(column, end - start), end - start
        else:
            # A column of n units lies within the first n characters, however long the line is.
            from keystroke.text.line_index import boundaries

            before = boundaries(self.text[start : min(end, start + column)], encoding)
            inside = bisect_right(before, column) - 1
            length = int(before[-1])
            if not clamp and before[inside] < column <= length:
                raise InputError(
                    f"column {column} of line {line} lies inside a character that takes several "
                    f"{encoding} units; use the column where it begins"
                )
        if column > length and not clamp:
            raise InputError(
                f"column {column} is past the end of line {line}, which has {length} {encoding} units"
            )
        return start + inside

    def position(self, offset: int, encoding: Encoding = "utf-16") -> Position:
        """The position of an offset. An offset between CR and LF gives the end of the line."""
        if not 0 <= offset <= len(self.text):
            raise InputError(
                f"offset {offset} is outside the document, which has {len(self.text)} characters"
            )
        line = bisect_right(self.line_starts, offset) - 1
        start, end = self.line_span(line)
        before = min(offset, end)
        if encoding == "utf-32" or self.text.isascii():
            return Position(line, before - start)
        from keystroke.text.line_index import boundaries

        return Position(line, int(boundaries(self.text[start:before], encoding)[-1]))

    def edit(
        self, start: Position, end: Position, text: str, encoding: Encoding = "utf-16", *, clamp: bool = True
    ) -> Edit:
        """The edit of an editor's range; LSP requires the clamping."""
        first = self.offset(start.line, start.column, encoding, clamp=clamp)
        last = self.offset(end.line, end.column, encoding, clamp=clamp)
        if last < first:
            raise InputError(f"a range must not end (line {end.line}) before it starts (line {start.line})")
        return Edit(first, last, text)

    def apply(self, edits: Iterable[Edit], time: float | None = None) -> Document:
        """The next version, with all edits applied at once. An existing line index is updated, not
        rebuilt."""
        changes = sorted_edits(edits, len(self.text))
        text = apply_edits(self.text, changes)
        if self._starts is None:
            return Document(text, self.version + 1, time)
        from keystroke.text.line_index import update_line_starts

        return Document(text, self.version + 1, time, update_line_starts(self._starts, changes, text))
