"""Edits between releases: what becomes a hunk, what does not, and how it is collected and packed."""

from __future__ import annotations

import bz2
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from package_index import Server, module

from keystroke.errors import InputError, NotFound
from keystroke_lab.corpus import edit_shards as edit_pieces
from keystroke_lab.corpus.collecting import without_sweeps
from keystroke_lab.corpus.dedup import Deduplicator
from keystroke_lab.corpus.edit_shards import pack
from keystroke_lab.corpus.edits import choose_projects, collect
from keystroke_lab.corpus.harvest import harvest
from keystroke_lab.corpus.hunks import (
    LONGEST_HUNK,
    EditHunk,
    NoEdit,
    Trajectory,
    is_worthwhile,
    trajectory,
)
from keystroke_lab.corpus.package_index import PackageIndex
from keystroke_lab.corpus.split import CorpusPart
from keystroke_lab.corpus.trajectories import FileEdit, read_edits, write_edits

OLD = module("alpha", 60)


def line(number: int) -> str:
    return f"    alpha_{number} = compute_alpha(value, {number}) + offset\n"


def changed(text: str, *numbers: int) -> str:
    for number in numbers:
        text = text.replace(line(number), f"    alpha_{number} = faster(value, depth={number})\n")
    return text


def found(old: str, new: str) -> Trajectory:
    result = trajectory(old, new)
    assert isinstance(result, Trajectory)
    return result


def test_hunks_come_in_order_and_lead_to_the_new_version() -> None:
    new = changed(OLD, 3, 20, 40).replace("import math\n", "import math\nimport os\n")
    result = found(OLD, new)
    assert result.before == OLD
    assert result.after() == new
    assert [h.start_line for h in result.hunks] == [1, 7, 24, 44]
    assert result.hunks[0] == EditHunk(1, [], ["import os"])
    assert result.hunks[1].old == [line(3).rstrip("\n")]


LINES = st.lists(
    st.sampled_from(["a = 1", "b = a", "", "    call(a)", "if b:", "x = '1'", "v = 2"]), max_size=40
)


@given(LINES, LINES)
def test_applying_the_hunks_always_gives_the_new_version(old: list[str], new: list[str]) -> None:
    result = trajectory("\n".join(old), "\n".join(new))
    if isinstance(result, Trajectory):
        assert result.after() == "\n".join(new)
        lines = result.before.split("\n")
        end = -1
        for hunk in result.hunks:
            assert hunk.start_line > end  # neither overlapping nor touching
            assert lines[hunk.start_line : hunk.start_line + len(hunk.old)] == hunk.old
            assert max(len(hunk.old), len(hunk.new)) <= LONGEST_HUNK
            end = hunk.start_line + len(hunk.old)


def test_changes_a_line_or_two_apart_are_one_hunk_and_farther_ones_are_not() -> None:
    assert [len(h.old) for h in found(OLD, changed(OLD, 10, 13)).hunks] == [4]
    assert [len(h.old) for h in found(OLD, changed(OLD, 10, 14)).hunks] == [1, 1]


