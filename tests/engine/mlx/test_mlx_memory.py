"""Memory of the MLX engine, on machines where all programs share it: in pages, counted, without growth."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from keystroke.engine.mlx.engine import PAGE, PREFILL_CHUNK, MlxEngine, MlxSession

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import mlx_engine, prompt
from mlx_models import drafting_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
from family_models import reference
from predictor_models import ReferencePredictor, save_with_predictor

END = 2  # of a message, in these models


def held_by_mlx() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


@pytest.fixture(params=["llama", "glm4_moe_lite", "qwen3_5", "qwen3_5 with its predictor"])
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def refused(*_: object) -> None:
        raise AssertionError("memory that is wired or limited here is taken from every other program")

    for name in ("set_wired_limit", "set_memory_limit"):
        monkeypatch.setattr(mx, name, refused)
    if "predictor" in request.param:
        model = reference("qwen3_5", max_position_embeddings=4096)
        save_with_predictor(model, ReferencePredictor(model), tmp_path)
        opened = drafting_engine(tmp_path)
    else:
        found = mlx_engine(tmp_path, request.param)
        assert isinstance(found, MlxEngine)
        opened = found
    with opened:
        yield opened


def steps(engine: MlxEngine, session: MlxSession, count: int) -> None:
    """With whatever the engine guesses, and a wrong draft where it guesses nothing."""
    for _ in range(count):
        guess = engine.guess(session.tokens)
        session.step(guess.tokens if guess is not None and guess.tokens else (5, 6))


def test_keys_and_values_are_allocated_in_pages(engine: MlxEngine) -> None:
    with engine.session() as session:
        session.extend(prompt(PAGE - 20))
        session.step()
        for _ in range(12):
            assert session.capacity == PAGE
            assert engine.stats().kv_bytes == engine.bytes_for(PAGE)
            session.step()
        session.extend(prompt(PAGE + 1))
        session.step()
        assert session.capacity == 2 * PAGE
        assert engine.stats().kv_bytes == engine.bytes_for(2 * PAGE)


def test_steps_and_rollbacks_leave_nothing_behind(engine: MlxEngine) -> None:
    with engine.session() as session:
        session.extend(prompt(100))
        session.step()
        sizes = []
        for _ in range(4):
            steps(engine, session, 12)
            session.rollback(100)
            session.step()
            sizes.append(held_by_mlx())
        assert max(sizes[1:]) <= sizes[0] + 2048, "one row of every layer is more"


def test_what_mlx_holds_is_what_the_engine_counts(engine: MlxEngine) -> None:
    """Over the turns of a conversation: nothing else grows with its length."""
    before = held_by_mlx()
    # Streams of one run, states before and after drafts, and the inputs of drafted rows.
    fixed = 2 * PREFILL_CHUNK * engine.spec.hidden * 4 + 2 * engine.state_bytes + (32 << 10)
    text: list[int] = []
    with engine.session() as session:
        for turn in range(6):
            text = [*session.tokens, *prompt(70, turn), END]
            session.extend(text)
            steps(engine, session, 3)
            counted = engine.stats().kv_bytes + engine.stats().cached_bytes + engine.snapshots.nbytes
            assert held_by_mlx() - before <= counted + fixed, f"turn {turn}"
    assert engine.stats().kv_bytes == 0
    engine.cache.clear()
    assert held_by_mlx() - before <= fixed
