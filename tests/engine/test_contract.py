"""Every backend keeps the engine contract: fast paths give the very tokens of the plain one."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_models import CONTEXT, cold, forget, mlx_engine, onnx_engine, prompt

from keystroke.engine.base import GREEDY, Engine, Interrupt, Sampling, Step, StepRequest
from keystroke.engine.onnx.engine import PREFILL_CHUNK
from keystroke.errors import ContextOverflow, EngineError, Interrupted, SessionClosed

SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)
ENGINES = [
    ("onnx", "llama", "int8"),
    ("onnx", "qwen2", "int4"),
    ("onnx", "qwen3", "int8"),
    ("onnx", "llama", "int8+ours"),
    ("onnx", "qwen3", "int4+ours"),
    ("onnx", "qwen2", "native"),
    ("onnx", "llama", "native"),
    ("onnx", "qwen3", "portable"),
    ("mlx", "llama"),
    ("mlx", "gemma3"),
    ("mlx", "qwen3", "Q4_K", "Q6_K", "Q5_K"),
    ("mlx", "qwen3_5"),
    ("mlx", "glm4_moe_lite"),
]


def made(folder: Path, backend: str, family: str, *kinds: str) -> Engine:
    if backend == "mlx":
        return mlx_engine(folder, family, *kinds)
    return onnx_engine(folder, family, *kinds)


@pytest.fixture(scope="module", params=ENGINES, ids=" ".join)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with made(tmp_path_factory.mktemp("model"), *request.param) as engine:
        yield engine


@pytest.fixture(scope="module", params=[("onnx", "llama", "int8"), ("mlx", "llama")], ids=" ".join)
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine of each backend, for what does not depend on the model."""
    with made(tmp_path_factory.mktemp("one"), *request.param) as engine:
        yield engine


def test_sessions_stepped_together_give_what_each_gives_alone(engine: Engine) -> None:
    prompts = [prompt(length, length) for length in (1, 17, 130)]
    expected = [cold(engine, tokens, 5, GREEDY) for tokens in prompts]
    forget(engine)
    sessions = [engine.session() for _ in prompts]
    for session, tokens in zip(sessions, prompts, strict=True):
        session.extend(tokens)
    found: list[list[int]] = [[] for _ in prompts]
    for _ in range(5):
        for tokens, step in zip(found, engine.step_many(list(map(StepRequest, sessions))), strict=True):
            tokens += step.tokens
    for session in sessions:
        session.close()
    assert found == expected


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_of_rows_gives_what_one_by_one_gives(engine: Engine, sampling: Sampling) -> None:
    for length in (1, 2, 3, 17, 130, 301):
        tokens = prompt(length, length)
        expected = cold(engine, tokens, 40, sampling)
        for width in (1, 2, 3, 7, 16, 31):
            with engine.session() as session:
                session.extend(tokens)
                got: list[int] = []
                while len(got) < 40:
                    step = session.step(expected[len(got) : len(got) + width], sampling)
                    got += step.tokens
            assert got[:40] == expected
            forget(engine)


def test_wrong_drafts_change_nothing(engine: Engine) -> None:
    tokens = prompt(50)
    expected = cold(engine, tokens, 30)
    dice = random.Random(3)
    with engine.session() as session:
        session.extend(tokens)
        got: list[int] = []
        while len(got) < 30:
            right = expected[len(got) : len(got) + dice.randrange(6)]
            got += session.step([*right, *prompt(dice.randrange(5), dice.randrange(99))]).tokens
    assert got[:30] == expected


def test_logits_do_not_depend_on_how_the_prompt_was_cut(engine: Engine) -> None:
    """To the last bit; except of a hybrid on MLX, which reads prompts in chunks that round differently."""
    tokens = prompt(PREFILL_CHUNK * 2 + 9)
    exact = Sampling(logprobs=20)
    forget(engine)
    with engine.session() as whole:
        whole.extend(tokens)
        expected = whole.step((), exact)
    forget(engine)
    with engine.session() as pieces:
        for end in (1, 2, 5, 40, 41, 200, len(tokens)):
            pieces.extend(tokens[:end])
            if end < len(tokens):
                pieces.step()
        found = pieces.step((), exact)
    if engine.info.architecture == "qwen3_5":
        assert found.tokens == expected.tokens
        assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-5)
    else:
        assert found == expected
    forget(engine)


