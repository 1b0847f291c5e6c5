"""How sure the model is of a completion: only the tokens of the text that is shown count."""

from __future__ import annotations

import math

import pytest

from keystroke.assist.completion.run import ConfidenceMeter
from keystroke.engine.base import TokenLogprob
from keystroke.engine.generation import Chunk


def token(probability: float) -> TokenLogprob:
    return TokenLogprob(0, math.log(probability))


def test_repeated_text_before_and_text_cut_off_after_do_not_count() -> None:
    meter = ConfidenceMeter()
    for text, probability in (("  re", 0.01), ("turn", 0.5), (" x", 0.5), ("\n", 0.01)):
        meter.add(text, (math.log(probability),))
    assert meter.value("  re", "turn x") == pytest.approx(0.5)
    assert meter.value("", "  re") == pytest.approx(0.01)


def test_a_step_of_several_tokens_is_split_at_their_ends() -> None:
    chunk = Chunk("abcd", (1, 2), (token(0.9), token(0.1)), None, (2, 4))
    meter = ConfidenceMeter()
    assert list(meter.watch([chunk])) == [chunk]
    assert meter.value("", "ab") == pytest.approx(0.9)


def test_without_probabilities_or_text_nothing_is_claimed() -> None:
    meter = ConfidenceMeter()
    meter.add("abc", ())
    assert meter.value("", "abc") is None
    meter.add("d", (0.0,))
    assert meter.value("", "") is None
