"""Predicts the next edit with a model that is shown all places at once: one step chooses among them.

The new text is generated only if the choice is confident enough, greedily, with the old lines as the draft.
"""

from __future__ import annotations

import asyncio
import math

from keystroke.assist.next_edit.candidates import find_candidates
from keystroke.assist.next_edit.places import ANSWER_TOKENS, MOST_PLACES, REGION, PlacesFormat, PlacesPrompt
from keystroke.assist.next_edit.prompt import join_lines
from keystroke.assist.next_edit.question import (
    PROBE,
    EditQuestion,
    EngineAnswer,
    NoEditReason,
    PredictedEdits,
    Run,
    changes_in_burst,
)
from keystroke.engine.base import Sampling
from keystroke.engine.generation import GenerationParams
from keystroke.engine.speculative import FileDrafter

# The least probability of the place and of its new text. Places: chosen for `models/coder-edit` on held-out
# examples; silent in 97, 90 and 70 of 100 moments with nothing left to do.
PLACE = {"calm": 0.62, "balanced": 0.48, "eager": 0.25}
TEXT = {"calm": 0.8, "balanced": 0.65, "eager": 0.5}


class PlacesQuestion(EditQuestion[PlacesFormat]):
    """Asks about all places at once."""

    __slots__ = ()

    async def resolve(self, run: Run) -> PredictedEdits | NoEditReason:
        """Let the model choose a place, then generate its text."""
        prompt = await asyncio.to_thread(self.prompt)
        if prompt is None:
            return NoEditReason.NOWHERE
        reply = await run(prompt.tokens, PROBE, None)
        if not reply.logprobs:
            return NoEditReason.LEFT
        first = reply.logprobs[0]
        chances = {token: math.exp(chance) for token, chance in [*first.top, (first.token, first.logprob)]}
        silence, *others = self.format.marks.numbers
        numbers = others[: len(prompt.places)]
        best = max(numbers, key=lambda number: chances.get(number, 0.0))
        place_chance = chances.get(best, 0.0)
        if place_chance < PLACE[self.eagerness]:
            return NoEditReason.LEFT if chances.get(silence, 0.0) >= 0.5 else NoEditReason.UNSURE
        draft = [t for line in prompt.lines[numbers.index(best)] for t in self.format.encode(f"{line}\n")]
        reply = await run((*prompt.tokens, best), _answer_params(prompt), FileDrafter(draft))
        return await asyncio.to_thread(self.parse_answer, prompt, best, reply, place_chance)

    def prompt(self) -> PlacesPrompt | None:
        """The prompt; None where nothing changed or no candidate place was found."""
        changes = changes_in_burst(self.change, self.path)
        if not changes:
            return None
        lines = self.lines
        spots = find_candidates(
            self.change, self.problems, apart=REGION // 2, most=min(self.most, MOST_PLACES)
        )
        places = tuple(dict.fromkeys(self.format.region(lines, spot) for spot in spots))
        if not places:
            return None
        return self.format.build([*self.history, *changes], self.path, lines, places, self.cursor_line)

    def parse_answer(
        self, prompt: PlacesPrompt, best: int, reply: EngineAnswer, place_chance: float
    ) -> PredictedEdits | NoEditReason:
        """The edits of an answer. `best`: the chosen place, `place_chance` its probability."""
        try:
            answer = self.format.parse(prompt, (best, *reply.tokens))
        except ValueError:
            return NoEditReason.UNUSABLE
        if answer is None:
            return NoEditReason.LEFT
        edits = self.edits_for(prompt.places[answer.place], answer.lines)
        written = [entry.logprob for entry in reply.logprobs]
        sure = math.exp(sum(written) / len(written)) if written else 1.0
        return self.judge(edits, sure, TEXT[self.eagerness], place_chance * sure)


def _answer_params(prompt: PlacesPrompt) -> GenerationParams:
    room = min(ANSWER_TOKENS, 96 + 2 * max(len(join_lines(lines)) for lines in prompt.lines))
    return GenerationParams(
        max_tokens=room, sampling=Sampling(logprobs=0), stop_tokens=frozenset({prompt.end})
    )
