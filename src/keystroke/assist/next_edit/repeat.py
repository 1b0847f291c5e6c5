"""Finds the remaining places for a change that was made twice.

Two bursts with the same words before and after are a pattern. A place fits where the old words occur between
word boundaries and the new ones do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from keystroke.assist.next_edit.burst import Burst
from keystroke.text import Edit

_SHORTEST = 3  # characters of the old text: anything shorter fits everywhere
_MOST = 50


def find_repetition(history: Sequence[Burst]) -> tuple[str, str, list[Edit]] | None:
    """Old text, new text and the edits of the remaining places, after the last burst of `history`."""
    if len(history) < 2:
        return None
    last = history[-1].with_neighbours()
    old, new = last.old, last.new
    if len(old.strip()) < _SHORTEST or old == new or "\n" in old + new:
        return None
    if not any(
        (other.old, other.new) == (old, new) for b in history[:-1] for other in (b.with_neighbours(),)
    ):
        return None
    edits = find_places(last.after, old, new)
    return (old, new, edits) if edits else None


def find_places(text: str, old: str, new: str) -> list[Edit]:
    left = r"(?<!\w)" if re.match(r"\w", old) else ""
    right = r"(?!\w)" if re.search(r"\w$", old) else ""
    pattern = re.compile(f"{left}{re.escape(old)}{right}")
    done = [m.span() for m in re.finditer(re.escape(new), text)] if old in new else []
    edits = []
    for match in pattern.finditer(text):
        if any(start <= match.start() and match.end() <= end for start, end in done):
            continue
        edits.append(Edit(match.start(), match.end(), new))
        if len(edits) == _MOST:
            break
    return edits
