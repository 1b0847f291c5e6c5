"""The benchmark's reader of labelled suites: what a mark speaks of, and which half a file belongs to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench import audit, audit_suites


@pytest.fixture(scope="module")
def suites() -> ModuleType:
    return audit_suites


def test_marks_speak_of_their_own_line_or_of_the_next_code(suites: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "# ruleid: x\n"
        "# a remark\n"
        "f(1)\n"
        "g(2)  # $ Alert\n"
        "h(3)  # OK\n"
        "i(4)  # NOT OK\n"
        "j(5)  # $ SPURIOUS: Alert\n"
        "# ok: x\n"
        "k(6)\n"
    )
    labels = suites.read_suite(tmp_path)
    assert {label.line: label.bad for label in labels} == {
        3: True,
        4: True,
        5: False,
        6: True,
        7: False,
        9: False,
    }


def test_tables_lists_and_folders_label_whole_files(suites: ModuleType, tmp_path: Path) -> None:
    table, listed, folders = (tmp_path / name for name in ("table", "listed", "folders"))
    for folder in (table, listed, folders / "bad", folders / "good"):
        folder.mkdir(parents=True)
        (folder / "t1.py").write_text("x = 1\n")
    (table / "expectedresults-1.csv").write_text("# test name, category, real, cwe\nt1,sqli,true,89\n")
    (listed / "labels.json").write_text(json.dumps([{"path": "t1.py", "bad": False, "cwe": [22]}]))
    (one,) = suites.read_suite(table)
    assert (one.bad, one.cwe, one.line) == (True, frozenset({89}), None)
    (one,) = suites.read_suite(listed)
    assert (one.bad, one.cwe) == (False, frozenset({22}))
    assert [label.bad for label in suites.read_suite(folders)] == [True, False]


def test_a_file_s_half_depends_on_its_name_alone(suites: ModuleType, tmp_path: Path) -> None:
    halves = []
    for root in (tmp_path / "one", tmp_path / "two"):
        root.mkdir()
        paths = [root / f"f{number}.py" for number in range(40)]
        halves.append([suites.half(suites.SuiteLabel(path, True), root) for path in paths])
    assert halves[0] == halves[1]
    assert set(halves[0]) == {"tuned", "held"}


def test_a_label_is_met_on_its_lines_and_a_file_by_its_weakness(suites: ModuleType, tmp_path: Path) -> None:
    spans = [(3, 4, frozenset({89}))]
    path = tmp_path / "a.py"
    assert suites.hit(suites.SuiteLabel(path, True, frozenset(), 4), spans)
    assert not suites.hit(suites.SuiteLabel(path, True, frozenset(), 5), spans)
    assert suites.hit(suites.SuiteLabel(path, True, frozenset(), 1, 3), spans)
    assert suites.hit(suites.SuiteLabel(path, True, frozenset({89})), spans)
    assert not suites.hit(suites.SuiteLabel(path, True, frozenset({22})), spans)


def test_a_resumed_benchmark_keeps_the_parts_that_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit, "PARTS", tmp_path / "parts.json")
    monkeypatch.setenv("BENCH_RESULTS", str(tmp_path / "results"))
    labels = tmp_path / "labels.json"
    labels.write_text('[{"path": "a.py", "bad": true}]')
    (tmp_path / "a.py").write_text("def f(x):\n    return eval(input())\n")
    given = ["audit", "--only", "cases", "--cases", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    audit.main()
    labels.unlink()
    monkeypatch.setattr(sys, "argv", [*given, "--resume"])
    audit.main()
    first, second = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert json.loads(first)["cases"] == 1
    assert second == first
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(FileNotFoundError):
        audit.main()
