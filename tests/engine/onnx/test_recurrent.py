"""A hybrid model goes back to a snapshot instead of reading everything again, and to the same bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keystroke.engine.disk_prefixes import DiskPrefixes
from keystroke.engine.onnx.engine import OnnxEngine
from keystroke.engine.snapshots import SNAPSHOT_EVERY, SnapshotStore

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
from family_models import engine_on, reference

END, HEADER = 2, [5, 6, 7]
DICE = np.random.default_rng(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hybrid")
    reference("qwen3_5", max_position_embeddings=8192).save_pretrained(place / "model")
    return place


@pytest.fixture
def engine(folder: Path) -> OnnxEngine:
    return engine_on(folder / "model", "int8", folder / "cache")


def message(length: int) -> list[int]:
    return [*(int(t) for t in DICE.integers(8, 96, length)), END]


def answer(session: Any, length: int) -> list[int]:
    return [token for _ in range(length) for token in session.step().tokens]


@pytest.mark.parametrize("kept", [0, 6], ids=["answers as they were", "answers without their reasoning"])
def test_a_conversation_of_20_turns_reads_no_more_than_the_newest_turn(engine: OnnxEngine, kept: int) -> None:
    history = message(300)
    for turn in range(20):
        asked = message(int(DICE.integers(20, 150)))
        prompt = [*history, *asked, *HEADER]
        with engine.session() as session:
            read = session.extend(prompt).computed
            said = answer(session, 12)
        newest = len(asked) + len(HEADER) + (13 + len(HEADER) + 12 if turn else len(history))
        assert read <= newest, f"turn {turn} read {read} tokens, and {newest} were new"
        history = [*prompt, *said[kept:], END]


def test_an_edit_in_the_middle_reads_at_most_an_interval_more(engine: OnnxEngine) -> None:
    text = [int(t) for t in DICE.integers(8, 96, 3000)]
    with engine.session() as session:
        session.extend(text)
        session.step()
        for place in (2900, 2100, 1111, 700):
            edited = [*text[:place], 90, 91, *text[place:]]
            read = session.extend(edited).computed
            assert read <= len(edited) - place + SNAPSHOT_EVERY
            after = answer(session, 4)
            with engine.session("alone") as alone:
                alone.extend(edited)
                assert answer(alone, 4) == after
            text = edited


def test_fork_and_steer_read_nothing_again(engine: OnnxEngine) -> None:
    with engine.session() as session:
        session.extend(message(700))
        answer(session, 10)
        said = list(session.tokens)
        fork = session.fork()
        assert fork.extend([*said, *message(3)]).computed <= 5
        answer(fork, 5)
        fork.close()
        assert session.extend([*said, *message(9)]).computed <= 11  # steered in the middle of an answer
        session.rollback(len(said) - 6)
        assert session.extend([*said[:-6], *message(4)]).computed <= 12


def test_rows_that_are_taken_back_leave_the_bits_of_the_state(engine: OnnxEngine) -> None:
    with engine.session() as session:
        session.extend(message(100))
        for turn in range(60):
            session.step([int(t) for t in DICE.integers(8, 96, int(DICE.integers(0, 5)))])
            if turn % 3 == 0:
                session.rollback(session.length - int(DICE.integers(0, 5)))
        session.step()
        with engine.session("alone") as alone:
            alone.extend(list(session.tokens)[:-1])
            alone.step()
            assert session.buffers is not None
            assert alone.buffers is not None
            mine, other = session.buffers.recurrent, alone.buffers.recurrent
            assert mine is not None
            assert other is not None
            assert mine.position == other.position == session.length - 1
            for one, two in zip(mine.state, other.state, strict=True):
                assert np.array_equal(one, two)


def test_a_failed_run_leaves_no_wrong_state(engine: OnnxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    text = message(600)
    with engine.session("plain") as plain:
        plain.extend(text)
        expected = answer(plain, 6)
    with engine.session() as session:
        session.extend(text)
        first = answer(session, 2)
        run = OnnxEngine.run

        def broken(*arguments: Any) -> Any:
            run(*arguments)
            raise RuntimeError("the power is gone")

        monkeypatch.setattr(OnnxEngine, "run", broken)
        with pytest.raises(RuntimeError):
            session.step([9, 9, 9])
        monkeypatch.setattr(OnnxEngine, "run", run)
        assert [*first, *answer(session, 4)] == expected


def test_a_prefix_on_disk_brings_its_states(folder: Path, tmp_path: Path) -> None:
    def started() -> OnnxEngine:
        kept = DiskPrefixes(tmp_path / "prefixes", "a hybrid", 1 << 30)
        return engine_on(folder / "model", "int8", folder / "cache", disk_prefixes=kept)

    text = message(1500)
    with started() as engine, engine.session() as session:
        session.extend(text)
        said = answer(session, 8)
        held = session.length
    with started() as engine, engine.session() as session:
        assert session.extend([*text, *said, *message(20)]).reused >= held - 1
        assert session.extend([*text[:900], *message(20)]).reused >= 900 - SNAPSHOT_EVERY
        found = answer(session, 5)
        with engine.session("alone") as alone:
            alone.extend(list(session.tokens)[:-5])
            assert answer(alone, 5) == found


def test_snapshots_stay_within_their_budget_oldest_first() -> None:
    store: SnapshotStore[list[np.ndarray]] = SnapshotStore(1000)
    arrays = [np.zeros(100, np.float32)]
    taken = [store.hold(arrays, 400) for _ in range(4)]
    assert [snapshot is not None and snapshot.arrays is not None for snapshot in taken] == [
        *(False, False, True, True)
    ]
    assert store.nbytes == 800
    del taken[3]
    assert store.nbytes == 400
    assert store.hold([np.zeros(1000, np.float32)], 4000) is None
