"""The lines a model has read in a conversation, which are the only ones it may replace.

Line numbers that tools put before lines are removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

MOST_LINES = 3000
MOST_CHARACTERS = 100_000  # the grammar is compiled before the first token
_ENDED = re.compile(r"\(End of file\b[^)]*\)")
_COUNTED = re.compile(r"[ \t]*0*(\d+)(?:[|:] ?|\t|→)")
_NUMBERED = re.compile(r"\s*\d+[ \t]*[|:\t-][ \t]?|\s{0,5}\d+\t")


def seen_lines(texts: Iterable[str]) -> tuple[str, ...]:
    """The lines of `texts` in order, each with its end; the newest where there are too many."""
    lines: list[str] = []
    for text in texts:
        for line in text.split("\n"):
            lines.append(line + "\n")
            plain = _NUMBERED.sub("", line, count=1)
            if plain != line:
                lines[-1] = plain + "\n"
    size = 0
    kept: list[str] = []
    for line in reversed(lines[-MOST_LINES:]):
        size += len(line)
        if size > MOST_CHARACTERS:
            break
        kept.append(line)
    return tuple(reversed(kept))


def strip_line_numbers(text: str) -> str:
    """The output of a reading tool without its line numbers and end-of-file note, which a small model would
    copy into the file. Numbers that do not count up belong to the file."""
    lines = text.split("\n")
    found = {at: match for at, line in enumerate(lines) if (match := _COUNTED.match(line))}
    numbers = {at: int(match[1]) for at, match in found.items()}
    counted = {
        at
        for at, number in numbers.items()
        if number == 1 or numbers.get(at - 1) == number - 1 or numbers.get(at + 1) == number + 1
    }
    if not counted:
        return text
    plain = (line[found[at].end() :] if at in counted else line for at, line in enumerate(lines))
    return "\n".join(line for line in plain if not _ENDED.fullmatch(line))


def quoted_lines_term(lines: Iterable[str]) -> str:
    """A Lark term for any run of consecutive lines inside a JSON string; the last line end is optional."""
    chunks: list[str] = []
    for line in lines:
        text = line.removesuffix("\n")
        chunks += [json.dumps(text, ensure_ascii=False)[1:-1]] if text else []
        chunks += [r"\n"] if line.endswith("\n") else []
    return f"%regex {json.dumps({'substring_chunks': chunks})}"
