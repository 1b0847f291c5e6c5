"""Predicts the next edit with a model, one question per place, where no rule applies.

`run` is the caller's engine. Each candidate place costs one step (the probability that it stays as it is);
only the best one is written, greedily, with its old lines as the draft. The result is validated edits, or a
reason.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Generic, TypeVar

from keystroke.analysis.syntax import LANGUAGES, error_count, surrounding_region
from keystroke.assist.next_edit.burst import Burst
from keystroke.assist.next_edit.candidates import MOST, find_candidates
from keystroke.assist.next_edit.prompt import (
    REGION,
    EditFormat,
    EditPrompt,
    LineRange,
    RecentChange,
    changes_between,
)
from keystroke.engine.base import Sampling, TokenLogprob
from keystroke.engine.generation import GenerationParams
from keystroke.engine.speculative import Drafter, FileDrafter
from keystroke.text import Edit, apply_edits, minimal_diff, shift

# The least product of the probability that a place changes and the confidence of its text. Of 93 moments of
# held-out releases, 31 of them with nothing left to do, the embedded model would offer 3 at 0.9 (2 at the
# right place, 1 with nothing left), 6 at 0.85 (4, 2), 12 at 0.8 (7, 5), 15 at 0.75 (10, 5).
THRESHOLDS = {"calm": 0.9, "balanced": 0.85, "eager": 0.75}
SURE = 0.9  # a place this likely to change is chosen without asking about the others
_RIVALS = 20  # alternatives whose probabilities a step reports
_LONGEST_CHANGE = 200  # lines; more is a paste


class NoEditReason(StrEnum):
    """Why no edit of the model is proposed. The values are wire names."""

    NOWHERE = "nothing_to_change"  # no change was made, or no candidate place was found
    LEFT = "model_leaves_it"  # the model keeps every place
    UNSURE = "low_confidence"
    UNUSABLE = "unusable_answer"
    UNDOES = "undoes_the_change"
    BREAKS = "breaks_syntax"
    TOO_LONG = "line_too_long"
    DISMISSED = "dismissed_before"


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The tokens of an answer and their probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


Run = Callable[[Sequence[int], GenerationParams, Drafter | None], Awaitable[EngineAnswer]]


@dataclass(frozen=True, slots=True)
class PredictedEdits:
    """Edits of the buffer that belong together, in order, and their confidence."""

    edits: tuple[Edit, ...]
    confidence: float


Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class EditQuestion(Generic[Form]):
    """A question in the model's format. `change` is the last one, `history` the changes before it, in this
    file and others."""

    format: Form
    path: str
    language: str | None
    change: Burst
    history: tuple[RecentChange, ...] = ()
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
    def cursor_line(self) -> int | None:
        return None if self.cursor is None else self.text.count("\n", 0, self.cursor)

    def edits_for(self, place: LineRange, new_lines: Sequence[str]) -> list[Edit]:
        """The smallest edits that make `place` read `new_lines`."""
        start, end = _line_span(self.text, place.first, place.last)
        old = self.text[start:end]
        newline = "\r\n" if "\r\n" in old else "\n"
        new = "".join(f"{line}{newline}" for line in new_lines)
        if end == len(self.text):
            new = new.removesuffix(newline)  # the last line of a text has no end
        return [shift(edit, start) for edit in merged_edits(old, new)]

    def judge(
        self, edits: Sequence[Edit], sure: float, least: float, confidence: float
    ) -> PredictedEdits | NoEditReason:
        """The edits with their confidence, or why they are not proposed: `sure` has to reach `least`."""
        if not edits:
            return NoEditReason.LEFT
        if sure < least:
            return NoEditReason.UNSURE
        return self.find_objection(edits) or PredictedEdits(tuple(edits), confidence)

    def find_objection(self, edits: Sequence[Edit]) -> NoEditReason | None:
        """Why `edits` are not proposed, or None."""
        change, text = self.change, self.text
        for edit in edits:
            inside = edit.start < change.new_end and edit.end > change.start
            back = edit.start == change.start and edit.text and edit.text.strip() == change.old.strip()
            if inside or back:
                return NoEditReason.UNDOES
        if any((text[e.start : e.end].strip(), e.text.strip()) in self.dismissed for e in edits):
            return NoEditReason.DISMISSED
        if self.max_line is not None and any(_grows_past(text, edit, self.max_line) for edit in edits):
            return NoEditReason.TOO_LONG
        if self.language in LANGUAGES:
            after = apply_edits(text, edits)
            first, last = surrounding_region(text, edits[0].start, edits[-1].end)
            grown = len(after) - len(text)
            was = error_count(text[first:last], self.language)
            if error_count(after[first : last + grown], self.language) > was:
                return NoEditReason.BREAKS
        return None


class SinglePlaceQuestion(EditQuestion[EditFormat]):
    """Asks about each place separately."""

    __slots__ = ()

    async def resolve(self, run: Run) -> PredictedEdits | NoEditReason:
        """Ask about each place, then generate the best one."""
        prompts = await asyncio.to_thread(self.prompts)
        best: tuple[float, EditPrompt] | None = None
        for prompt in prompts:
            chance = await self._change_chance(prompt, run)
            if best is None or chance > best[0]:
                best = (chance, prompt)
            if chance >= SURE:
                break
        if best is None:
            return NoEditReason.NOWHERE
        chance, prompt = best
        if chance < THRESHOLDS[self.eagerness]:
            return NoEditReason.LEFT if chance < 0.5 else NoEditReason.UNSURE
        reply = await run(prompt.tokens, _answer_params(prompt), FileDrafter(prompt.draft))
        return await asyncio.to_thread(self.parse_answer, prompt, reply, chance)

    def prompts(self) -> list[EditPrompt]:
        """The places to ask about, best guess first."""
        changes = changes_in_burst(self.change, self.path)
        if not changes:
            return []
        lines = self.lines
        history = [*self.history, *changes]
        spots = find_candidates(self.change, self.problems, apart=REGION // 2, most=self.most)
        regions = dict.fromkeys(self.format.region(lines, spot) for spot in spots)
        return [self.format.build(history, self.path, lines, area, self.cursor_line) for area in regions]

    def parse_answer(
        self, prompt: EditPrompt, reply: EngineAnswer, chance: float
    ) -> PredictedEdits | NoEditReason:
        """The edits of an answer. `chance`: the probability that the place changes at all."""
        new_lines = self.format.parse(prompt, reply.tokens)
        if new_lines is None:
            return NoEditReason.UNUSABLE
        edits = self.edits_for(prompt.region, new_lines)
        sure = chance * _confidence(prompt, reply)
        return self.judge(edits, sure, THRESHOLDS[self.eagerness], sure)

    async def _change_chance(self, prompt: EditPrompt, run: Run) -> float:
        """The probability that the place changes."""
        reply = await run(prompt.tokens, PROBE, None)
        if not reply.logprobs:
            return 0.0
        first = reply.logprobs[0]
        chances = dict([(first.token, first.logprob), *first.top])
        return 1.0 - math.exp(chances.get(prompt.keep, -math.inf))


PROBE = GenerationParams(max_tokens=1, sampling=Sampling(logprobs=_RIVALS), ignore_eos=True)


def _answer_params(prompt: EditPrompt) -> GenerationParams:
    """Greedy; keeping the place is excluded, since that was asked before."""
    return GenerationParams(
        max_tokens=prompt.room,
        sampling=Sampling(logprobs=0, logit_bias={prompt.keep: -100.0}),
        stop_tokens=frozenset({prompt.end}),
    )


def changes_in_burst(burst: Burst, path: str) -> list[RecentChange]:
    """The burst as whole lines, with the line above it where it only adds or only removes."""
    above = burst.before.rfind("\n", 0, max(0, burst.before.rfind("\n", 0, burst.start))) + 1
    old, new = (
        text[above : _line_end(text, end)].replace("\r\n", "\n")
        for text, end in ((burst.before, burst.old_end), (burst.after, burst.new_end))
    )
    if max(old.count("\n"), new.count("\n")) > _LONGEST_CHANGE:
        return []
    return [c for c in changes_between(old, new, path) if c.before.split() != c.after.split()]


def merged_edits(old: str, new: str) -> list[Edit]:
    """The smallest edits from `old` to `new`; those of neighbouring lines are merged."""
    out: list[Edit] = []
    for edit in minimal_diff(old, new):
        between = old[out[-1].end : edit.start] if out else ""
        if out and between.count("\n") <= 1:
            out[-1] = Edit(out[-1].start, edit.end, out[-1].text + between + edit.text)
        else:
            out.append(edit)
    return out


def _confidence(prompt: EditPrompt, reply: EngineAnswer) -> float:
    """The geometric mean probability of the new tokens and of those at which the old text continues."""
    if not reply.logprobs:
        return 1.0
    tokens = reply.tokens[: len(reply.logprobs)]
    counted: set[int] = set()
    for tag, _, _, start, end in SequenceMatcher(None, prompt.draft, tokens, autojunk=False).get_opcodes():
        if tag != "equal":
            counted.update(range(start, min(end + 1, len(tokens))))
    chosen = [reply.logprobs[i].logprob for i in counted]
    return math.exp(sum(chosen) / len(chosen)) if chosen else 1.0


def _line_span(text: str, first: int, last: int) -> tuple[int, int]:
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
