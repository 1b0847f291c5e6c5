"""What stands in an evaluation case is not trained on, wherever it comes from."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from package_index import Server, module

from keystroke.errors import InputError
from keystroke.text.cases import CompletionCase, read_cases, write_cases
from keystroke_lab.corpus.build import build, grow
from keystroke_lab.corpus.edit_shards import pack
from keystroke_lab.corpus.harvest import harvest
from keystroke_lab.corpus.hunks import EditHunk
from keystroke_lab.corpus.overlap import RUN, EvaluationLines
from keystroke_lab.corpus.package_index import PackageIndex
from keystroke_lab.corpus.shards import read_shard, shard_paths
from keystroke_lab.corpus.trajectories import FileEdit, read_edits, write_edits
from keystroke_lab.evaluation.edit_cases import read_edit_cases

DATA = Path(__file__).parents[2] / "bench" / "data"
ASKED = [f"    asked_{i} = ask(value, {i})" for i in range(20)]


def case(text: str) -> CompletionCase:
    half = len(text) // 2
    return CompletionCase(
        "line", "young", "1.0", "MIT", "a.py", text[:half], text[half : half + 9], text[half + 9 :]
    )


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    write_cases(tmp_path / "cases.xz", [case("\n".join(ASKED)), case(module("other"))])
    return tmp_path / "cases.xz"


def test_a_run_of_lines_is_found_whatever_surrounds_it(cases: Path) -> None:
    evaluated = EvaluationLines.from_files([cases])
    run = [line.strip() for line in ASKED[3 : 3 + RUN]]
    assert evaluated.occurs_in("\n".join(["import os", "", *run[:2], "", ")", *run[2:], "done()"]))
    assert not evaluated.occurs_in("\n".join(["import os", *run[:-1], "done()"]))
    assert not evaluated.occurs_in("\n".join([*run[:3], "between()", *run[3:]]))
    assert not EvaluationLines(()).occurs_in("\n".join(run))


def test_the_benchmarks_own_cases_are_found() -> None:
    completions, edits = DATA / "completion.jsonl.xz", DATA / "edits.jsonl.xz"
    evaluated = EvaluationLines.from_files([completions, edits])
    asked = read_cases(completions)
    found = sum(evaluated.occurs_in(c.prefix + c.middle + c.suffix) for c in asked)
    assert found > 0.9 * len(asked)  # the rest is shorter than a run
    assert all(evaluated.occurs_in("\n".join(c.lines)) for c in read_edit_cases(edits))
    assert not evaluated.occurs_in(module("alpha"))


def test_a_file_that_holds_no_cases_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.xz").write_bytes(b"no cases")
    with pytest.raises(InputError, match=r"bad\.xz"):
        EvaluationLines.from_files([tmp_path / "bad.xz"])


def test_a_corpus_is_built_and_grown_without_what_is_evaluated(tmp_path: Path, cases: Path) -> None:
    server = Server()
    copied = module("gamma") + "\n".join(ASKED) + "\n"
    server.add("one", {"1.0": {"one/a.py": module("alpha"), "one/b.py": copied}})
    server.add("young", {"0.1": {"young/y.py": module("epsilon") + "\n".join(ASKED) + "\n"}}, year=2026)
    index = PackageIndex("https://index.test", transport=httpx.MockTransport(server))
    harvest(index, ["one", "young"], tmp_path / "projects")
    summary = build([tmp_path / "projects"], tmp_path / "corpus", without=[cases])
    assert summary["files"] == {"late kept": 1, "train evaluated": 1, "train kept": 1}
    server.add("two", {"1.0": {"two/c.py": module("delta"), "two/d.py": copied.replace("gamma", "zeta")}})
    harvest(index, ["two"], tmp_path / "projects")
    grown = grow([tmp_path / "projects"], tmp_path / "corpus", without=[cases])
    assert grown["files"] == {"late kept": 1, "train evaluated": 2, "train kept": 2}
    pieces = shard_paths(tmp_path / "corpus" / "train")
    assert [s.path for piece in pieces for s in read_shard(piece)] == ["one/a.py", "two/c.py"]


def test_edits_are_packed_without_what_is_evaluated(tmp_path: Path, cases: Path) -> None:
    plain, asked = module("alpha").split("\n"), ["import os", *ASKED, ""]
    for part in ("train", "heldout"):
        (tmp_path / part).mkdir()
    hunks = {
        "plain.py": (
            plain,
            [EditHunk(0, ["import math"], ["import os"]), EditHunk(9, [plain[9]], ["    pass"])],
        ),
        "before.py": (
            asked,
            [EditHunk(0, ["import os"], ["import re"]), EditHunk(9, [asked[9]], ["    pass"])],
        ),
        "after.py": (plain, [EditHunk(0, ["import math"], []), EditHunk(9, [], ASKED)]),
    }
    edits = [
        FileEdit("one", "MIT", "1.0", "1.1", path, "\n".join(lines), changes)
        for path, (lines, changes) in hunks.items()
    ]
    write_edits(tmp_path / "train" / "one.jsonl.gz", edits)
    summary = pack(tmp_path / "train", tmp_path / "heldout", tmp_path / "out", without=[cases])
    assert summary["left_out"]["evaluated"] == 2
    (left,) = read_edits(tmp_path / "out" / "train" / "0000.jsonl.bz2")
    assert left.path == "plain.py"
