"""The plan of a model: one native call a step gives the bits of the graph."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keystroke.engine.base import Interrupt, Mixture, Sampling, Step, StepRequest
from keystroke.engine.onnx import packing
from keystroke.engine.onnx.engine import OnnxEngine, OnnxSession
from keystroke.engine.onnx.plan import LogitRows
from keystroke.engine.sampler import sum_exponentials
from keystroke.errors import ContextOverflow, EngineError, Interrupted, UsageError

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from stored_models import opened, write_stored

TOKENS: list[int] = np.random.default_rng(3).integers(0, 96, 200).tolist()
# Runs as a session makes them: prefill without logits, drafts, single steps, and a rejected draft.
RUNS = ((0, 50, 0), (50, 17, 3), (67, 1, 1), (68, 8, 8), (72, 2, 2), (74, 4, 1), (78, 1, 1), (79, 70, 70))
MODELS = (
    ("llama", ["Q8_0"]),
    ("llama", ["Q5_0", "Q8_0"]),
    ("qwen2", ["Q4_K", "Q6_K", "Q5_0"]),
    ("qwen3", ["Q8_0", "Q4_K"]),
    ("smollm3", ["Q5_0", "Q4_0", "Q5_1"]),
)


def logits_of(engine: OnnxEngine) -> list[np.ndarray[Any, Any]]:
    with engine.session() as session:
        return [session._forward(TOKENS[at : at + n], at, rows, None).copy() for at, n, rows in RUNS]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("family", "kinds"), MODELS)
def test_a_plan_gives_the_bits_of_the_graph(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kinds: list[str],
    threads: int,
    packs: bool,
) -> None:
    monkeypatch.setattr(packing, "available_bytes", lambda: None if packs else 0)
    path = tmp_path / "model.gguf"
    write_stored(path, family, kinds)
    with opened(path, tmp_path, "native", threads=threads) as engine:
        assert engine._plan is not None
        found = logits_of(engine)
    with opened(path, tmp_path, "native", threads=threads, planned=False) as engine:
        assert engine._plan is None
        expected = logits_of(engine)
    for mine, other in zip(found, expected, strict=True):
        assert np.array_equal(mine, other)


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[OnnxEngine]:
    write_stored(tmp_path / "model.gguf", "llama", ["Q8_0"])
    with opened(tmp_path / "model.gguf", tmp_path, "native") as engine:
        yield engine


PROBE = Sampling(logprobs=2)


def _sessions(engine: OnnxEngine) -> list[OnnxSession]:
    """Short, long, forked, with text appended, and with a prompt whose logits are known."""
    sessions = [engine.session() for _ in range(4)]
    for session, length in zip(sessions, (1, 90, 30, 60), strict=True):
        session.extend(TOKENS[:length])
    sessions.append(sessions[1].fork())
    sessions[2].step((), PROBE)
    sessions[2].append(TOKENS[100:105])
    with engine.session() as session:  # keeps the logits of a prompt
        session.extend(TOKENS[:60])
        session.step((), PROBE)
    return sessions


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("family", "kinds"), MODELS)
def test_sessions_stepped_together_give_the_bits_of_each_alone(
    tmp_path: Path, family: str, kinds: list[str], threads: int
) -> None:
    path = tmp_path / "model.gguf"
    write_stored(path, family, kinds)
    found: dict[bool, list[list[Step]]] = {}
    for together in (False, True):
        with opened(path, tmp_path, "native", threads=threads) as engine:
            sessions = _sessions(engine)
            samplings = [PROBE, replace(PROBE, temperature=0.8, seed=3), PROBE, PROBE, PROBE]
            rounds = found[together] = []
            draft: tuple[int, ...] = ()
            for number in range(6):
                # The first session drafts what it will choose: the longest draft needs several groups.
                drafts = [draft, TOKENS[:3], (), TOKENS[: 60 * (number == 2)], TOKENS[: 30 * (number > 2)]]
                requests = list(map(StepRequest, sessions, drafts, samplings))
                steps = (
                    engine.step_many(requests)
                    if together
                    else [r.session.step(r.draft, r.sampling) for r in requests]
                )
                rounds.append(steps)
                with sessions[0].fork() as ahead:
                    draft = tuple(token for _ in range(3) for token in ahead.step().tokens)
            lengths = [session.length for session in sessions]
            assert lengths == [len(session.tokens) for session in sessions]
            assert all(session.resident < session.length for session in sessions)
    assert found[True] == found[False]
    assert found[True][1][0].accepted == 3


def test_a_step_of_several_that_fails_leaves_their_tokens(planned: OnnxEngine) -> None:
    room = planned.info.context_length
    with planned.session() as one, planned.session() as full:
        one.extend(TOKENS[:9])
        full.extend((TOKENS * (room // len(TOKENS) + 1))[:room])
        with pytest.raises(ContextOverflow):
            planned.step_many([StepRequest(one), StepRequest(full)])
        with pytest.raises(UsageError, match="once"):
            planned.step_many([StepRequest(one), StepRequest(one)])
        assert list(one.tokens) == TOKENS[:9]
        assert full.length == room
        expected = one.step().tokens
        one.rollback(9)
        assert planned.step_many([StepRequest(one)])[0].tokens == expected


def test_as_many_sessions_step_together_as_have_memory_for_a_whole_context(tmp_path: Path) -> None:
    write_stored(tmp_path / "model.gguf", "llama", ["Q8_0"])
    with opened(tmp_path / "model.gguf", tmp_path, "native") as engine:
        assert engine.max_batch >= 2
        assert engine.free_batch == 1
        whole = engine.info.kv_bytes_per_token * engine.info.context_length
    with opened(tmp_path / "model.gguf", tmp_path, "native", kv_budget=2 * whole - 1) as engine:
        assert engine.max_batch == 1


def test_an_interrupted_run_computes_nothing_more(planned: OnnxEngine) -> None:
    stopped = Interrupt()
    stopped.set()
    with planned.session() as session:
        before = session._forward(TOKENS[:9], 0, 1, None).copy()
        with pytest.raises(Interrupted):
            session._forward(TOKENS[9:12], 9, 1, stopped)
        assert np.array_equal(session._forward(TOKENS[:9], 0, 1, Interrupt()), before)


def test_tokens_outside_of_the_vocabulary_are_an_error(planned: OnnxEngine) -> None:
    with planned.session() as session, pytest.raises(EngineError, match="vocabulary"):
        session._forward([planned.info.vocab_size], 0, 1, None)


@pytest.mark.parametrize("count", [1, 15, 300, 4096, 49152, 151_936, 300_001])
@pytest.mark.parametrize("threads", [1, 3])
def test_ranked_rows_agree_with_the_sampler(tmp_path: Path, count: int, threads: int) -> None:
    """Tokens exactly, sums to six digits; and the bits do not depend on the threads."""
    write_stored(tmp_path / "model.gguf", "llama", ["Q8_0"])
    logits = np.random.default_rng(count).normal(-4, 5, (3, count)).astype(np.float32)
    logits[:2, : count // 3] = -np.inf
    logits[1, count // 2 :] = logits[1].max()  # equals
    exact = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True)).sum(axis=1)
    logits[2, count // 2] = np.nan
    with (
        opened(tmp_path / "model.gguf", tmp_path, "native", threads=threads) as engine,
        opened(tmp_path / "model.gguf", tmp_path, "native", threads=1) as alone,
    ):
        assert engine._plan is not None
        assert alone._plan is not None
        rows, others = LogitRows(logits), LogitRows(logits)
        engine._plan.rank(rows)
        alone._plan.rank(others)
        found = rows.ranked()
        assert [best for best, _ in found] == logits.argmax(axis=1).tolist()
        assert [total for _, total in found[:2]] == pytest.approx(exact[:2], rel=1e-6)
        assert found[:2] == others.ranked()[:2]
        for row, (best, total) in zip(logits[:2], found, strict=False):
            assert sum_exponentials(row, row[best]) == pytest.approx(total, rel=1e-6)


def test_engines_share_no_threads_or_memory(tmp_path: Path) -> None:
    write_stored(tmp_path / "model.gguf", "llama", ["Q5_0"])
    with opened(tmp_path / "model.gguf", tmp_path, "native") as one:
        expected = logits_of(one)
        with (
            opened(tmp_path / "model.gguf", tmp_path, "native", threads=3) as other,
            one.session() as session,
        ):
            session._forward(TOKENS[:30], 0, 1, None)
            found = logits_of(other)
        assert all(map(np.array_equal, found, expected))
        assert all(map(np.array_equal, logits_of(one), expected))


def test_a_closed_engine_gives_its_weights_back(planned: OnnxEngine) -> None:
    """At once: a gateway that unloads a model may hold the engine for longer."""
    assert planned._plan is not None
    plan = weakref.ref(planned._plan)  # which holds the weights
    planned.close()
    assert plan() is None


def _continued(engine: OnnxEngine, draft: tuple[int, ...], only: list[int] | None) -> tuple[Step, Step]:
    """The first two steps after a prompt; the first one may choose from `only`."""
    mixtures = (Mixture(0.0, {}, only=np.array(only)),) if only is not None else ()
    with engine.session() as session:
        session.extend(TOKENS[:60])
        first = session.step(draft, Sampling(logprobs=2, mixtures=mixtures))
        return first, session.step((), Sampling(logprobs=2))


@pytest.mark.parametrize("overwritten", [False, True])
def test_a_prompt_asked_again_is_not_computed_again_and_gives_the_same(
    planned: OnnxEngine, overwritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind drafts, right and wrong ones, and where another text has taken its place in the KV cache
    meanwhile; the first logits alone are kept."""
    wanted = _continued(planned, (), None)[0].tokens[0]
    asked: list[tuple[tuple[int, ...], list[int] | None]] = [((), None), ((), [5, 7, 11])]
    asked += [((wanted, 3), None), ((wanted + 1, 3), None), ((5, 7), [5])]
    for draft, only in asked:
        planned.known.clear()
        planned.cache.clear()
        expected = _continued(planned, draft, only)
        if overwritten:
            with planned.session() as session:
                session.extend([*TOKENS[:59], 1, 2, 3])
                session.step()
        runs: list[int] = []
        run = planned.run
        with monkeypatch.context() as patch:
            patch.setattr(planned, "run", lambda *a, run=run, runs=runs: (runs.append(1), run(*a))[1])
            assert _continued(planned, draft, only) == expected
        follows = bool(draft) and expected[0].tokens[0] == draft[0]
        assert len(runs) == 1 + follows


def test_logits_of_few_prompts_are_kept_and_only_for_their_scope(planned: OnnxEngine) -> None:
    for count in range(10, 20):
        with planned.session("one") as session:
            session.extend(TOKENS[:count])
            session.step()
    assert [(scope, len(tokens)) for scope, tokens in planned.known] == [("one", n) for n in range(16, 20)]


def test_warming_computes_what_extend_leaves_to_the_next_step(
    planned: OnnxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned.session() as session:
        session.extend(TOKENS[:40])
        session.warm()
    monkeypatch.setattr(planned, "run", lambda *_: pytest.fail("the first token is known"))
    with planned.session() as session:
        session.extend(TOKENS[:40])
        session.step()


def test_warming_a_full_context_does_nothing(planned: OnnxEngine) -> None:
    full = [TOKENS[i % len(TOKENS)] for i in range(planned.info.context_length)]
    with planned.session() as session:
        session.extend(full)
        session.warm()
        assert session.length == len(full)
