"""An engine that guesses by itself, among the other drafters."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from keystroke.engine.base import Engine, Guess
from keystroke.engine.speculative.adaptive import AdaptiveDrafter, engine_drafter
from keystroke.engine.speculative.cost import cost_table
from keystroke.engine.speculative.engine_draft import EngineDrafter
from keystroke.engine.speculative.suffix_automaton import SuffixDrafter

COST = cost_table({1: 1.0, 2: 1.02, 8: 1.08, 16: 1.3, 32: 1.7})


class Guessing:
    """Says the same three tokens whatever it is asked about, and counts."""

    drafts = False

    def __init__(self) -> None:
        self.asked = self.wanted = 0

    def guess(self, tokens: Sequence[int], *, wanted: bool = True) -> Guess | None:
        self.asked += 1
        self.wanted += wanted
        return Guess((7, 8, 9), (0.9, 0.8, 0.7)) if wanted else None


def drafter(engine: Guessing) -> AdaptiveDrafter:
    own = EngineDrafter(cast(Engine, cast(object, engine)))
    return AdaptiveDrafter([SuffixDrafter()], COST, own)


def test_the_engines_guess_is_taken_whole_where_nothing_repeats() -> None:
    made = drafter(Guessing())
    made.begin([1, 2, 3, 4])
    assert tuple(made.propose([1, 2, 3, 4], 16)) == (7, 8, 9)


def test_a_long_repetition_that_came_true_is_preferred_and_the_engine_only_keeps_up() -> None:
    engine = Guessing()
    made = drafter(engine)
    text = list(range(100, 160))
    tokens = [*text, *text[:20]]
    made.begin(tokens)
    made.record_result(0, 0, 0.001)  # what a plain step takes
    for _ in range(4):
        draft = list(made.propose(tokens, 16))
        taken = draft if draft[0] == text[len(tokens) - 60] else []
        made.record_result(len(draft), len(taken), 0.0012)
        new = [*taken, text[(len(tokens) + len(taken)) % 60]]
        tokens += new
        made.observe(new)
        if len(tokens) > 100:
            break
    before = engine.wanted
    assert list(made.propose(tokens, 16))[:3] == [text[(len(tokens) + i) % 60] for i in range(3)]
    assert engine.asked > engine.wanted or engine.wanted == before + 1


def test_guesses_that_never_come_true_are_not_asked_for_any_more_and_tried_again_later() -> None:
    engine = Guessing()
    own = EngineDrafter(cast(Engine, cast(object, engine)))
    asked = 0
    while own.propose([1, 2], 8) and asked < 200:
        own.record_result(3, 0, 0.001)
        asked += 1
    assert asked < 60
    quiet = 1
    while not own.propose([1, 2], 8):
        quiet += 1
    assert 32 < quiet < 100


def test_without_anything_learnt_the_engines_guesses_are_all_there_is() -> None:
    engine = Guessing()
    assert engine_drafter(cast(Engine, cast(object, engine))) is None
    engine.drafts = True
    made = engine_drafter(cast(Engine, cast(object, engine)))
    assert made is not None
    made.begin([1, 2, 3, 1, 2])
    assert tuple(made.propose([1, 2, 3, 1, 2], 16)) == (7, 8, 9)
    made.use_engine(cast(Engine, cast(object, Guessing())))
    assert tuple(made.propose([1, 2, 3, 1, 2], 16)) == ()


def test_nothing_is_asked_of_an_engine_without_a_head() -> None:
    assert Engine.drafts is False
    assert Engine.guess(cast(Engine, SimpleNamespace()), [1, 2, 3]) is None
