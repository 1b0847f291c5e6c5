"""Harvest, comparison and build over a small index served in-process: resumable, split by project,
accounted for."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import time
from pathlib import Path

import httpx
import pytest

from keystroke.errors import InputError, Unavailable
from keystroke.train.corpus.archives import python_files
from keystroke.train.corpus.build import build, read_manifest
from keystroke.train.corpus.dedup import signature, similarity, unique
from keystroke.train.corpus.edits import collect, file_hunks, read_edits
from keystroke.train.corpus.harvest import Limits, harvest, read_project
from keystroke.train.corpus.index import PackageIndex
from keystroke.train.corpus.split import LATE
from keystroke.train.pieces import piece_paths, read_piece


def module(name: str, lines: int = 30) -> str:
    body = "".join(f"    {name}_{i} = compute_{name}(value, {i}) + offset\n" for i in range(lines))
    return f"import math\n\n\ndef {name}(value, offset):\n{body}    return {name}_0\n"


def sdist(name: str, version: str, files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    return buffer.getvalue()


class Server:
    """A package index with a few projects."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.files: dict[str, bytes] = {}
        self.projects: dict[str, dict[str, object]] = {}

    def add(
        self, name: str, versions: dict[str, dict[str, str]], *, licence: str = "MIT", year: int = 2015
    ) -> None:
        releases: dict[str, list[dict[str, object]]] = {}
        for month, (version, files) in enumerate(versions.items(), start=1):
            data = sdist(name, version, files)
            filename = f"{name}-{version}.tar.gz"
            self.files[f"/files/{filename}"] = data
            digest = hashlib.sha256(data).hexdigest()
            releases[version] = [
                {
                    "packagetype": "sdist",
                    "filename": filename,
                    "url": f"../../files/{filename}",
                    "size": len(data),
                    "digests": {"sha256": digest},
                    "upload_time_iso_8601": f"{year}-{month:02d}-01T00:00:00Z",
                }
            ]
        info = {"license_expression": licence, "requires_dist": ["dep (>=1)"]}
        self.projects[name] = {"info": info, "releases": releases}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if path in self.files:
            return httpx.Response(200, content=self.files[path])
        if path == "/simple/":
            return httpx.Response(200, text='<a href="one/">one</a>\n<a href="two/">two</a>')
        name = path.removeprefix("/pypi/").removesuffix("/json")
        if name in self.projects:
            return httpx.Response(200, json=self.projects[name])
        return httpx.Response(404)


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


def test_a_second_harvest_asks_for_nothing(server: Server, index: PackageIndex, tmp_path: Path) -> None:
    first = harvest(index, NAMES, tmp_path)
    server.asked.clear()
    assert harvest(index, NAMES, tmp_path) == first
    assert server.asked == []


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
    outcomes = harvest(index, ["one", "young"], tmp_path, limits=Limits(LATE, try_variants=False))
    assert outcomes == {"too_old": 1, "kept": 1}


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
        part: {(s.project, s.path) for p in piece_paths(tmp_path / "corpus" / part) for s in read_piece(p)}
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
    piece = next(piece_paths(tmp_path / "corpus" / "train"))
    piece.write_bytes(piece.read_bytes()[:-20])
    with pytest.raises(InputError, match="build the corpus again"):
        read_piece(piece)


def test_hunks_turn_the_old_file_into_the_new(server: Server, index: PackageIndex, tmp_path: Path) -> None:
    old = module("alpha")
    new = old.replace("alpha_3 =", "third =").replace("import math\n", "import math\nimport os\n")
    server.add("edited", {"1.0": {"e/a.py": old}, "1.1": {"e/a.py": new}})
    harvest(index, ["edited"], tmp_path / "projects")
    summary = collect(index, tmp_path / "projects", tmp_path / "edits", projects=5, releases=3)
    assert summary == {"projects": 1, "files": 1, "hunks": 2}
    (edit,) = read_edits(tmp_path / "edits" / "edited.jsonl.gz")
    assert edit.new_text() == new
    assert [h.start for h in edit.hunks] == sorted(h.start for h in edit.hunks)


def test_a_rewritten_file_is_no_edit() -> None:
    assert file_hunks(module("alpha", 90), module("beta", 90)) is None
    assert file_hunks("same\n", "same\n") is None
