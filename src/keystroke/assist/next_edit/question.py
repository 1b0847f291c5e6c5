"""The next edit by the model itself, asked for where no rule knows what a change means.

Sees values only and runs nothing: `run` is how the caller's engine answers a prompt. Each candidate
place costs one step (how likely is it that this stays as it is?); only the best one is written, greedily and
with its old lines as the draft. What comes of it is reduced, parsed and weighed; it is an edit or a reason.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Generic, TypeVar

from keystroke.analysis.syntax import LANGUAGES, error_count, region
from keystroke.assist.next_edit.burst import Burst
from keystroke.assist.next_edit.candidates import MOST, candidates
from keystroke.assist.next_edit.prompt import (
    REGION,
    Change,
    EditFormat,
    EditPrompt,
    Region,
    changes_between,
)
from keystroke.engine.base import Sampling, TokenLogprob
from keystroke.engine.generation import GenerationParams
from keystroke.engine.speculative import Drafter, FileDrafter
from keystroke.text import Edit, apply_edits, minimal_diff

# How sure the model must be that a place changes, and how it changes, for the two multiplied to be shown.
# High on purpose: of 93 moments of held-out releases, 31 of them with nothing left to do, the embedded model
# would offer 3 from 0.9 on (2 at the right place, 1 with nothing left), 6 from 0.85 (4, 2), 12 from 0.8 (7
# and 5), 15 from 0.75 (10, 5).
THRESHOLDS = {"calm": 0.9, "balanced": 0.85, "eager": 0.75}
SURE = 0.9  # a place this likely to change is taken without asking about the others
_RIVALS = 20  # tokens whose chances a step tells
_LONGEST_CHANGE = 200  # lines; more is a paste, which asks for nothing


class Unfit(StrEnum):
    """Why the model's next edit is not offered."""

    NOWHERE = "nothing_to_change"  # no change, or no place that could have to do with it
    LEFT = "model_leaves_it"  # every place is fine as it is
    UNSURE = "low_confidence"
    UNUSABLE = "unusable_answer"
    UNDOES = "undoes_the_change"
    BREAKS = "breaks_syntax"
    TOO_LONG = "line_too_long"
    DISMISSED = "dismissed_before"


