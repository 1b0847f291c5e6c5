"""The command line and the formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from keystroke.analysis.audit import Auditor
from keystroke.analysis.audit.files import SkippedFile, SourceFile, find_sources
from keystroke.analysis.audit.report import AuditedFile, as_json, as_sarif
from keystroke.clients.cli.app import app as program
from keystroke.clients.cli.audit import audit
from keystroke.errors import UsageError

BAD = "import os\nfrom flask import request\n\ndef f():\n    os.system(f\"ls '{request.args['d']}'\")\n"
app = typer.Typer()
app.command()(audit)


def run(*arguments: str, text: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(item) for item in arguments], input=text)


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))  # the undo journal


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "a.py").write_text(BAD)
    (tmp_path / "b.js").write_text("const x = 1;\n")
    (tmp_path / "n.txt").write_text("os.system(x)\n")
    return tmp_path


def test_exit_codes_tell_clean_found_and_wrong_use(tree: Path) -> None:
    assert run(str(tree / "b.js")).exit_code == 0
    assert run(str(tree)).exit_code == 1
    assert run(str(tree), "--exit-zero").exit_code == 0
    assert isinstance(run().exception, UsageError)
    assert isinstance(run(str(tree), "--language", "cobol").exception, UsageError)
    assert run(str(tree), "--format", "xml").exit_code == 2
    assert UsageError("").exit_code == 2


def test_text_names_place_rule_weakness_and_source(tree: Path) -> None:
    out = run(str(tree / "a.py")).output
    assert "a.py:5:5: high python-command-injection (CWE-78)" in out
    assert "[from flask.request.args]" in out


def test_json_holds_offsets_and_fixes(tree: Path) -> None:
    (finding,) = json.loads(run(str(tree), "--format", "json").stdout)["findings"]
    assert (finding["line"], finding["cwe"], finding["rule"]) == (5, 78, "python-command-injection")
    assert BAD[finding["start"] : finding["end"]] == "os.system(f\"ls '{request.args['d']}'\")"
    assert finding["fixes"][0]["edits"]


def test_severity_and_standard_input(tree: Path) -> None:
    weak = "try:\n    login()\nexcept:\n    pass\n"
    assert run("--stdin", "--language", "python", text=weak).exit_code == 1
    assert run("--stdin", "--language", "python", "--severity", "high", text=weak).exit_code == 0


def test_a_diff_changes_nothing_and_a_fix_writes_only_what_it_proved(tree: Path) -> None:
    file = tree / "a.py"
    file.write_bytes(b"\xef\xbb\xbf" + BAD.replace("\n", "\r\n").encode())
    before = file.read_bytes()
    assert "+    os.system(f\"ls {shlex.quote(request.args['d'])}\")" in run(str(file), "--diff").output
    assert file.read_bytes() == before
    run(str(file), "--fix")
    after = file.read_bytes()
    assert after.startswith(b"\xef\xbb\xbf")
    assert b"shlex.quote(request.args['d'])" in after
    assert b"from flask import request\r\n" in after


def test_rules_are_listed_and_shown() -> None:
    assert "python-sql-injection" in run("--rules", "list").output
    assert "CWE-89" in run("--rules", "show", "python-sql-injection").output
    assert isinstance(run("--rules", "explain").exception, UsageError)


def test_sarif_has_the_structure_of_2_1_0() -> None:
    report = as_sarif([AuditedFile("a.py", BAD, Auditor("python").audit(BAD))], "1")
    assert report["version"] == "2.1.0"
    (one,) = report["runs"]
    driver = one["tool"]["driver"]
    assert driver["name"] == "keystroke"
    for result in one["results"]:
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        region = result["locations"][0]["physicalLocation"]["region"]
        assert 1 <= region["startLine"] <= region["endLine"]
        assert region["startColumn"] >= 1
        for fix in result.get("fixes", []):
            for change in fix["artifactChanges"]:
                assert change["artifactLocation"]["uri"] == "a.py"
                assert all(
                    {"deletedRegion", "insertedContent"} <= set(item) for item in change["replacements"]
                )
    assert json.loads(json.dumps(report)) == report


def test_ignored_files_and_links_out_of_the_tree_are_left_alone(tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    tree.mkdir()
    outside.mkdir()
    (outside / "o.py").write_text(BAD)
    (tree / "a.py").write_text(BAD)
    (tree / "ignored.py").write_text(BAD)
    (tree / ".gitignore").write_text("ignored.py\n")
    os.symlink(outside / "o.py", tree / "link.py")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    found = list(find_sources(tree))
    assert [item.path.name for item in found if isinstance(item, SourceFile)] == ["a.py"]
    assert [item.path.name for item in found if isinstance(item, SkippedFile)] == ["link.py"]


def test_pipes_of_a_project_are_not_opened(tree: Path) -> None:
    """A pipe without a writer would be waited for without end."""
    (tree / "a.py").write_text("def f(name):\n    open(f'/data/{name}', 'w')\n" + BAD)
    for name in ("pipe.py", "pyproject.toml", "setup.py", "setup.cfg", "package.json"):
        os.mkfifo(tree / name)
    (tree / "link.py").symlink_to("pipe.py")
    command = [sys.executable, "-m", "keystroke", "audit", "--exit-zero"]
    for target in (tree / "a.py", tree):
        ran = subprocess.run([*command, str(target)], capture_output=True, text=True, timeout=120, check=True)
        assert "python-command-injection" in ran.stdout


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"a\0b", "binary"), (b"x = '" + b"a" * 30_000 + b"'\n", "minified"), (b"\xff\xfe = 1\n", None)],
)
def test_files_that_are_not_source_are_skipped_with_a_reason(
    tmp_path: Path, data: bytes, why: str | None
) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(data)
    (found,) = find_sources(file)
    if why is None:
        assert isinstance(found, SourceFile)
    else:
        assert isinstance(found, SkippedFile)
        assert why in found.why


def test_a_finding_names_every_number_of_its_weakness_the_closest_first() -> None:
    text = "import hashlib\nh = hashlib.md5(b'x')\n"
    audited = AuditedFile("a b.py", text, Auditor("python").audit(text))
    (entry,) = as_json([audited])["findings"]
    assert entry["cwes"][0] == entry["cwe"] == 327
    assert 328 in entry["cwes"]
    (one,) = as_sarif([audited], "1")["runs"]
    (rule,) = one["tool"]["driver"]["rules"]
    assert {"external/cwe/cwe-327", "external/cwe/cwe-328"} <= set(rule["properties"]["tags"])
    (result,) = one["results"]
    assert result["properties"]["cwe"] == entry["cwes"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b.py"


def test_many_files_report_progress_on_standard_error_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        (tmp_path / f"m{number}.py").write_text("x = 1\n")
    monkeypatch.setattr("keystroke.clients.cli.audit.PROGRESS_FROM", 2)
    monkeypatch.setattr("keystroke.clients.cli.console.PROGRESS_INTERVAL", 0.0)
    result = run(str(tmp_path))
    assert result.exit_code == 0
    assert result.stdout == "0 findings in 3 files\n"
    assert "audit: 66 %" in result.stderr + capfd.readouterr().err


def test_the_shared_json_option_prints_json(tree: Path) -> None:
    found = CliRunner().invoke(program, ["--json", "audit", str(tree / "a.py")])
    assert [item["rule"] for item in json.loads(found.stdout)["findings"]] == ["python-command-injection"]
    assert json.loads(run(str(tree / "a.py"), "--json").stdout) == json.loads(found.stdout)
    assert isinstance(run(str(tree), "--json", "--format", "sarif").exception, UsageError)
    assert json.loads(run("--rules", "list", "--json").stdout)["rules"][0]["rule"] == "c-allocation-overflow"


def test_a_suggestion_is_said_by_that_word_and_fix_leaves_it(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("def calc(text):\n    return eval(text)\n")
    assert "(suggestion)" in run(str(file)).output
    (entry,) = json.loads(run(str(file), "--json").stdout)["findings"]
    assert (entry["fixes"], len(entry["suggestions"])) == ([], 1)
    run(str(file), "--fix")
    assert file.read_text() == "def calc(text):\n    return eval(text)\n"


def test_the_diff_of_a_fix_is_shown_before_it_is_written(tree: Path) -> None:
    result = run(str(tree / "a.py"), "--fix")
    assert "+    os.system(f\"ls {shlex.quote(request.args['d'])}\")" in result.stderr
    assert "1 fixed" in result.stderr


def test_lines_that_a_fix_adds_end_as_the_file_does(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(BAD.replace("\n", "\r\n").encode())
    run(str(file), "--fix")
    assert b"\n" not in file.read_bytes().replace(b"\r\n", b"")