def test_what_teaches_nothing_is_applied_before_the_first_hunk() -> None:
    old = '__version__ = "1.0.0"\n' + OLD
    block = "".join(f"    added_{i} = {i}\n" for i in range(LONGEST_HUNK + 1))
    new = changed(old, 30).replace("1.0.0", "1.0.1").replace(line(50), line(50) + block)
    result = found(old, new)
    assert result.after() == new
    assert '__version__ = "1.0.1"' in result.before
    assert block in result.before
    assert [h.old for h in result.hunks] == [[line(30).rstrip("\n")]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["x = f( a,b )"], ["x = f(a, b)"]),
        (["x = 'one'"], ['x = "one"']),
        (["x = u'one'"], ["x = 'one'"]),
        (["call(first, second)"], ["call(", "    first,", "    second,", ")"]),
        (["x = a + \\", "    b"], ["x = (a +", "     b)"]),
        (["", ""], [""]),
        (["import os", "import abc"], ["import abc", "import os"]),
        (["from a import (b,", "    c)"], ["from a import c, b"]),
        (['version = "1.9.3"'], ['version = "2.0.0rc1"']),
        (["# Copyright 2019 Someone"], ["# Copyright 2019-2024 Someone"]),
        (["# Licensed under the MIT licence"], []),
        (["    date = '2020-01-02'"], ["    date = '2021-03-04'"]),
        ([], [f"    0x{i:02x}, 0x{i + 1:02x}," for i in range(9)]),
        (["x = 1"], ["x = '" + "a" * 300 + "'"]),
        ([], [f"line_{i} = call({i})" for i in range(LONGEST_HUNK + 1)]),
    ],
)
def test_formatting_sorting_versions_and_data_are_not_worth_a_hunk(old: list[str], new: list[str]) -> None:
    assert not is_worthwhile(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["return self.size"], ["return self.size()"]),
        (["timeout = 10"], ["timeout = 30"]),
        (["import os"], ["import os", "import sys"]),
        (["if a:"], ["if a and b:"]),
        ([], ["    raise ValueError(name)"]),
        (["    log(name)"], []),
        (["class foo:"], ["class Foo:"]),
    ],
)
def test_a_change_of_meaning_is_worth_a_hunk(old: list[str], new: list[str]) -> None:
    assert is_worthwhile(old, new)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (OLD, OLD, NoEdit.SAME),
        (OLD, module("beta", 60), NoEdit.REWRITTEN),
        (module("alpha", 400), changed(module("alpha", 400), *range(0, 400, 10)), NoEdit.REWRITTEN),
        (OLD + "a = 1\nb = 2\n", OLD + "b = 2\na = 1\n", NoEdit.REORDERED),
        (OLD, OLD.replace("(value, 3)", "( value,3 )"), NoEdit.TRIVIAL),
        ("x = 1\n" * 10_000, "x = 1\n" * 10_000 + "y = 2\n", NoEdit.TOO_LARGE),
    ],
)
def test_a_file_without_a_trajectory_has_a_reason(old: str, new: str, reason: NoEdit) -> None:
    assert trajectory(old, new) is reason


def edit(path: str, hunks: list[EditHunk], project: str = "p", before: str = OLD) -> FileEdit:
    return FileEdit(project, "MIT", "1.0", "1.1", path, before, hunks)


def test_a_sweep_over_a_project_is_shown_in_a_few_files_only() -> None:
    sweep = EditHunk(3, ["super(A, self)"], ["super()"])
    own = EditHunk(9, ["a"], ["b"])
    edits = [edit(f"{i}.py", [sweep]) for i in range(5)] + [edit("own.py", [sweep, own])]
    assert [e.path for e in without_sweeps(edits)] == ["0.py", "1.py", "2.py", "own.py"]


@pytest.fixture
def server() -> Server:
    server = Server()
    for name, year in (("tool", 2015), ("young", 2026)):
        old = {f"{name}/a.py": module(f"{name}_a", 60), f"{name}/b.py": module(f"{name}_b", 60)}
        new = {
            path: text.replace("_7 =", "_seven =").replace("_30 =", "_thirty =") for path, text in old.items()
        }
        versions = {"1.0": old | {f"{name}/version.py": module("v")}, "1.1": new, "1.2": new}
        server.add(name, versions, year=year)
    server.add("still", {"1.0": {"still/a.py": module("still")}})
    return server


@pytest.fixture
def index(server: Server) -> PackageIndex:
    return PackageIndex("https://index.test", transport=httpx.MockTransport(server))


@pytest.fixture
def projects(index: PackageIndex, tmp_path: Path) -> Path:
    harvest(index, ["tool", "young", "still"], tmp_path / "projects")
    return tmp_path / "projects"


def test_projects_are_chosen_by_part(projects: Path) -> None:
    assert {r.name for r in choose_projects([projects], [CorpusPart.TRAIN])} == {"tool", "still"}
    assert {r.name for r in choose_projects([projects], [CorpusPart.HELD_OUT, CorpusPart.LATE])} == {"young"}


def test_edits_of_consecutive_releases_are_collected_once(
    server: Server, index: PackageIndex, projects: Path, tmp_path: Path
) -> None:
    records = choose_projects([projects], [CorpusPart.TRAIN])
    assert collect(index, records, tmp_path / "out", releases=3) == {"collected": 1, "no edits": 1}
    rows = read_edits(tmp_path / "out" / "tool.jsonl.gz")
    assert [(e.path, e.release_from, e.release_to, len(e.hunks)) for e in rows] == [
        ("tool/a.py", "1.0", "1.1", 2),
        ("tool/b.py", "1.0", "1.1", 2),
    ]
    assert "tool_a_seven =" in rows[0].after()
    collect(index, records, tmp_path / "helped", releases=3, processes=1)
    assert read_edits(tmp_path / "helped" / "tool.jsonl.gz") == rows
    server.asked.clear()
    assert collect(index, records, tmp_path / "out", releases=3) == {"there": 2}
    assert server.asked == []


