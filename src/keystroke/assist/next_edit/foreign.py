"""The next edit as other editors' plugins ask for it: prompts made for Zeta 2 and for Sweep's models.

Pure text. It recognises such a prompt, reads from it what our own question needs (the file around the
cursor, the lines that may be rewritten, recent changes), and writes the rewritten lines in the client's
format. A prompt that it does not understand completely is not recognised and goes to the model as it is.

    Sweep     <|file_sep|>PATH.diff original: updated: ...
              <|file_sep|>current/PATH:A:B LINES <|file_sep|>updated/...
    Zeta 2    <[fim-suffix]>BELOW<[fim-prefix]>...<filename>PATH ABOVE
              <<<<<<< CURRENT LINES ======= <[fim-middle]>; or with <|fim_prefix|>
              and the related marks, in any order
    Zeta 2.1  as Zeta 2, the lines cut into blocks by <|marker_1|>, <|marker_2|>, ... in place of CURRENT
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from keystroke.assist.next_edit.burst import Burst, burst_between
from keystroke.assist.next_edit.prompt import CHANGES, RecentChange, join_lines
from keystroke.text.diff import common_prefix, common_suffix

LARGEST = 400_000  # characters of a prompt that is looked at
_CURSOR, _SWEEP_CURSOR = "<|user_cursor|>", "<|cursor|>"
_START, _SEPARATOR = "<<<<<<< CURRENT\n", "=======\n"
_MARKER = re.compile(r"<\|marker(?:_\d{1,4}|[+-]\d{1,4})\|>")
_RANGE = re.compile(r":(\d{1,9}):(\d{1,9})$")
_HEADING = re.compile(r"(?m)^--- a/?(?P<old>[^\n]*)\n\+\+\+ b/?(?P<path>[^\n]*)\n")
_PREDICTED = "// User accepted prediction:\n"


class PromptFormat(StrEnum):
    SWEEP = "sweep"
    ZETA = "zeta"
    ZETA_BLOCKS = "zeta_blocks"


@dataclass(frozen=True, slots=True)
class EditorPrompt:
    """What a client asks for: the new lines of `window`, between `above` and `below`. `cursor` is an offset
    in the window. `answer_start`: the beginning of the answer, which the prompt ends with. `blocks`: the
    marks of the window's blocks and where each stands in it. `earlier`: the window before the last change,
    where the prompt contains it."""

    format: PromptFormat
    path: str
    above: str
    window: str
    below: str
    cursor: int
    history: tuple[RecentChange, ...] = ()
    answer_start: str = ""
    blocks: tuple[tuple[str, int], ...] = ()
    earlier: str | None = None

    @property
    def text(self) -> str:
        return self.above + self.window + self.below

    @property
    def offset(self) -> int:
        """The cursor in the text."""
        return len(self.above) + self.cursor

    def last_change(self) -> tuple[Burst, tuple[RecentChange, ...]] | None:
        """The last change of this file, and what came before it; None where it is not known."""
        if self.earlier is not None and self.earlier != self.window:
            burst = burst_between(self.above + self.earlier + self.below, self.text)
            return None if burst is None else (burst, self.history)
        for number in range(len(self.history) - 1, -1, -1):
            last = self.history[number]
            if last.path != self.path or not last.after.strip() or self.text.count(last.after) != 1:
                continue
            burst = burst_between(self.text.replace(last.after, last.before), self.text)
            if burst is not None:
                return burst, self.history[:number]
        return None

    def format_answer(self, window: str) -> str:
        """The new text of the window, in the client's format."""
        if self.format is PromptFormat.ZETA_BLOCKS:
            return self._format_blocks(window)
        return (
            window.removeprefix(self.answer_start)
            if window.startswith(self.answer_start)
            else self.window[len(self.answer_start) :]
        )

    def _format_blocks(self, window: str) -> str:
        """The blocks that hold the change, between their marks; one mark twice where nothing changes."""
        marks, ends = [m for m, _ in self.blocks], [at for _, at in self.blocks]
        if window == self.window:
            return marks[0] * 2
        same = common_prefix(self.window, window)
        tail = min(common_suffix(self.window, window), min(len(self.window), len(window)) - same)
        first = max(i for i, at in enumerate(ends[:-1]) if at <= same)
        last = min(i for i, at in enumerate(ends) if at >= len(self.window) - tail and i > first)
        new = window[ends[first] : len(window) - (len(self.window) - ends[last])]
        return f"{marks[first]}{new}{''.join(marks[first + 1 : last + 1])}"


