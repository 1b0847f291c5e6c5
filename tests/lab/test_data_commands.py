"""`keystroke train corpus` and `keystroke train edits` as a user runs them, against an index on loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import httpx
import pytest
from package_index import Server, module, served

from keystroke_lab.corpus.shards import read_shard, shard_paths
from keystroke_lab.corpus.trajectories import read_edits

PROGRAM = str(Path(sys.executable).with_name("keystroke"))


class Patient(Server):
    """An index that can be told to make one project's readers wait."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = ""
        self.reached, self.go_on = Event(), Event()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.slow and request.url.path == f"/pypi/{self.slow}/json":
            self.reached.set()
            self.go_on.wait(60)
        return super().__call__(request)


@dataclass
class Desk:
    """A folder to work in and an index to ask."""

    folder: Path
    index: Patient
    environment: dict[str, str]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [PROGRAM, "train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )

    def run(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=200)
        assert process.returncode == code, err
        assert "Traceback" not in err
        return out, err


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    index = Patient()
    for name in ("one", "two", "three"):
        old = {f"{name}/{x}.py": module(f"{name}_{x}", 60) for x in "ab"}
        new = {p: t.replace("_7 =", "_seven =").replace("_30 =", "_thirty =") for p, t in old.items()}
        index.add(name, {"1.0": old, "1.1": new})
    (tmp_path / "names").write_text("one\ntwo\nthree\n")
    with served(index) as address:
        yield Desk(tmp_path, index, {**os.environ, "PIP_INDEX_URL": address, "TERM": "dumb"})


def corpus(desk: Desk, *options: str) -> dict[str, dict[str, int]]:
    out, _ = desk.run("corpus", "work", "--names", "names", "--late", "0", "--json", *options)
    result: dict[str, dict[str, int]] = json.loads(out)
    return result


def test_names_become_a_corpus_and_edits_in_pieces(desk: Desk) -> None:
    made = corpus(desk)
    assert made["projects"] == {"kept": 3}
    assert made["files"] == {"train kept": 6}
    pieces = list(shard_paths(desk.folder / "work" / "corpus" / "train"))
    assert {s.project for piece in pieces for s in read_shard(piece)} == {"one", "two", "three"}

    out, _ = desk.run("edits", "work", "--releases", "2", "--json")
    summary = json.loads(out)
    assert summary["train projects"] == {"collected": 3}
    assert (summary["train"]["files"], summary["train"]["hunks"]) == (6, 12)
    rows = read_edits(desk.folder / "work" / "edits" / "train" / "0000.jsonl.bz2")
    assert {row.project for row in rows} == {"one", "two", "three"}


def test_a_harvest_stopped_by_ctrl_c_goes_on_where_it_was(desk: Desk) -> None:
    desk.index.slow = "three"
    command = ("corpus", "work", "--names", "names", "--late", "0", "--workers", "1")
    process = desk.start(*command)
    assert desk.index.reached.wait(100)
    process.send_signal(signal.SIGINT)
    desk.index.go_on.set()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "stopped; the same command goes on from here"
    assert (desk.folder / "work" / "projects" / "one.jsonl.gz").exists()
    assert not (desk.folder / "work" / "corpus").exists()
    desk.index.asked.clear()
    assert corpus(desk)["projects"] == {"kept": 3}
    assert not [path for path in desk.index.asked if "one" in path or "two" in path]


def test_a_grown_corpus_leaves_its_pieces_alone(desk: Desk) -> None:
    (desk.folder / "names").write_text("one\n")
    corpus(desk)
    piece = desk.folder / "work" / "corpus" / "train" / "python-0000.jsonl.bz2"
    before = piece.read_bytes()
    (desk.folder / "names").write_text("one\ntwo\n")
    corpus(desk, "--grow")
    assert piece.read_bytes() == before
    assert {s.project for s in read_shard(piece.with_name("python-0001.jsonl.bz2"))} == {"two"}


def test_what_kept_projects_require_can_be_harvested_too(desk: Desk) -> None:
    files = {f"dep/{x}.py": module(f"dep_{x}") for x in "abc"}
    desk.index.add("dep", {"1": files, "2": files, "3": files})
    (desk.folder / "names").write_text("one\n")
    assert corpus(desk, "--requirements")["requirements"] == {"kept": 1}
    pieces = shard_paths(desk.folder / "work" / "corpus" / "train")
    assert {s.project for piece in pieces for s in read_shard(piece)} == {"one", "dep"}


def test_bad_input_is_one_sentence(desk: Desk) -> None:
    (desk.folder / "empty").write_text("\n")
    for arguments, sentence in (
        (("corpus", "work", "--names", "missing"), "missing cannot be read as a list of names"),
        (("corpus", "work", "--names", "empty"), "empty holds no names; write one project name a line"),
        (("edits", "work"), "work holds no harvested projects; harvest some with"),
    ):
        out, err = desk.run(*arguments, code=2)
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("keystroke: ")
        assert sentence in line
