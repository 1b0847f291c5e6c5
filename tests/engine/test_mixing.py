"""A second predictor's chances are mixed in exactly; drafts, half words and grammars stay what they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keystroke.engine.base import GREEDY, Mixture, Sampling, TokenLogprob
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.grammar.constraint import choice
from keystroke.engine.mixing import Continuations, Mixer, Mixing, Predictor, StepMixtures, mix_logprobs
from keystroke.engine.model import Model
from keystroke.engine.sampler import choose, logprob, probabilities, verify
from keystroke.engine.speculative import FileDrafter
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.errors import UsageError

TOKENIZER = ByteTokenizer(SPECIAL, eos=EOS)
CHANCES = st.lists(st.floats(-12, 4, width=32), min_size=6, max_size=6).map(
    lambda logits: np.array(logits, dtype=np.float32)
)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


@given(CHANCES, st.floats(0.01, 0.95), st.floats(0, 1))
def test_the_chances_are_those_of_the_mixture(logits: np.ndarray, weight: float, share: float) -> None:
    mixture = Mixture(weight, {1: share}, 1 - share, ends=(4, 5))
    expected = (1 - weight) * softmax(logits)
    expected[1] += weight * share
    expected[4 + int(logits[5] > logits[4])] += weight * (1 - share)
    sampling = Sampling(temperature=1.0, mixtures=(mixture,))
    assert probabilities(logits, sampling) == pytest.approx(expected, rel=1e-4, abs=1e-7)
    best = int(expected.argmax())
    chosen = choose(logits, Sampling(mixtures=(mixture,)))
    assert expected[chosen] == pytest.approx(expected[best], rel=1e-5)


@given(CHANCES, st.floats(0, 0.95), st.sampled_from([(1, 3), (1,), (0, 1, 2, 3, 4, 5)]))
def test_the_mixture_comes_after_a_restriction(
    logits: np.ndarray, weight: float, only: tuple[int, ...]
) -> None:
    mixture = Mixture(weight, {1: 1.0}, only=np.array(only))
    expected = np.zeros(6)
    expected[list(only)] = (1 - weight) * softmax(logits[list(only)])
    expected[1] += weight
    found = probabilities(logits, Sampling(temperature=1.0, mixtures=(mixture,)))
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-7)
    chosen = choose(logits, Sampling(mixtures=(mixture,)))
    assert expected[chosen] == pytest.approx(expected.max(), rel=1e-5)


def test_a_bias_comes_before_the_mixture() -> None:
    """A half word leaves few tokens; among those the mixture has its weight and no more."""
    logits = np.array([8, 0, -1, -9], dtype=np.float32)
    held = Sampling(logit_bias={1: 1e4, 2: 1e4}, mixtures=(Mixture(0.3, {2: 1.0}),))
    assert choose(logits, held) == 1  # e^0 to e^-1 is 0.73 to 0.27, and 0.51 to 0.49 after it
    assert choose(logits, Sampling(logit_bias={1: 1e4, 2: 1e4}, mixtures=(Mixture(0.4, {2: 1.0}),))) == 2


def test_each_place_of_a_draft_has_its_own_mixture() -> None:
    logits = np.zeros((3, 4), dtype=np.float32)
    mixtures = (Mixture(0.9, {3: 1.0}), Mixture(0.9, {2: 1.0}), None)
    step = verify(logits, [3, 1], Sampling(mixtures=mixtures), 0)
    assert step.tokens == (3, 2)
    assert step.accepted == 1


COARSE = st.lists(st.integers(-2, 2), min_size=6, max_size=6).map(lambda x: np.array(x, dtype=np.float32))


@given(CHANCES | COARSE, st.floats(0, 0.95), st.integers(0, 5), st.booleans(), st.booleans())
@example(np.zeros(6, dtype=np.float32), 5e-324, 0, True, True)
def test_a_step_chooses_what_a_single_choice_does(
    logits: np.ndarray, weight: float, token: int, ends: bool, held: bool
) -> None:
    """Also where tokens are equally likely."""
    share = 0.5 if ends else 1.0
    only = np.array([1, 2, 4]) if held else None
    mixture = Mixture(weight, {token: share}, 1.0 - share, ends=(4, 5), only=only)
    for mixtures in ((mixture,), (None,), ()):
        sampling = Sampling(mixtures=mixtures, logprobs=2)
        step = verify(logits[None], [], sampling, 0)
        assert step.tokens == (choose(logits, sampling),)
        assert step.logprobs == (logprob(logits, step.tokens[0], 2),)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UsageError, match="token 9"):
        choose(np.zeros(4, dtype=np.float32), Sampling(mixtures=(Mixture(0.5, {9: 1.0}),)))


def test_what_is_told_is_the_mixed_chance() -> None:
    told = TokenLogprob(7, math.log(0.2), ((7, math.log(0.2)), (8, math.log(0.1))))
    mixed, plain = mix_logprobs([told, told], (Mixture(0.5, {7: 0.6}, 0.4, ends=(8,)), None))
    assert math.exp(mixed.logprob) == pytest.approx(0.1 + 0.3)
    assert [math.exp(p) for _, p in mixed.top] == pytest.approx([0.4, 0.25])
    assert plain == told


class Told:
    """A predictor that goes on with one text, wherever the answer is at."""

    def __init__(self, text: str, length: int = 24, ends_line: bool = True) -> None:
        self.ends_line = ends_line
        self._text, self._length = text, length

    def predict(self, said: str) -> Continuations | None:
        if not self._text.startswith(said):
            return None
        return Continuations(self._length, {self._text[len(said) :]: 1.0})


def mixture(predictor: Predictor, said: str, left: str = "") -> Mixture | None:
    return Mixer(predictor, TOKENIZER, [EOS]).mixture(TOKENIZER.encode(said), left=lambda _: left)


def test_a_longer_context_weighs_more_and_disagreement_less() -> None:
    class Torn(Told):
        def predict(self, said: str) -> Continuations:
            return Continuations(self._length, {"a": 2.0, "b": 1.0})

    weights = [found.weight for n in (2, 5, 24) if (found := mixture(Told("abc", n), ""))]
    assert weights == sorted(set(weights))
    assert len(weights) == 3
    assert weights[-1] < 0.95
    torn = mixture(Torn("", 24), "")
    assert torn is not None
    assert torn.weight < weights[-1] / 2
    assert torn.chances == {ord("a"): pytest.approx(2 / 3), ord("b"): pytest.approx(1 / 3)}


def test_the_end_of_a_line_ends_an_answer_only_where_that_is_one_line() -> None:
    found = mixture(Told("abc"), "abc")
    assert found is not None
    assert found == Mixture(found.weight, {}, 1.0, (EOS,))
    assert mixture(Told("abc", ends_line=False), "abc") is None


def test_nothing_is_said_in_the_middle_of_a_character() -> None:
    half = "é".encode()[:1]
    assert Mixer(Told("é"), TOKENIZER, [EOS]).mixture(list(half)) is None


def said(
    model: Model, params: GenerationParams, predictor: Predictor, draft: str = "", *, drafts: bool = True
) -> Generation:
    drafter = FileDrafter(model.tokenizer.encode(draft)) if draft else None
    with model.engine.session() as session:
        mixing = Mixing(predictor, drafts)
        generation = Generation(model, session, [65], params, drafter=drafter, mixing=mixing)
        list(generation)
    return generation


def saying(text: str) -> Model:
    """A model that would say `text`, and gives it 0.998."""
    return Model("echo", EchoEngine(lambda _: text), TOKENIZER)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, seed=11), Sampling(logprobs=0)])
@pytest.mark.parametrize("draft", ["self.width * 2", "self.height", "something"])
def test_drafts_do_not_change_a_mixed_answer(sampling: Sampling, draft: str) -> None:
    model, predictor = saying("self.width"), Told("self.height")
    params = GenerationParams(max_tokens=24, sampling=sampling)
    assert said(model, params, predictor, draft).text == said(model, params, predictor).text


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, seed=11), Sampling(logprobs=0)])
@pytest.mark.parametrize("seen", ["self.width", "self.height * 2", "elsewhere"])
def test_a_line_seen_before_is_said_in_fewer_steps_and_is_the_same_line(
    sampling: Sampling, seen: str
) -> None:
    params = GenerationParams(max_tokens=24, sampling=sampling)
    quick = said(saying("self.width"), params, Told(seen))
    plain = said(saying("self.width"), params, Told(seen), drafts=False)
    assert (quick.text, quick.tokens, quick.finish) == (plain.text, plain.tokens, plain.finish)
    assert plain.stats.drafted == 0
    if sampling is GREEDY and quick.text.startswith(seen):
        assert quick.stats.steps < plain.stats.steps


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.7, seed=11), Sampling(logprobs=2)])
@pytest.mark.parametrize("seen", ["self.width", "self.height * 2", "seldom", "elsewhere"])
@pytest.mark.parametrize("begin", ["s", "sel", "self.w", "é"])
def test_a_half_word_is_drafted_with_what_follows_it(sampling: Sampling, seen: str, begin: str) -> None:
    params = GenerationParams(max_tokens=24, sampling=sampling, begin=begin)
    quick, plain = (said(saying("self.width"), params, Told(seen), drafts=drafts) for drafts in (True, False))
    assert quick.text.startswith(begin)
    assert (quick.text, quick.tokens, quick.finish) == (plain.text, plain.tokens, plain.finish)
    if seen == "self.width" and sampling is GREEDY and begin != "é":
        assert quick.stats.steps < plain.stats.steps


def test_only_what_is_believed_is_drafted() -> None:
    def drafted(length: int, most: int = 9) -> str:
        return TOKENIZER.decode(Mixer(Told("abcdefgh", length), TOKENIZER, [EOS]).draft([], most)[0])

    assert drafted(40) == "abcdef"
    assert drafted(40, most=2) == "ab"
    assert drafted(4) == "a"
    assert drafted(1) == ""
    assert Mixer(Told("abc"), TOKENIZER, [EOS]).draft(TOKENIZER.encode("abc"), 9)[0] == ()  # its end


def test_mixtures_behind_a_rejected_token_are_not_computed() -> None:
    asked = []

    def compute(draft: Sequence[int]) -> Mixture | None:
        asked.append(tuple(draft))
        return None

    mixtures = StepMixtures(compute, (7, 8, 9), [Mixture(0.5, {2: 1.0})])
    step = verify(np.zeros((4, 12), dtype=np.float32), (2, 7, 9), Sampling(mixtures=mixtures), 0)
    assert step.tokens == (2, 0)
    assert asked == [(7,)]
    assert list(mixtures) == [Mixture(0.5, {2: 1.0}), None, None, None]
    assert asked == [(7,), (7, 8), (7, 8, 9)]


def test_where_the_context_is_long_what_was_seen_is_said_and_ends() -> None:
    generation = said(saying("self.width"), GenerationParams(max_tokens=24), Told("self.height"))
    assert generation.text == "self.height"
    assert generation.finish is Finish.STOP


def test_a_half_word_is_gone_on_with_whatever_was_seen() -> None:
    params = GenerationParams(max_tokens=24, begin="self.w")
    assert said(saying("self.width"), params, Told("self.height")).text.startswith("self.w")
    assert said(saying("self.height"), params, Told("self.warm")).text == "self.warm"


def test_beside_a_grammar_nobody_else_is_asked() -> None:
    class Never(Told):
        def predict(self, said: str) -> Continuations | None:
            raise AssertionError("asked")

    params = GenerationParams(max_tokens=8, constraint=choice(["yes", "no"]))
    assert said(saying("yes"), params, Never("")).text in ("yes", "no")