def parse_prompt(prompt: str) -> EditorPrompt | None:
    """The parsed prompt; None where it is in none of the formats. Never raises."""
    if len(prompt) > LARGEST:
        return None
    if "<|file_sep|>updated/" in prompt:
        return _parse_sweep(prompt)
    if _CURSOR in prompt and prompt.count(_CURSOR) == 1:
        for suffix, prefix, middle, file in _DIALECTS:
            if middle in prompt:
                return _parse_zeta(prompt, suffix, prefix, middle, file)
    return None


_DIALECTS = (
    ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>", "<filename>"),
    ("<|fim_suffix|>", "<|fim_prefix|>", "<|fim_middle|>", "<|file_sep|>"),
)


# Sweep


def _parse_sweep(prompt: str) -> EditorPrompt | None:
    sections = [_split_title(part) for part in prompt.split("<|file_sep|>")[1:]]
    if len(sections) < 2 or prompt.split("<|file_sep|>", 1)[0].strip():
        return None
    (current, shown), (updated, answer_start) = sections[-2:]
    name = current.removeprefix("current/")
    if name == current or updated != f"updated/{name}" or shown.count(_SWEEP_CURSOR) > 1:
        return None
    shown = shown.removesuffix("\n")
    cursor = shown.find(_SWEEP_CURSOR)
    window = shown.replace(_SWEEP_CURSOR, "")
    if not window.startswith(answer_start):
        return None
    path, lines = _RANGE.sub("", name), _RANGE.search(name)
    above, below, history, earlier = "", "", [], None
    for title, body in sections[:-2]:
        if title == f"original/{name}":
            earlier = body.removesuffix("\n")
        elif title.endswith(".diff"):
            history += _parse_rewrites(title.removesuffix(".diff"), body)
        elif title == path:
            above, below = _surroundings(body, window, lines)
    at = cursor if cursor >= 0 else len(answer_start)
    return EditorPrompt(
        PromptFormat.SWEEP,
        path,
        above,
        window,
        below,
        at,
        tuple(history[-CHANGES:]),
        answer_start,
        earlier=earlier,
    )


def _split_title(part: str) -> tuple[str, str]:
    title, _, body = part.partition("\n")
    return title.strip(), body


def _parse_rewrites(path: str, body: str) -> list[RecentChange]:
    """The changes of a section, from `original:` and `updated:`."""
    found = []
    for piece in re.split(r"(?m)^original:\n", body)[1:]:
        old, mark, new = piece.partition("updated:\n")
        if mark:
            found.append(RecentChange(path, _end_with_newline(old), _end_with_newline(new)))
    return found


def _surroundings(body: str, window: str, lines: re.Match[str] | None) -> tuple[str, str]:
    """The text above and below the window in the larger piece of the file."""
    at = body.find(window)
    if at < 0 or not window or (body.find(window, at + 1) >= 0 and lines is None):
        return "", ""
    if at and body[at - 1] != "\n":
        return "", ""
    after = body[at + len(window) :]
    return body[:at], after.removesuffix("\n") if after.strip() else ""


# Zeta


