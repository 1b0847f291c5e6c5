"""A rewritten region: the prompt that asks for it and the parser that reads it.

Law: the model writes the region anew, with the old text as its draft; how little changed is found afterwards.
An answer that leaves code out with a remark is refused: what it left out would be lost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from keystroke.assist.edit.blocks import Message, fenced
from keystroke.assist.edit.matching import split_lines
from keystroke.assist.edit.operations import Failure, Reason

_SYSTEM = """You rewrite a part of a source file. Answer with the new text of that part between ``` lines and
nothing else. Keep every line that need not change exactly as it is, and leave nothing out."""

_FENCED = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n`]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)
_FENCED_FENCES = re.compile(_FENCED.pattern.replace("*?", "*"), _FENCED.flags)  # up to the last fence
_OPENED = re.compile(r"^[ \t]*(?:`{3,}|~{3,})", re.MULTILINE)
_ELISION = re.compile(
    r"^\s*(?:#|//|--|/\*|<!--|;|%|\.\.\.|…)\s*(?:\.\.\.|…)?\s*\(?(?:the )?"
    r"(?:rest|remainder|remaining|existing|other|previous|same)\b[^\n]*?"
    r"\b(?:code|unchanged|same|as before|here|implementation|functions|methods|file|above|below|remains?)\b",
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


def rewrite_messages(region: Region, text: str, instruction: str, rules: str = "") -> list[Message]:
    before, inside, after = region.parts(text)
    system = f"{_SYSTEM}\n\nThe project's rules:\n{rules.strip()}" if rules.strip() else _SYSTEM
    parts = [f"File: {region.path}"]
    if before.strip():
        parts.append(f"What comes before (do not repeat):\n{fenced(before)}")
    if after.strip():
        parts.append(f"What comes after (do not repeat):\n{fenced(after)}")
    parts += [f"The part to rewrite:\n{fenced(inside)}", f"Task: {instruction.strip()}"]
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n\n".join(parts)}]


def parse_rewrite(answer: str, region: Region, text: str) -> str | Failure:
    """The whole file with the region replaced by what the answer holds."""
    before, inside, after = region.parts(text)
    answer = answer.replace("\r\n", "\n")
    pattern = _FENCED_FENCES if _OPENED.search(inside) else _FENCED
    if found := pattern.search(answer):
        written = found[2]
    elif _OPENED.search(answer):
        return Failure(Reason.TRUNCATED, region.path, "the rewritten part begins but does not end")
    else:
        written = answer.strip("\n")
    if not written.strip() and inside.strip():
        return Failure(Reason.NO_HUNKS, region.path, "the answer holds no text for the part to rewrite")
    if (remark := _ELISION.search(written)) and remark[0] not in inside:
        return Failure(
            Reason.ELIDED, region.path, f"the answer leaves code out ({remark[0].strip()!r}); write all of it"
        )
    return before + _in_the_manner_of(inside, written, bool(after)) + after


def _in_the_manner_of(old: str, new: str, followed: bool) -> str:
    """`new` (lines ended by LF) with the old text's line ends and its final newline or the lack of one."""
    ends = [line[len(line.rstrip("\r\n")) :] for line in split_lines(old)]
    lines = new.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    habit = max(set(ends), key=ends.count) if any(ends) else "\n"
    ended = followed or not ends or bool(ends[-1])
    return (habit or "\n").join(lines) + ((habit or "\n") if lines and ended else "")
