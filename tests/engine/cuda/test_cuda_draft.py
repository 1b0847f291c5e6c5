"""A draft head inside the CUDA engine, its kernel's own source running on the emulator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_emulator import EmulatedLauncher
from cuda_models import CPU, tiny_spec, tiny_tensors, tiny_weights
from test_cuda_stored import MIXED, in_file, mixed

from keystroke.engine.base import GREEDY, Sampling, Session, StepRequest
from keystroke.engine.checkpoint.spec import EMBEDDING, ModelSpec
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import Plan
from keystroke.engine.cuda.target import AMPERE, HOPPER
from keystroke.engine.cuda.weights import build_weights
from keystroke.engine.speculative.head_file import HeadWeights
from keystroke.errors import UsageError
from keystroke_lab.draft_heads.reference import ReferenceHead
from keystroke_lab.draft_heads.target import TargetModel

sys.path.insert(0, str(Path(__file__).parents[1] / "speculative"))
from head_models import random_head

SPEC = tiny_spec(layers=3, context=256)
PROMPT = [(11 * i * i + 3 * i) % 203 for i in range(70)]
HOT = Sampling(temperature=0.8, seed=7)


def tiny_head(spec: ModelSpec = SPEC, layers: tuple[int, ...] = (1, 2), vocabulary: int = 120) -> HeadWeights:
    return random_head(spec, layers, vocabulary)


@pytest.fixture(scope="module")
def engine() -> CudaEngine:
    weights = tiny_weights(SPEC)
    return CudaEngine(weights, EmulatedLauncher(weights.plan), 4096, draft_head=tiny_head())


@pytest.fixture(scope="module")
def reference() -> ReferenceHead:
    return ReferenceHead(tiny_head(), SPEC, tiny_tensors(SPEC)[EMBEDDING].float().numpy())


def features(tokens: Sequence[int]) -> np.ndarray:
    target = TargetModel(SPEC, lambda name: tiny_tensors(SPEC)[name].float(), 256)
    return target.run_sequences(torch.tensor([list(tokens)]), (1, 2))[1][0].numpy()


def steps(engine: CudaEngine, session: Session, count: int, sampling: Sampling = GREEDY) -> list[int]:
    """`count` tokens, each step with whatever the engine guesses; what is too much is taken back."""
    until = session.length + count
    while session.length < until:
        guess = engine.guess(session.tokens)
        session.step(() if guess is None else guess.tokens, sampling)
    session.rollback(until)
    return list(session.tokens[until - count :])


def plainly(engine: CudaEngine, prompt: list[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    with engine.session() as session:
        session.extend(prompt)
        return [session.step(sampling=sampling).tokens[0] for _ in range(count)]


def test_a_guess_is_that_of_the_plain_arithmetic(engine: CudaEngine, reference: ReferenceHead) -> None:
    with engine.session() as session:
        session.extend(PROMPT)
        engine.guess(session.tokens)
        session.step()
        guess = engine.guess(session.tokens)
        tokens = list(session.tokens)
    assert guess is not None
    assert engine.head is not None
    reference.forget(0)
    reference.observe(features(tokens[:-1]), tokens[1:])
    seen: list[np.ndarray] = []

    def choose(logits: np.ndarray, place: int) -> int:
        seen.append(logits)
        return int(logits.argmax())

    drafted = reference.draft(len(guess.tokens), choose)
    assert guess.tokens == tuple(drafted)
    chances = np.cumprod([np.exp(row - row.max()).max() / np.exp(row - row.max()).sum() for row in seen])
    np.testing.assert_allclose(guess.chances, chances, rtol=0.05)
    np.testing.assert_allclose(engine.head.logits[:120].numpy(), seen[-1], atol=0.03 * np.abs(seen[-1]).max())


def test_a_guess_is_the_same_where_lanes_copy() -> None:
    guesses = []
    for target in (HOPPER, AMPERE):  # both new: pages that are found again were read in other portions
        weights = tiny_weights(SPEC, target=target)
        with (
            CudaEngine(weights, EmulatedLauncher(weights.plan), 4096, draft_head=tiny_head()) as engine,
            engine.session() as session,
        ):
            session.extend(PROMPT)
            engine.guess(session.tokens)
            session.step()
            guesses.append(engine.guess(session.tokens))
    assert guesses[0] is not None
    assert guesses[0] == guesses[1]


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_and_without_guesses(engine: CudaEngine, sampling: Sampling) -> None:
    with engine.session() as session:
        session.extend(PROMPT)
        assert steps(engine, session, 6, sampling) == plainly(engine, PROMPT, 6, sampling)


def test_guesses_that_are_taken_run_ahead_of_the_host_and_others_are_let_go(engine: CudaEngine) -> None:
    expected = plainly(engine, PROMPT, 12)
    with engine.session() as session:
        session.extend(PROMPT)
        while engine._ahead is None:
            guess = engine.guess(session.tokens)
            session.step(() if guess is None else guess.tokens)
        assert engine._ahead.guessed
        at = session.length - len(PROMPT)
        session.step(expected[at : at + 3])  # somebody knows better
        assert session.tokens[len(PROMPT) : len(PROMPT) + at + 4] == expected[: at + 4]


def test_what_others_drafted_is_taken_in_too(engine: CudaEngine, reference: ReferenceHead) -> None:
    """Twelve rows in one step, more than the head takes in at a time, and one more before it is asked."""
    expected = plainly(engine, PROMPT, 14)
    with engine.session() as session:
        session.extend(PROMPT)
        engine.guess(session.tokens, wanted=False)
        session.step(expected[:11])
        engine.guess(session.tokens, wanted=False)
        session.step(expected[12:13])
        guess = engine.guess(session.tokens)
        tokens = list(session.tokens)
    assert guess is not None
    assert tokens[len(PROMPT) :] == expected
    reference.forget(0)
    reference.observe(features(tokens[:-1]), tokens[1:])
    assert guess.tokens == tuple(reference.draft(len(guess.tokens), lambda row, _: int(row.argmax())))


def test_forks_rollbacks_new_text_and_company_never_change_the_text(engine: CudaEngine) -> None:
    other = [*PROMPT[:66], 9, 8, 7, 6, 5, 4]
    with engine.session() as session, engine.session() as second:
        session.extend(PROMPT)
        second.extend(other)
        expected = plainly(engine, PROMPT, 8)
        steps(engine, session, 4)
        fork = session.fork()
        assert steps(engine, session, 3) == expected[4:7]
        engine.guess(session.tokens)
        engine.guess(second.tokens)
        engine.step_many([StepRequest(session, [1, 2]), StepRequest(second)])
        assert list(session.tokens[len(PROMPT) :])[:8] == expected[: session.length - len(PROMPT)]
        known = plainly(engine, other, 4)
        assert steps(engine, second, 3) == known[1:]
        session.rollback(len(PROMPT) - 4)
        session.append(other[66:])
        assert steps(engine, session, 4) == known
        assert steps(engine, fork, 3) == expected[4:7]
        fork.close()


def test_a_head_drafts_for_weights_that_are_kept_as_stored() -> None:
    spec = replace(tiny_spec(layers=3, tied=False, context=256), hidden=256, intermediate=512, vocab_size=72)
    truth, given = in_file(spec, mixed)
    weights = build_weights(Plan(spec, "stored", 2, stored=MIXED), lambda name, _: given[name], CPU)
    head = tiny_head(spec, vocabulary=40)
    prompt = [(7 * i + 1) % 72 for i in range(30)]
    with CudaEngine(weights, EmulatedLauncher(weights.plan), 2048, draft_head=head) as engine:
        with engine.session() as session:
            session.extend(prompt)
            engine.guess(session.tokens)
            session.step()
            guess, tokens = engine.guess(session.tokens), list(session.tokens)
        with engine.session() as session:
            session.extend(prompt)
            assert steps(engine, session, 3) == plainly(engine, prompt, 3)
    assert guess is not None
    target = TargetModel(spec, lambda name: truth[name].float(), 256)
    seen = target.run_sequences(torch.tensor([tokens[:-1]]), (1, 2))[1][0].numpy()
    reference = ReferenceHead(head, spec, truth[EMBEDDING].float().numpy())
    reference.observe(seen, tokens[1:])
    assert guess.tokens[:1] == tuple(reference.draft(1, lambda row, _: int(row.argmax())))


def test_nobody_who_does_not_ask_pays(engine: CudaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> int:
        raise AssertionError("the head was asked to draft")

    monkeypatch.setattr(engine.head, "start", start)
    plainly(engine, PROMPT, 3)


def test_the_end_of_the_context_is_reached_with_guesses_too(engine: CudaEngine) -> None:
    prompt = [(7 * i + 1) % 203 for i in range(SPEC.context_length - 6)]
    with engine.session() as session:
        session.extend(prompt)
        assert steps(engine, session, 5) == plainly(engine, prompt, 5)


def test_a_head_of_another_model_is_refused() -> None:
    weights = tiny_weights(SPEC)
    with pytest.raises(UsageError, match="at most 4, all before the last"):
        CudaEngine(weights, EmulatedLauncher(weights.plan), 4096, draft_head=tiny_head(layers=(1, 3)))