def _parse_zeta(prompt: str, suffix: str, prefix: str, middle: str, file: str) -> EditorPrompt | None:
    cut = _blocks_or_merge(prompt, suffix, prefix, middle)
    if cut is None:
        return None
    head, window, below, answer_start, blocks = cut
    # The file's own section is the last one before the window; the others are history and other files.
    sections = head.split(file)
    path, _, above = sections[-1].partition("\n")
    if not path.strip() or len(sections) < 2:
        return None
    above = above.removeprefix(prefix).removeprefix("\n") if file != "<filename>" else above
    history: list[RecentChange] = []
    for section in sections[1:-1]:
        title, _, body = section.partition("\n")
        if title.strip() in ("edit_history", "edit history"):
            history = _parse_diffs(body)
    cursor = window.find(_CURSOR)
    window = window.replace(_CURSOR, "")
    if cursor < 0 or not window.startswith(answer_start):
        return None
    form = PromptFormat.ZETA_BLOCKS if blocks else PromptFormat.ZETA
    return EditorPrompt(
        form,
        path.strip(),
        above,
        window,
        below,
        cursor,
        tuple(history[-CHANGES:]),
        answer_start,
        tuple(blocks),
    )


def _blocks_or_merge(
    prompt: str, suffix: str, prefix: str, middle: str
) -> tuple[str, str, str, str, list[tuple[str, int]]] | None:
    """The text before the window, the window, the text below it, the beginning of the answer, the blocks."""
    marked, answer_start = _MARKER.search(prompt), ""
    if marked is not None:
        last = list(_MARKER.finditer(prompt))[-1]
        rest = prompt[last.end() :]
        if _START in prompt or rest.strip() != middle or last.start() == marked.start():
            return None
        window, blocks = _strip_marks(prompt[marked.start() : last.end()])
        head, below = _split_below(prompt[: marked.start()], suffix, prefix)
        return head, window, below, "", blocks
    if prompt.count(_START) == 1:
        before, _, rest = prompt.partition(_START)
        window, found, rest = rest.partition(_SEPARATOR)
        if not found:
            return None
        if suffix in rest:  # ABOVE and the window first, then what comes below
            below, found, answer_start = rest.removeprefix(suffix).partition(middle)
            return (before, window, below, answer_start, []) if found and rest.startswith(suffix) else None
        answer_start = rest.removeprefix(middle)
        head, below = _split_below(before.removesuffix(middle), suffix, prefix)
        return head, window, below, answer_start, []
    if f"{middle}current\n" in prompt and prompt.count(f"{middle}updated\n") == 1:
        before, _, rest = prompt.partition(f"{middle}current\n")
        window, _, answer_start = rest.partition(f"{middle}updated\n")
        window, _, below = window.partition(f"{suffix}\n")
        if not below:
            before, _, below = before.partition(f"{suffix}\n")
        return before, window, below, answer_start, []
    return None


def _split_below(before: str, suffix: str, prefix: str) -> tuple[str, str]:
    """`before` split into the text above the window and the text below it, which comes first or last."""
    if before.startswith(suffix):
        below, _, head = before.removeprefix(suffix).partition(prefix)
        return head, below.removeprefix("\n") if below == "\n" else below
    head, _, below = before.partition(suffix)
    return head, below


def _strip_marks(marked: str) -> tuple[str, list[tuple[str, int]]]:
    """The window without its marks, and where each stood, not counting the cursor."""
    window, blocks, at = "", [], 0
    for mark in _MARKER.finditer(marked):
        window += marked[at : mark.start()]
        at = mark.end()
        blocks.append((mark[0], len(window.replace(_CURSOR, ""))))
    return window, blocks


def _parse_diffs(body: str) -> list[RecentChange]:
    """The hunks of unified diffs, each as lines that became others."""
    found: list[RecentChange] = []
    headings = list(_HEADING.finditer(body))
    for number, heading in enumerate(headings):
        end = headings[number + 1].start() if number + 1 < len(headings) else len(body)
        diff = body[heading.end() : end].replace(_PREDICTED, "")
        for hunk in re.split(r"(?m)^@@[^\n]*\n", diff):
            old, new = [], []
            for line in hunk.rstrip("\n").split("\n"):
                if line[:1] in ("-", " "):
                    old.append(line[1:])
                if line[:1] in ("+", " "):
                    new.append(line[1:])
            if old != new:
                found.append(RecentChange(heading["path"].strip(), join_lines(old), join_lines(new)))
    return found


def _end_with_newline(text: str) -> str:
    """Whole lines, each with its end."""
    return text if not text or text.endswith("\n") else f"{text}\n"