@dataclass(frozen=True, slots=True)
class Said:
    """What the engine answered: tokens, and how likely each was."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


Run = Callable[[Sequence[int], GenerationParams, Drafter | None], Awaitable[Said]]


@dataclass(frozen=True, slots=True)
class Found:
    """Edits of the buffer that belong together, in order, and how sure they are."""

    edits: tuple[Edit, ...]
    confidence: float


Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class Asked(Generic[Form]):
    """A moment at which a model is asked, in its own format. `change` is the last one, `history` what came
    before it, in this file and others."""

    format: Form
    path: str
    language: str | None
    change: Burst
    history: tuple[Change, ...] = ()
    cursor: int | None = None
    problems: tuple[int, ...] = ()
    dismissed: frozenset[tuple[str, str]] = frozenset()
    max_line: int | None = None
    eagerness: str = "balanced"
    most: int = MOST

    @property
    def text(self) -> str:
        return self.change.after

    @property
    def lines(self) -> list[str]:
        return [line.removesuffix("\r") for line in self.text.split("\n")]

    @property
    def at(self) -> int | None:
        """The line of the cursor."""
        return None if self.cursor is None else self.text.count("\n", 0, self.cursor)

    def edits(self, place: Region, new_lines: Sequence[str]) -> list[Edit]:
        """The smallest edits that make `place` read `new_lines`."""
        start, end = _span(self.text, place.first, place.last)
        old = self.text[start:end]
        newline = "\r\n" if "\r\n" in old else "\n"
        new = "".join(f"{line}{newline}" for line in new_lines)
        if end == len(self.text):
            new = new.removesuffix(newline)  # the last line of a text has no end
        return [shifted(edit, start) for edit in merged(old, new)]

    def objection(self, edits: Sequence[Edit]) -> Unfit | None:
        """What speaks against offering `edits`."""
        change, text = self.change, self.text
        for edit in edits:
            inside = edit.start < change.new_end and edit.end > change.start
            back = edit.start == change.start and edit.text and edit.text.strip() == change.old.strip()
            if inside or back:
                return Unfit.UNDOES
        if any((text[e.start : e.end].strip(), e.text.strip()) in self.dismissed for e in edits):
            return Unfit.DISMISSED
        if self.max_line is not None and any(_grows_past(text, edit, self.max_line) for edit in edits):
            return Unfit.TOO_LONG
        if self.language in LANGUAGES:
            after = apply_edits(text, edits)
            first, last = region(text, edits[0].start, edits[-1].end)
            grown = len(after) - len(text)
            was = error_count(text[first:last], self.language)
            if error_count(after[first : last + grown], self.language) > was:
                return Unfit.BREAKS
        return None


class Question(Asked[EditFormat]):
    """Each place is a question of its own."""

    __slots__ = ()

    async def answered(self, run: Run) -> Found | Unfit:
        """Ask about each place, then have the best one written."""
        prompts = await asyncio.to_thread(self.prompts)
        best: tuple[float, EditPrompt] | None = None
        for prompt in prompts:
            moves = await self._moves(prompt, run)
            if best is None or moves > best[0]:
                best = (moves, prompt)
            if moves >= SURE:
                break
        if best is None:
            return Unfit.NOWHERE
        moves, prompt = best
        if moves < THRESHOLDS[self.eagerness]:
            return Unfit.LEFT if moves < 0.5 else Unfit.UNSURE
        said = await run(prompt.tokens, _writing(prompt), FileDrafter(prompt.draft))
        return await asyncio.to_thread(self.read, prompt, said, moves)

    def prompts(self) -> list[EditPrompt]:
        """The places to ask about, best guess first."""
        changes = changes_of(self.change, self.path)
        if not changes:
            return []
        lines = self.lines
        history = [*self.history, *changes]
        spots = candidates(self.change, self.problems, apart=REGION // 2, most=self.most)
        regions = dict.fromkeys(self.format.region(lines, spot.line) for spot in spots)
        return [self.format.build(history, self.path, lines, area, self.at) for area in regions]

    def read(self, prompt: EditPrompt, said: Said, moves: float) -> Found | Unfit:
        """What the answer means for the buffer. `moves`: how likely the place is to change at all."""
        new_lines = self.format.parse(prompt, said.tokens)
        if new_lines is None:
            return Unfit.UNUSABLE
        edits = self.edits(prompt.region, new_lines)
        if not edits:
            return Unfit.LEFT
        sure = moves * _sureness(prompt, said)
        if sure < THRESHOLDS[self.eagerness]:
            return Unfit.UNSURE
        reason = self.objection(edits)
        return reason if reason is not None else Found(tuple(edits), sure)

    async def _moves(self, prompt: EditPrompt, run: Run) -> float:
        """How likely it is that the place does not stay as it is."""
        said = await run(prompt.tokens, PROBE, None)
        if not said.logprobs:
            return 0.0
        first = said.logprobs[0]
        chances = dict([(first.token, first.logprob), *first.top])
        return 1.0 - math.exp(chances.get(prompt.keep, -math.inf))


PROBE = GenerationParams(max_tokens=1, sampling=Sampling(logprobs=_RIVALS), ignore_eos=True)


def _writing(prompt: EditPrompt) -> GenerationParams:
    """Greedy, and no longer free to leave the place alone: that was asked already."""
    return GenerationParams(
        max_tokens=prompt.room,
        sampling=Sampling(logprobs=0, logit_bias={prompt.keep: -100.0}),
        stop_tokens=frozenset({prompt.end}),
    )


def changes_of(burst: Burst, path: str) -> list[Change]:
    """The burst as whole lines, with the line above it where it only adds or only takes away."""
    above = burst.before.rfind("\n", 0, max(0, burst.before.rfind("\n", 0, burst.start))) + 1
    old, new = (
        text[above : _line_end(text, end)].replace("\r\n", "\n")
        for text, end in ((burst.before, burst.old_end), (burst.after, burst.new_end))
    )
    if max(old.count("\n"), new.count("\n")) > _LONGEST_CHANGE:
        return []
    return [c for c in changes_between(old, new, path) if c.before.split() != c.after.split()]


def merged(old: str, new: str) -> list[Edit]:
    """The smallest edits from `old` to `new`, those of neighbouring lines taken together: one jump each."""
    out: list[Edit] = []
    for edit in minimal_diff(old, new):
        between = old[out[-1].end : edit.start] if out else ""
        if out and between.count("\n") <= 1:
            out[-1] = Edit(out[-1].start, edit.end, out[-1].text + between + edit.text)
        else:
            out.append(edit)
    return out


def shifted(edit: Edit, by: int) -> Edit:
    return Edit(edit.start + by, edit.end + by, edit.text)


def _sureness(prompt: EditPrompt, said: Said) -> float:
    """Geometric mean of the chances of the place, of what is new, and of the tokens at which the old text
    goes on."""
    if not said.logprobs:
        return 1.0
    tokens = said.tokens[: len(said.logprobs)]
    counted: set[int] = set()
    for tag, _, _, start, end in SequenceMatcher(None, prompt.draft, tokens, autojunk=False).get_opcodes():
        if tag != "equal":
            counted.update(range(start, min(end + 1, len(tokens))))
    chosen = [said.logprobs[i].logprob for i in counted]
    return math.exp(sum(chosen) / len(chosen)) if chosen else 1.0


def _span(text: str, first: int, last: int) -> tuple[int, int]:
    """The offsets of lines [first, last), the last one's line end included where it has one."""
    start = 0
    for _ in range(first):
        start = text.index("\n", start) + 1
    end = start
    for _ in range(first, last):
        end = _line_end(text, end) + 1
    return start, min(end, len(text))


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _grows_past(text: str, edit: Edit, limit: int) -> bool:
    """Whether the edit makes a line longer than the limit that was not so long before."""
    start, end = text.rfind("\n", 0, edit.start) + 1, _line_end(text, edit.end)
    old = text[start:end]
    new = text[start : edit.start] + edit.text + text[edit.end : end]
    return max(map(len, new.split("\n"))) > max(limit, *map(len, old.split("\n")))
