"""Confirms a model's remark by asking which of two versions has the defect, in both orders.

A model that answers by position contradicts itself and confirms nothing.
"""

from __future__ import annotations

import re

from keystroke.analysis.outline import UnitKind, outline, walk_units
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import Writer
from keystroke.assist.edit.blocks import fence_text
from keystroke.assist.edit.writer import read_answer
from keystroke.assist.review.changes import ChangedFile
from keystroke.text.compare import compare

_SYSTEM = "You are a careful programmer. You answer with one word."
_AROUND = 6  # lines shown around a hunk
_MOST = 60  # lines of a definition that are shown
_LETTER = re.compile(r"\b(A|B|both|neither|none)\b", re.IGNORECASE)


def new_has_defect(file: ChangedFile, line: int, claim: str, writer: Writer) -> bool:
    """Whether the model finds the claimed defect in the new version alone, in either order."""
    pair = _find_versions(file, line)
    if pair is None:
        return False
    old, new = pair
    return all(
        _ask_letter(writer, _version_question(file.path, claim, *sides)) == letter
        for sides, letter in (((new, old), "a"), ((old, new), "b"))
    )


def _version_question(path: str, claim: str, first: str, second: str) -> str:
    return (
        f"Two versions of a part of {path}.\n\nVersion A:\n{fence_text(first)}\n\n"
        f"Version B:\n{fence_text(second)}\n\n"
        f"Which version has this defect: {claim}\nAnswer with A, B, both or neither."
    )


def _ask_letter(writer: Writer, question: str) -> str:
    answer = read_answer(writer, _SYSTEM, question, lambda text: len(text) > 40)
    found = _LETTER.search(answer)
    return found[1].lower() if found is not None else ""


def _find_versions(file: ChangedFile, line: int) -> tuple[str, str] | None:
    """The definition (or the lines) around a changed line, before and after."""
    if file.before is None:
        return None
    old, new = file.before.split("\n"), file.text.split("\n")
    spans = [s for s in compare(old, new) if s[2] - 1 <= line - 1 <= s[3]]
    if not spans:
        return None
    a0, a1, b0, b1 = spans[0]
    language = language_of(file.path)
    for unit in walk_units(outline(file.text, language)):
        if unit.kind is UnitKind.FUNCTION and unit.start <= b0 and b1 <= unit.end and unit.size <= _MOST:
            above, below = b0 - unit.start, unit.end - b1
            return "\n".join(old[a0 - above : a1 + below]), "\n".join(new[unit.start : unit.end])
    return (
        "\n".join(old[max(0, a0 - _AROUND) : a1 + _AROUND]),
        "\n".join(new[max(0, b0 - _AROUND) : b1 + _AROUND]),
    )
