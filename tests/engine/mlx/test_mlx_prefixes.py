"""Prefixes of the MLX engine on disk, and recurrent states that are taken back from snapshots."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keystroke.engine.base import Session
from keystroke.engine.disk_prefixes import DiskPrefixes
from keystroke.engine.mlx.engine import MlxEngine
from keystroke.engine.snapshots import SNAPSHOT_EVERY, SNAPSHOT_LEAST, SnapshotStore

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import cold, mlx_engine, prompt

TOKENS = prompt(400, seed=3)
END = 2  # of a message, in these models


@pytest.fixture(params=["llama", "qwen3_5", "glm4_moe_lite"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MlxEngine]:
    with mlx_engine(tmp_path / "model", request.param) as engine:
        assert isinstance(engine, MlxEngine)
        yield engine


@pytest.fixture
def hybrid(tmp_path: Path) -> Iterator[MlxEngine]:
    with mlx_engine(tmp_path / "model", "qwen3_5") as engine:
        assert isinstance(engine, MlxEngine)
        yield engine


def answer(session: Session, count: int) -> list[int]:
    return [session.step().tokens[0] for _ in range(count)]


def test_a_prefix_is_found_after_a_restart_and_goes_on_as_from_cold(
    engine: MlxEngine, tmp_path: Path
) -> None:
    expected = cold(engine, [*TOKENS, 5, 6, 7], 12)
    with engine.session() as session:
        session.extend([*TOKENS, 1])
        session.step()
    engine.save_prefixes(DiskPrefixes(tmp_path / "kept", "m", 64 << 20))
    engine.cache.clear()
    engine.disk_prefixes = DiskPrefixes(tmp_path / "kept", "m", 64 << 20)
    with engine.session() as session:
        assert session.extend([*TOKENS, 5, 6, 7]).reused >= len(TOKENS) - SNAPSHOT_LEAST
        assert answer(session, 12) == expected


def test_a_conversation_of_a_hybrid_reads_only_its_newest_turn(hybrid: MlxEngine) -> None:
    text = [*prompt(90, 1), END]
    with hybrid.session() as session:
        session.extend(text)
        for turn in range(7):
            said = [*answer(session, 5), END]
            text += said
            asked = [*prompt(70, turn + 2), END]
            text += asked
            result = session.extend(text)
            assert result.computed <= len(said) + len(asked) + 1
        found = answer(session, 5)
    assert found == cold(hybrid, text, 5)


def test_an_edit_in_the_middle_of_a_hybrid_s_prompt_starts_at_a_snapshot(hybrid: MlxEngine) -> None:
    text = prompt(1000, 9)
    with hybrid.session() as session:
        session.extend(text)
        session.step()
        changed = [*text[:900], *prompt(40, 10)]
        assert session.extend(changed).reused >= 900 - SNAPSHOT_EVERY
        found = answer(session, 5)
    assert found == cold(hybrid, changed, 5)


def test_forks_of_a_hybrid_read_nothing_again(hybrid: MlxEngine) -> None:
    text = prompt(200, 11)
    with hybrid.session() as session:
        session.extend(text)
        first = session.step().tokens[0]
        with session.fork() as other:
            assert other.extend([*text, first, 7]).computed <= 2
            found = answer(other, 4)
    assert found == cold(hybrid, [*text, first, 7], 4)


def test_snapshots_that_were_dropped_are_read_again(hybrid: MlxEngine) -> None:
    hybrid.snapshots = SnapshotStore(0)  # nothing fits
    text = prompt(300, 12)
    with hybrid.session() as session:
        session.extend(text)
        session.step()
        changed = [*text[:250], 3, 4]
        assert session.extend(changed).reused == 0
        assert answer(session, 5) == cold(hybrid, changed, 5)