def test_a_project_that_fails_is_counted_and_tried_again(
    server: Server, index: PackageIndex, projects: Path, tmp_path: Path
) -> None:
    records = [r for r in choose_projects([projects], [CorpusPart.TRAIN]) if r.name == "tool"]
    good = server.files["/files/tool-1.1.tar.gz"]
    server.files["/files/tool-1.1.tar.gz"] = b"tampered"
    assert collect(index, records, tmp_path / "out", releases=3) == {"failed: InputError": 1}
    server.files["/files/tool-1.1.tar.gz"] = good
    assert collect(index, records, tmp_path / "out", releases=3) == {"collected": 1}


def test_pieces_hold_each_change_once_and_held_out_projects_apart(
    index: PackageIndex, projects: Path, tmp_path: Path
) -> None:
    for name, parts in (("train", [CorpusPart.TRAIN]), ("heldout", [CorpusPart.HELD_OUT, CorpusPart.LATE])):
        collect(index, choose_projects([projects], parts), tmp_path / name, releases=3)
    rows = read_edits(tmp_path / "train" / "tool.jsonl.gz")
    write_edits(tmp_path / "train" / "twin.jsonl.gz", [replace(row, project="twin") for row in rows])
    write_edits(tmp_path / "heldout" / "fork.jsonl.gz", [replace(row, project="fork") for row in rows])
    summary = pack(tmp_path / "train", tmp_path / "heldout", tmp_path / "out")
    (piece,) = (tmp_path / "out" / "train").iterdir()
    assert len({e.project for e in read_edits(piece)}) == 1
    assert {e.project for e in read_edits(tmp_path / "out" / "heldout.jsonl.bz2")} == {"young"}
    assert summary["train"]["files"] == summary["train"]["several_hunks"] == 2
    assert summary["train"]["hunks"] == 4
    assert summary["left_out"]["near_copy"] == 4
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == summary
    assert pack(tmp_path / "train", tmp_path / "heldout", tmp_path / "out") == summary


def test_the_line_on_disk_is_the_documented_one(tmp_path: Path) -> None:
    path = tmp_path / "0000.jsonl.bz2"
    write_edits(path, [edit("a.py", [EditHunk(3, ["x"], ["y", "z"])], before="text\n")])
    assert json.loads(bz2.decompress(path.read_bytes())) == {
        "project": "p",
        "licence": "MIT",
        "release_from": "1.0",
        "release_to": "1.1",
        "path": "a.py",
        "before": "text\n",
        "hunks": [{"start_line": 3, "old": ["x"], "new": ["y", "z"]}],
    }


def test_a_large_project_keeps_files_with_several_hunks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_pieces, "PROJECT_LIMIT", 2 * len(OLD))
    one = [edit(f"one{i}.py", [EditHunk(i, [f"a{i}"], [f"b{i}"])]) for i in range(3)]
    two = edit("two.py", [EditHunk(1, ["c"], ["d"]), EditHunk(9, ["e"], ["f"])])
    kept = edit_pieces.select_edits([*one, two], Deduplicator(), Counter())
    assert [e.path for e in kept] == ["one0.py", "two.py"]


def test_a_release_with_a_single_hunk_is_no_trajectory() -> None:
    alone = [edit("a.py", [EditHunk(1, ["a"], ["b"])])]
    assert edit_pieces.select_edits(alone, Deduplicator(), Counter()) == []


def test_a_project_on_both_sides_is_refused(tmp_path: Path) -> None:
    for part in ("train", "heldout"):
        (tmp_path / part).mkdir()
        write_edits(tmp_path / part / "tool.jsonl.gz", [])
    with pytest.raises(InputError, match="tool is among the projects to train on and those held out"):
        pack(tmp_path / "train", tmp_path / "heldout", tmp_path / "out")


def test_an_empty_collection_and_a_damaged_file_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="collect some first"):
        pack(tmp_path / "train", tmp_path / "heldout", tmp_path / "out")
    damaged = tmp_path / "x.jsonl.gz"
    damaged.write_bytes(b"nothing")
    with pytest.raises(InputError, match="collect them again"):
        read_edits(damaged)
