"""The next edit by a model that is shown all places at once: one step chooses among them, or silence.

As `question`, sees values only and runs nothing. The choice costs one step; only where it is sure enough
is the new text written, greedily and with the old lines as the draft. What comes is an edit or a reason.
"""

from __future__ import annotations

import asyncio
import math

from keystroke.assist.next_edit.candidates import candidates
from keystroke.assist.next_edit.places import ANSWER_TOKENS, MOST_PLACES, REGION, PlacesFormat, PlacesPrompt
from keystroke.assist.next_edit.prompt import joined
from keystroke.assist.next_edit.question import PROBE, Asked, Found, Run, Said, Unfit, changes_of
from keystroke.engine.base import Sampling
from keystroke.engine.generation import GenerationParams
from keystroke.engine.speculative import FileDrafter

# How likely the place must be, and its new text, for an edit to be shown. Places: chosen for
# `models/coder-edit` on lessons that were held out, quiet in 97, 90 and 70 of 100 moments with nothing left.
PLACE = {"calm": 0.62, "balanced": 0.48, "eager": 0.25}
TEXT = {"calm": 0.8, "balanced": 0.65, "eager": 0.5}


class PlacesQuestion(Asked[PlacesFormat]):
    """All places are one question."""

    __slots__ = ()

    async def answered(self, run: Run) -> Found | Unfit:
        """Have a place chosen, then its text written."""
        prompt = await asyncio.to_thread(self.prompt)
        if prompt is None:
            return Unfit.NOWHERE
        said = await run(prompt.tokens, PROBE, None)
        if not said.logprobs:
            return Unfit.LEFT
        first = said.logprobs[0]
        chances = {token: math.exp(chance) for token, chance in [*first.top, (first.token, first.logprob)]}
        silence, *others = self.format.marks.numbers
        numbers = others[: len(prompt.places)]
        best = max(numbers, key=lambda number: chances.get(number, 0.0))
        here = chances.get(best, 0.0)
        if here < PLACE[self.eagerness]:
            return Unfit.LEFT if chances.get(silence, 0.0) >= 0.5 else Unfit.UNSURE
        draft = [t for line in prompt.lines[numbers.index(best)] for t in self.format.encode(f"{line}\n")]
        said = await run((*prompt.tokens, best), _writing(prompt), FileDrafter(draft))
        return await asyncio.to_thread(self.read, prompt, best, said, here)

    def prompt(self) -> PlacesPrompt | None:
        """The question; None where nothing changed or no place could have to do with it."""
        changes = changes_of(self.change, self.path)
        if not changes:
            return None
        lines = self.lines
        spots = candidates(self.change, self.problems, apart=REGION // 2, most=min(self.most, MOST_PLACES))
        places = tuple(dict.fromkeys(self.format.region(lines, spot.line) for spot in spots))
        if not places:
            return None
        return self.format.build([*self.history, *changes], self.path, lines, places, self.at)

    def read(self, prompt: PlacesPrompt, best: int, said: Said, here: float) -> Found | Unfit:
        """What the answer means for the buffer. `best`: the place that was chosen, `here` its chance."""
        try:
            answer = self.format.parse(prompt, (best, *said.tokens))
        except ValueError:
            return Unfit.UNUSABLE
        if answer is None:
            return Unfit.LEFT
        edits = self.edits(prompt.places[answer.place], answer.lines)
        if not edits:
            return Unfit.LEFT
        written = [entry.logprob for entry in said.logprobs]
        sure = math.exp(sum(written) / len(written)) if written else 1.0
        if sure < TEXT[self.eagerness]:
            return Unfit.UNSURE
        reason = self.objection(edits)
        return reason if reason is not None else Found(tuple(edits), here * sure)


def _writing(prompt: PlacesPrompt) -> GenerationParams:
    room = min(ANSWER_TOKENS, 96 + 2 * max(len(joined(lines)) for lines in prompt.lines))
    return GenerationParams(
        max_tokens=room, sampling=Sampling(logprobs=0), stop_tokens=frozenset({prompt.end})
    )
