"""Prefixes on disk give the very values that were computed, to whom they belong, or nothing at all."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keystroke.engine.disk_prefixes import DiskPrefixes
from keystroke.engine.onnx import engine as onnx_engine
from keystroke.engine.onnx.engine import OnnxEngine

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import cold, prompt
from engine_models import onnx_engine as made

TOKENS = prompt(400, seed=3)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[OnnxEngine]:
    with made(tmp_path / "model", "llama", "int8") as engine:
        yield engine


def kept(folder: Path, model: str = "m", limit: int = 64 << 20) -> DiskPrefixes:
    return DiskPrefixes(folder / "kept", model, limit)


def leave(
    engine: OnnxEngine, folder: Path, tokens: list[int] = TOKENS, scope: str = "", **how: object
) -> None:
    """As a process that computed `tokens` and ended would."""
    with engine.session(scope) as session:
        session.extend([*tokens, 1])
        session.step()
    engine.save_prefixes(kept(folder, **how))  # type: ignore[arg-type]
    engine.cache.clear()


def reused(engine: OnnxEngine, scope: str = "") -> int:
    with engine.session(scope) as session:
        return session.extend([*TOKENS, 5, 6, 7]).reused


def test_a_prefix_is_found_after_a_restart_and_goes_on_as_from_cold(
    engine: OnnxEngine, tmp_path: Path
) -> None:
    expected = cold(engine, [*TOKENS, 5, 6, 7], 12)
    leave(engine, tmp_path)
    engine.disk_prefixes = kept(tmp_path)
    with engine.session() as session:
        assert session.extend([*TOKENS, 5, 6, 7]).reused == len(TOKENS)
        said = [token for _ in range(12) for token in session.step().tokens]
    assert said[:12] == expected
    (file,) = (tmp_path / "kept").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_closing_the_engine_writes_what_is_worth_keeping(tmp_path: Path) -> None:
    with made(tmp_path / "model", "llama", "int8", disk_prefixes=kept(tmp_path)) as engine:
        for length in (20, 400):
            with engine.session() as session:
                session.extend(prompt(length, seed=length))
                session.step()
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize("where", [5, 40, 5000, -1])
def test_a_damaged_file_is_deleted_and_the_prefix_computed(
    engine: OnnxEngine, tmp_path: Path, where: int
) -> None:
    expected = cold(engine, [*TOKENS, 5, 6, 7], 4)
    leave(engine, tmp_path)
    (file,) = (tmp_path / "kept").iterdir()
    data = bytearray(file.read_bytes())
    data[where] ^= 1
    file.write_bytes(bytes(data))
    engine.disk_prefixes = kept(tmp_path)
    with engine.session() as session:
        session.extend([*TOKENS, 5, 6, 7])
        assert [t for _ in range(4) for t in session.step().tokens][:4] == expected
    assert (
        not file.exists() or where == 40
    )  # a flipped token is another prefix, found by its checksum if used


def test_another_key_another_model_and_another_setting_find_nothing(
    engine: OnnxEngine, tmp_path: Path
) -> None:
    leave(engine, tmp_path, scope="alice")
    engine.disk_prefixes = kept(tmp_path)
    assert reused(engine, "bob") == 0
    engine.cache.clear()
    engine.disk_prefixes = kept(tmp_path, model="another")
    assert reused(engine, "alice") == 0
    engine.cache.clear()
    engine.disk_prefixes = kept(tmp_path)
    assert reused(engine, "alice") == len(TOKENS)


def test_the_folder_is_bounded_and_the_oldest_goes_first(engine: OnnxEngine, tmp_path: Path) -> None:
    leave(engine, tmp_path, prompt(400, seed=1))
    (first,) = (tmp_path / "kept").iterdir()
    room = int(first.stat().st_size * 2.5)
    for seed in (2, 3, 4):
        leave(engine, tmp_path, prompt(400, seed=seed), limit=room)
    files = list((tmp_path / "kept").iterdir())
    assert len(files) == 2
    assert first not in files
    leave(engine, tmp_path, prompt(400, seed=5), limit=1000)  # alone over the limit: not kept, nothing lost
    assert sorted((tmp_path / "kept").iterdir()) == sorted(files)


def test_a_long_prefix_stays_whole_when_another_turn_begins_like_it(engine: OnnxEngine) -> None:
    whole = prompt(900, seed=9)
    for tokens in (whole, [*whole[:500], *prompt(100, seed=10)]):
        with engine.session() as session:
            session.extend(tokens)
            session.step()
    with engine.session() as session:
        assert session.extend([*whole, 1, 2]).reused >= len(whole) - 1


def test_prefixes_go_oldest_first_where_the_machine_runs_short(engine: OnnxEngine) -> None:
    free = 4 << 30
    engine._free_memory = lambda: free
    for seed in (1, 2):
        with engine.session() as session:
            session.extend(prompt(100, seed=seed))
            session.step()
    held = [entry.tokens[:5] for entry in engine.cache.newest_first()]
    free = onnx_engine.RESERVE - 1
    readings = iter([free, 4 << 30])
    engine._free_memory = lambda: next(readings)
    engine.release_memory()
    assert [entry.tokens[:5] for entry in engine.cache.newest_first()] == held[:1]
