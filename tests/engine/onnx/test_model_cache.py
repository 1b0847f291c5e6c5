from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from keystroke.engine.onnx.cache import ConversionCache
from keystroke.errors import ModelError


class Maker:
    """Writes two files and counts how often it was asked."""

    def __init__(self, content: bytes = b"graph") -> None:
        self.content = content
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "model.onnx").write_bytes(self.content)
        (folder / "weights.bin").write_bytes(bytes(100_000))


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    make = Maker()
    first = ConversionCache(tmp_path).entry("model", "key", make, 0)
    second = ConversionCache(tmp_path).entry("model", "key", make, 0)
    assert first == second
    assert make.calls == 1
    assert (first / "model.onnx").read_bytes() == b"graph"


def test_another_key_is_another_entry(tmp_path: Path) -> None:
    make = Maker()
    assert ConversionCache(tmp_path).entry("m", "a", make, 0) != ConversionCache(tmp_path).entry(
        "m", "b", make, 0
    )
    assert make.calls == 2


def test_a_name_cannot_leave_the_folder(tmp_path: Path) -> None:
    place = ConversionCache(tmp_path / "cache").entry("../../up and away/..", "key", Maker(), 0)
    assert place.parent == tmp_path / "cache"


@pytest.mark.parametrize(
    "damage", ["cut", "grown", "changed graph", "zeroed weights", "no weights", "no manifest", "bad manifest"]
)
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    make = Maker()
    place = ConversionCache(tmp_path).entry("model", "key", make, 0)
    match damage:
        case "cut":
            os.truncate(place / "weights.bin", 99_999)
        case "grown":
            os.truncate(place / "weights.bin", 100_001)
        case "changed graph":
            (place / "model.onnx").write_bytes(b"grapf")
        case "zeroed weights":
            (place / "weights.bin").write_bytes(b"\1" * 100_000)
        case "no weights":
            (place / "weights.bin").unlink()
        case "no manifest":
            (place / "manifest.json").unlink()
        case "bad manifest":
            (place / "manifest.json").write_bytes(b"[1, 2")
    assert ConversionCache(tmp_path).entry("model", "key", make, 0) == place
    assert make.calls == 2
    assert (place / "weights.bin").read_bytes() == bytes(100_000)
    assert (place / "model.onnx").read_bytes() == b"graph"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError("bad"), ValueError])
def test_a_failure_leaves_nothing_behind(tmp_path: Path, error: BaseException | type[BaseException]) -> None:
    def fail(folder: Path) -> None:
        (folder / "model.onnx").write_bytes(b"half")
        raise error

    expected = error if isinstance(error, type) else type(error)
    with pytest.raises(expected):
        ConversionCache(tmp_path).entry("model", "key", fail, 0)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    make = Maker()
    ConversionCache(tmp_path).entry("model", "key", make, 0)
    assert make.calls == 1


def _die_half_way(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def _make_in_process(cache: Path, log: Path) -> None:
    def make(folder: Path) -> None:
        with log.open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        Maker()(folder)

    ConversionCache(cache).entry("model", "key", make, 0)


def test_a_killed_process_leaves_no_entry_and_its_remains_are_cleared(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    process = context.Process(target=ConversionCache(tmp_path).entry, args=("model", "key", _die_half_way, 0))
    process.start()
    process.join()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1  # the partial folder
    assert ConversionCache(tmp_path).entries() == []
    place = ConversionCache(tmp_path).entry("model", "key", Maker(), 0)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [place]


def test_two_processes_make_an_entry_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    arguments = (tmp_path / "cache", tmp_path / "log")
    processes = [context.Process(target=_make_in_process, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "made\n"


def test_a_full_disk_is_told_before_the_work_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    make = Maker()
    with pytest.raises(ModelError, match=r"needs 3\.1 GB .* where 10 MB are free"):
        ConversionCache(tmp_path).entry("model", "key", make, 3_000_000_000)
    assert make.calls == 0


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="choose another cache folder"):
        ConversionCache(tmp_path / "file").entry("model", "key", Maker(), 0)


def test_pruning_keeps_what_was_used_last_within_the_limit(tmp_path: Path) -> None:
    cache = ConversionCache(tmp_path)
    places = [cache.entry("model", key, Maker(), 0) for key in "abc"]
    for age, place in enumerate(places):
        os.utime(place / "manifest.json", (1000 - age, 1000 - age))
    assert [entry.path for entry in cache.entries()] == places
    freed = cache.prune(limit=250_000)
    assert [entry.path for entry in cache.entries()] == places[:2]
    assert 100_000 < freed < 110_000
    cache.prune()
    assert cache.entries() == []


def test_pruning_spares_a_model_that_another_process_is_making(tmp_path: Path) -> None:
    seen: list[int] = []

    def make(folder: Path) -> None:
        Maker()(folder)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=ConversionCache(tmp_path).prune)
        process.start()
        process.join()
        seen.append(len(list(folder.iterdir())))

    place = ConversionCache(tmp_path).entry("model", "key", make, 0)
    assert seen == [2]
    assert (place / "weights.bin").is_file()


def test_pruning_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=ConversionCache(tmp_path).entry, args=("model", "key", _die_half_way, 0)
    )
    process.start()
    process.join()
    assert ConversionCache(tmp_path).prune() == len(b"half")
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_an_absent_cache_is_an_empty_one(tmp_path: Path) -> None:
    cache = ConversionCache(tmp_path / "none")
    assert (cache.entries(), cache.prune()) == ([], 0)


def test_using_an_entry_makes_it_recent(tmp_path: Path) -> None:
    cache = ConversionCache(tmp_path)
    first, second = (cache.entry("model", key, Maker(), 0) for key in "ab")
    os.utime(first / "manifest.json", (1000, 1000))
    os.utime(second / "manifest.json", (2000, 2000))
    cache.entry("model", "a", Maker(), 0)
    assert [entry.path for entry in cache.entries()] == [first, second]
