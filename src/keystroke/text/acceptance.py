"""Taking a suggestion in parts: a word, a line, or all of it.

Pure text. The part taken and what is left always make the whole; a part is never empty where the
suggestion is not, so that taking parts comes to an end.
"""

from __future__ import annotations

import re

# Space before a word belongs to it; a run of signs is a word of its own; a line end takes its indentation.
_WORD = re.compile(r"\n[ \t]*|[ \t]*(?:\w+|[^\w\s]+)|[ \t]+|\s")


def next_word(suggestion: str) -> str:
    """The part a word-wise acceptance takes."""
    found = _WORD.match(suggestion)
    return found[0] if found else suggestion[:1]


def next_line(suggestion: str) -> str:
    """The part a line-wise acceptance takes: up to the line's end, with the line end where lines follow."""
    body = suggestion.lstrip("\r\n")
    lead = len(suggestion) - len(body)
    end = suggestion.find("\n", lead)
    return suggestion if end < 0 else suggestion[: end + 1] if not lead else suggestion[:end]