def logprobs_of(step: Step) -> dict[int, float]:
    """Of the best tokens at its one position."""
    return dict(step.logprobs[0].top)


def test_random_extend_rollback_and_fork_agree_with_recomputing(engine: Engine) -> None:
    dice = random.Random(5)
    sessions = [engine.session()]
    sessions[0].extend(prompt(20))
    for _ in range(40):
        session = dice.choice(sessions)
        match dice.randrange(4):
            case 0:
                session.step(prompt(dice.randrange(4), dice.randrange(99)))
            case 1:
                session.rollback(dice.randrange(1, session.length + 1))
            case 2:
                keep = dice.randrange(session.length)
                session.extend([*session.tokens[:keep], *prompt(dice.randrange(1, 30), dice.randrange(99))])
            case 3 if len(sessions) < 4:
                sessions.append(session.fork())
    for session in sessions:
        tokens = list(session.tokens)
        after = [session.step().tokens[0] for _ in range(5)]
        session.close()
        assert after == cold(engine, tokens, 5)
    assert engine.stats().sessions == 0


def test_a_prefix_is_reused_across_sessions_by_content(one: Engine) -> None:
    tokens = prompt(200)
    expected = cold(one, [*tokens, 5, 6, 7], 12)
    with one.session() as first:
        first.extend(tokens)
        first.step()
    with one.session() as second:
        assert second.extend([*tokens, 5, 6, 7]).reused >= 199
        assert [second.step().tokens[0] for _ in range(12)] == expected


def test_a_prefix_is_borrowed_from_a_living_session(one: Engine) -> None:
    forget(one)
    tokens = prompt(150, 8)
    expected = cold(one, [*tokens[:100], 1, 2, 3], 6)
    with one.session() as first, one.session() as second:
        first.extend(tokens)
        after = [first.step().tokens[0] for _ in range(3)]
        assert second.extend([*tokens[:100], 1, 2, 3]).reused == 100
        assert [second.step().tokens[0] for _ in range(6)] == expected
        first.rollback(150)
        assert [first.step().tokens[0] for _ in range(3)] == after


def test_the_context_is_used_to_its_last_token(one: Engine) -> None:
    with one.session() as session:
        session.extend(prompt(CONTEXT - 3))
        for _ in range(3):
            session.step([1, 2, 3, 4])
            if session.length == CONTEXT:
                break
        while session.length < CONTEXT:
            session.step()
        with pytest.raises(ContextOverflow, match="is full"):
            session.step()
        with pytest.raises(ContextOverflow, match="1,025 tokens"):
            session.extend(prompt(CONTEXT + 1))


def test_an_interrupt_ends_a_run_under_way_and_the_session_goes_on(one: Engine) -> None:
    forget(one)
    tokens = prompt(1000, 4)
    expected = cold(one, tokens, 5)
    with one.session() as session:
        interrupt = Interrupt()
        threading.Timer(0.001, interrupt.set).start()

        def read_again_and_again() -> None:  # a fast machine may finish one prompt within the millisecond
            while True:
                session.extend(tokens, interrupt)
                session.rollback(0)
                session._held.clear()  # type: ignore[attr-defined]

        with pytest.raises(Interrupted):
            read_again_and_again()
        session.extend(tokens)
        assert [session.step().tokens[0] for _ in range(5)] == expected


@pytest.mark.parametrize("kind", [("onnx", "llama", "int8"), ("mlx", "llama")], ids=" ".join)
def test_a_closed_session_or_engine_refuses_calls(tmp_path: Path, kind: tuple[str, ...]) -> None:
    engine = made(tmp_path, *kind)
    session = engine.session()
    session.close()
    session.close()
    with pytest.raises(SessionClosed):
        session.extend([1])
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.session()
