"""Rewriting a region: the prompt and the parser.

The model writes the whole region, with the old text as its draft. An answer that leaves code out with a
placeholder comment is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keystroke.analysis.stubs import find_stubs
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit.blocks import Message, chat, fence_text
from keystroke.assist.edit.border import fix_borders
from keystroke.assist.edit.definitions import add_definitions
from keystroke.assist.edit.operations import EditFailure
from keystroke.assist.edit.operations import EditFailureReason as Reason
from keystroke.assist.edit.splice import replace_lines, split_lines

_SYSTEM = (
    "You edit source files. You do exactly what the task says and change nothing else: every other line "
    "stays as it is, with its comments and its layout. You answer with one block of code between ``` lines "
    "and nothing else."
)

# With `_SYSTEM`, small models leave empty functions empty.
_AUTHOR = (
    "You are a careful programmer. You write complete code that works, and keep the names and parameters "
    "that are given. You answer with one block of code between ``` lines and nothing else."
)

LONG_TASK = 700  # characters; a longer task describes a program rather than a change

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})")
_ELISION = re.compile(
    r"^[ \t]*(?:#|//|--|/\*|<!--|;|%|\.\.\.|…)[ \t]*(?:\.\.\.|…)?[ \t]*\(?(?:the )?"
    r"(?:rest|remainder|remaining|existing|other|previous|same)\b[^\n]*?"
    r"\b(?:code|unchanged|same|as before|here|implementation|functions|methods|file|above|below|remains?)\b"
    r"|^[ \t]*(?:#|//|--|/\*|<!--)[ \t]*(?:\.\.\.|…)[ \t]*(?:\*/|-->)?[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Region:
    """Lines `start` to `end` (from 0, end excluded) of one file; `end=None` means to its last line."""

    path: str
    start: int = 0
    end: int | None = None

    def parts(self, text: str) -> tuple[str, str, str]:
        """The text before the region, in it and after it."""
        lines = split_lines(text)
        end = len(lines) if self.end is None else min(self.end, len(lines))
        start = min(self.start, end)
        return "".join(lines[:start]), "".join(lines[start:end]), "".join(lines[end:])


def rewrite_messages(
    region: Region, text: str, instruction: str, rules: str = "", shown: Mapping[str, str] | None = None
) -> list[Message]:
    """The messages that ask for a region. `shown`: texts to show, by path; None: the file itself. They come
    first, so that their KV cache serves every instruction."""
    before, inside, after = region.parts(text)
    tag = language_of(region.path) or ""
    empty = find_stubs(inside) if tag == "python" else []
    system = _AUTHOR if empty or len(instruction) > LONG_TASK else _SYSTEM
    if rules.strip():
        system += f"\n\nThe project's rules:\n{rules.strip()}"
    part = before.strip() or after.strip()
    parts = [
        f"{path}\n{fence_text(context, language_of(path) or '')}"
        for path, context in ({region.path: text} if shown is None else shown).items()
    ]
    task = f"Task: {instruction.strip()}"
    if part:
        how = (
            f"Rewrite only this part of {region.path}, with the change and complete, "
            f"and leave the rest of the file out:\n{fence_text(inside, tag)}"
        )
    else:
        what = "" if system.startswith(_AUTHOR) else " with the change"
        how = f"Write the whole file {region.path}{what}, complete."
    if empty:
        named = ", ".join(dict.fromkeys(empty))
        how += f"\n\nStill empty: {named}. Write the code that the task asks for, without placeholders."
    return chat(system, "\n\n".join([*parts, task, how]))


def parse_rewrite(answer: str, region: Region, text: str) -> str | EditFailure:
    """The whole file with the region replaced by what the answer holds."""
    before, inside, after = region.parts(text)
    written = _extract_fenced(
        _strip_label(answer, region.path, inside), nested=any(map(_FENCE.match, inside.splitlines()))
    )
    if written is None:
        return EditFailure(Reason.TRUNCATED, region.path, "the rewritten part begins but does not end")
    if not written.strip() and inside.strip():
        return EditFailure(Reason.NO_HUNKS, region.path, "the answer holds no text for the part to rewrite")
    if (remark := _ELISION.search(written)) and remark[0] not in inside:
        return EditFailure(
            Reason.ELIDED, region.path, f"the answer leaves code out ({remark[0].strip()!r}); write all of it"
        )
    start = len(split_lines(before))
    written = add_definitions(fix_borders(written, before, inside, after), inside, language_of(region.path))
    return replace_lines(text, start, start + len(split_lines(inside)), written)


class FenceDetector:
    """Detects the end of the fenced text while an answer streams."""

    def __init__(self, inside: str) -> None:
        # Where the text itself contains fences, only the end of the answer shows which one is the last.
        self._has_fences = any(map(_FENCE.match, inside.splitlines()))
        self._line = ""
        self._fence: str | None = None

    def feed(self, piece: str) -> bool:
        *complete, rest = (self._line + piece).split("\n")
        self._line = rest
        for line in complete:
            if self._fence is None:
                self._fence = found[1] if (found := _FENCE.match(line)) else None
            elif line.strip() == self._fence:
                return not self._has_fences
        return False


def _strip_label(answer: str, path: str, inside: str) -> str:
    """The answer without the path that some models write at the top of the block."""
    lines = answer.split("\n")
    start = next((i for i, line in enumerate(lines) if _FENCE.match(line)), None)
    if start is None or start + 1 >= len(lines):
        return answer
    label = lines[start + 1].strip().lstrip("#/ ").rstrip(":")
    if label not in (path, path.rpartition("/")[2]) or lines[start + 1] in inside.split("\n"):
        return answer
    again = start + 2 < len(lines) and _FENCE.match(lines[start + 2]) is not None
    return "\n".join(
        [*lines[:start], *lines[start + 2 :]] if again else [*lines[: start + 1], *lines[start + 2 :]]
    )


def _extract_fenced(answer: str, *, nested: bool) -> str | None:
    """The text between the first fence and its end: the next fence of its kind, or the last one if `nested`.
    The whole answer if there is no fence; None if it does not end."""
    lines = answer.split("\n")
    start = next((i for i, line in enumerate(lines) if _FENCE.match(line)), None)
    if start is None:
        return answer.strip("\r\n")
    found = _FENCE.match(lines[start])
    fence = found[1] if found else ""
    ends = [i for i in range(start + 1, len(lines)) if lines[i].strip() == fence]
    if not ends:
        return None
    return "".join(f"{line}\n" for line in lines[start + 1 : ends[-1] if nested else ends[0]])
