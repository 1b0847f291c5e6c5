"""Harvest, comparison and build over a small index served in-process: resumable, split by project,
accounted for."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from package_index import Server, module, sdist

from keystroke.errors import InputError, Unavailable
from keystroke_lab.corpus.archives import python_files
from keystroke_lab.corpus.build import build, grow, read_manifest
from keystroke_lab.corpus.dedup import signature, similarity, unique
from keystroke_lab.corpus.harvest import HarvestLimits, harvest, read_project
from keystroke_lab.corpus.package_index import PackageIndex
from keystroke_lab.corpus.shards import read_shard, shard_paths
from keystroke_lab.corpus.split import LATE


@pytest.fixture
def server() -> Server:
    server = Server()
    server.add("one", {"1.0": {"one/a.py": module("alpha"), "one/b.py": module("beta")}})
    server.add("copy", {"2.0": {"copy/a.py": module("alpha"), "copy/c.py": module("gamma")}}, year=2020)
    server.add("closed", {"1.0": {"closed/a.py": module("delta")}}, licence="GPL-3.0-only")
    server.add("young", {"0.1": {"young/y.py": module("epsilon"), "young/a.py": module("beta")}}, year=2026)
    return server


@pytest.fixture
def index(server: Server) -> PackageIndex:
    return PackageIndex("https://index.test", transport=httpx.MockTransport(server))


NAMES = ["one", "copy", "closed", "young", "nothing"]


def test_each_project_ends_in_a_named_outcome(index: PackageIndex, tmp_path: Path) -> None:
    outcomes = harvest(index, NAMES, tmp_path, workers=2)
    assert outcomes == {"kept": 3, "licence": 1, "absent": 1}
    record, files = read_project(tmp_path / "one.jsonl.gz")
    assert (record.licence, record.version, record.requires) == ("MIT", "1.0", ["dep"])
    assert [f.path for f in files] == ["one/a.py", "one/b.py"]


def test_worker_processes_give_the_same_harvest(index: PackageIndex, tmp_path: Path) -> None:
    alone = harvest(index, NAMES, tmp_path / "alone")
    assert harvest(index, NAMES, tmp_path / "helped", processes=1) == alone
    for path in (tmp_path / "alone").iterdir():
        assert read_project(tmp_path / "helped" / path.name) == read_project(path)


def test_a_worker_ends_with_its_owner_even_when_that_is_killed() -> None:
    program = (
        "import os, time\nfrom keystroke_lab.corpus.processes import Processes\n"
        "if __name__ == '__main__':\n"
        "    with Processes(1) as crew:\n"
        "        print(crew.do(os.getpid), flush=True)\n        time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        worker = int(owner.stdout.readline())
        assert is_running(worker)
        owner.kill()
    for _ in range(400):
        if not is_running(worker):
            return
        time.sleep(0.05)
    pytest.fail("the worker outlived its owner")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")  # an ended process stays listed until whoever adopted it looks
    return not (state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_second_harvest_asks_for_nothing(server: Server, index: PackageIndex, tmp_path: Path) -> None:
    first = harvest(index, NAMES, tmp_path)
    server.asked.clear()
    assert harvest(index, NAMES, tmp_path) == first
    assert server.asked == []


def test_only_a_project_cut_by_a_smaller_cap_is_harvested_again(
    server: Server, index: PackageIndex, tmp_path: Path
) -> None:
    files = {f"big/m{i}.py": module(f"m{i}") for i in range(8)}
    size = len(module("m0"))
    server.add("big", {"1.0": files})
    small = HarvestLimits(characters=3 * size + 10)
    harvest(index, ["big", "one"], tmp_path, limits=small)
    record, some = read_project(tmp_path / "big.jsonl.gz")
    assert (len(some), record.refused) == (3, {"over_cap": 5})
    server.asked.clear()
    harvest(index, ["big", "one"], tmp_path, limits=small)
    assert server.asked == []
    harvest(index, ["big", "one"], tmp_path, limits=HarvestLimits(characters=100 * size))
    assert {path for path in server.asked if path.startswith("/pypi")} == {"/pypi/big/json"}
    record, every = read_project(tmp_path / "big.jsonl.gz")
    assert (len(every), record.refused) == (8, {})
    assert set(some) <= set(every)


def test_a_file_with_another_hash_is_left_out(server: Server, index: PackageIndex, tmp_path: Path) -> None:
    server.files["/files/one-1.0.tar.gz"] += b"tampered"
    assert harvest(index, ["one"], tmp_path) == {"failed: InputError": 1}
    assert not list(tmp_path.glob("*.gz"))


def test_an_index_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    down = PackageIndex("https://index.test", transport=httpx.MockTransport(lambda _: httpx.Response(503)))
    with pytest.raises(Unavailable, match="go on where it stopped"):
        down.project("one")


def test_names_come_from_the_index(index: PackageIndex) -> None:
    assert index.names() == ["one", "two"]


def test_late_limits_keep_only_young_projects(index: PackageIndex, tmp_path: Path) -> None:
    outcomes = harvest(index, ["one", "young"], tmp_path, limits=HarvestLimits(LATE, try_variants=False))
    assert outcomes == {"too_old": 1, "kept": 1}


def test_projects_too_young_to_train_on_need_not_be_fetched(
    server: Server, index: PackageIndex, tmp_path: Path
) -> None:
    limits = HarvestLimits(first_released_before=LATE)
    assert harvest(index, ["one", "young"], tmp_path, limits=limits) == {"too_young": 1, "kept": 1}
    assert not any("young-" in path for path in server.asked)


def test_a_damaged_archive_gives_what_came_before_the_damage() -> None:
    data = sdist("x", "1", {f"m{i}.py": module(f"m{i}", 400) for i in range(20)})
    found = list(python_files(data[: len(data) // 2], "x-1.tar.gz", sdist=True))
    assert 0 < len(found) < 20
    assert list(python_files(b"no archive", "x-1.tar.gz", sdist=True)) == []


def test_a_damaged_harvest_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl.gz"
    path.write_bytes(gzip.compress(b"not json\n"))
    with pytest.raises(InputError, match="harvest again"):
        read_project(path)


def test_near_copies_are_found_and_different_files_are_not() -> None:
    text = module("alpha", 80)
    near = text.replace("alpha_7 =", "renamed =")
    assert similarity(signature(text), signature(near)) > 0.85
    assert similarity(signature(text), signature(module("beta", 80))) < 0.3
    assert unique([text, near, module("beta", 80), text]) == [0, 2]


def test_the_corpus_is_split_by_project_and_without_copies(index: PackageIndex, tmp_path: Path) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    build([tmp_path / "projects"], tmp_path / "corpus")
    found = {
        part: {(s.project, s.path) for p in shard_paths(tmp_path / "corpus" / part) for s in read_shard(p)}
        for part in ("train", "heldout", "late")
    }
    assert found["train"] | found["heldout"] == {
        ("one", "one/a.py"),
        ("one", "one/b.py"),
        ("copy", "copy/c.py"),
    }
    assert found["late"] == {("young", "young/y.py")}  # its copy of beta went with the older project
    with gzip.open(tmp_path / "corpus" / "files.jsonl.gz", "rt") as stream:
        rows = [json.loads(line) for line in stream]
    assert len(rows) == 6
    assert {row[3] for row in rows} == {"MIT"}


def test_the_same_harvest_gives_the_same_corpus(index: PackageIndex, tmp_path: Path) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    first = build([tmp_path / "projects"], tmp_path / "a")
    assert build([tmp_path / "projects"], tmp_path / "b") == first == read_manifest(tmp_path / "b")


def test_a_damaged_piece_is_named(index: PackageIndex, tmp_path: Path) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    build([tmp_path / "projects"], tmp_path / "corpus")
    piece = next(shard_paths(tmp_path / "corpus" / "train"))
    piece.write_bytes(piece.read_bytes()[:-20])
    with pytest.raises(InputError, match="build the corpus again"):
        read_shard(piece)


def test_a_grown_corpus_keeps_its_pieces_and_adds_only_what_is_new(
    server: Server, index: PackageIndex, tmp_path: Path
) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    first = build([tmp_path / "projects"], tmp_path / "corpus")
    old = {p: p.read_bytes() for p in (tmp_path / "corpus").rglob("*.bz2")}
    # One file is like one of the training part, one like one of the late part, one the same, and one new.
    near = {f"x/{name}.py": module(name).replace("import math", "import os") for name in ("alpha", "epsilon")}
    files = near | {"x/b.py": module("beta"), "x/z.py": module("zeta")}
    server.add("later", {"1.0": files}, licence="BSD-3-Clause", year=2012)
    harvest(index, ["later", "one"], tmp_path / "more")
    grown = grow([tmp_path / "more"], tmp_path / "corpus")
    assert {p: p.read_bytes() for p in old} == old
    assert grown["pieces"][: len(first["pieces"])] == first["pieces"]
    (new,) = grown["pieces"][len(first["pieces"]) :]
    assert [s.path for s in read_shard(tmp_path / "corpus" / new["piece"])] == ["x/z.py"]
    assert grown["files"]["train near-copy"] == first["files"]["train near-copy"] + 2
    assert grown["licences"] == {"MIT": 3, "BSD-3-Clause": 1}
    assert sum(grown["projects"].values()) == 4


def test_growing_without_stored_signatures_gives_the_same(
    server: Server, index: PackageIndex, tmp_path: Path
) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    server.add("later", {"1.0": {"x/a.py": module("alpha"), "x/z.py": module("zeta")}})
    harvest(index, ["later"], tmp_path / "more")
    build([tmp_path / "projects"], tmp_path / "a")
    build([tmp_path / "projects"], tmp_path / "b")
    (tmp_path / "b" / "signatures.npy").unlink()
    assert grow([tmp_path / "more"], tmp_path / "a") == grow([tmp_path / "more"], tmp_path / "b")


def test_a_growth_cut_short_leaves_the_corpus_as_it_was_and_can_be_done_again(
    server: Server, index: PackageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    server.add("later", {"1.0": {"x/a.py": module("alpha"), "x/z.py": module("zeta")}})
    harvest(index, ["later"], tmp_path / "more")
    for name in ("cut", "whole"):
        build([tmp_path / "projects"], tmp_path / name)
    before = read_manifest(tmp_path / "cut")
    replace, done = os.replace, list[str]()

    def stop_before_the_manifest(source: Path, target: Path) -> None:
        if target.name == "manifest.json":
            raise KeyboardInterrupt
        done.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_before_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        grow([tmp_path / "more"], tmp_path / "cut")
    assert {"signatures.npy", "files.jsonl.gz"} <= set(done)
    assert read_manifest(tmp_path / "cut") == before
    monkeypatch.undo()
    assert grow([tmp_path / "more"], tmp_path / "cut") == grow([tmp_path / "more"], tmp_path / "whole")
    listings = [gzip.decompress((tmp_path / n / "files.jsonl.gz").read_bytes()) for n in ("cut", "whole")]
    assert listings[0] == listings[1]


def test_building_again_leaves_no_piece_of_the_corpus_before(index: PackageIndex, tmp_path: Path) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    summary = build([tmp_path / "projects"], tmp_path / "corpus")
    stray = tmp_path / "corpus" / "train" / "0007.jsonl.bz2"
    stray.write_bytes(b"old")
    assert build([tmp_path / "projects"], tmp_path / "corpus") == summary
    assert not stray.exists()


def test_a_listing_that_lost_lines_is_named(index: PackageIndex, tmp_path: Path) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    build([tmp_path / "projects"], tmp_path / "corpus")
    (tmp_path / "corpus" / "files.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(InputError, match="has lost lines; build the corpus again"):
        grow([tmp_path / "projects"], tmp_path / "corpus")


def test_growing_twice_adds_nothing(server: Server, index: PackageIndex, tmp_path: Path) -> None:
    harvest(index, NAMES, tmp_path / "projects")
    build([tmp_path / "projects"], tmp_path / "corpus")
    server.add("later", {"1.0": {"x/z.py": module("zeta")}})
    harvest(index, ["later"], tmp_path / "more")
    once = grow([tmp_path / "more"], tmp_path / "corpus")
    assert grow([tmp_path / "more"], tmp_path / "corpus") == once


def test_a_corpus_that_is_not_there_cannot_grow(index: PackageIndex, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="build one with"):
        grow([tmp_path], tmp_path / "corpus")
