"""`keystroke review` and `keystroke refactor` as they are used: exit codes, JSON, one key, undo."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import subprocess

import pytest
from cli_home import Home, home, remote_home, server  # noqa: F401
from openai_server import OpenAIServer, chat
from test_cli_chat import terminal

CODE = "def area(width, height):\n    return width * height\n\n\nprint(area(1, 2))\n"
WRONG = CODE.replace("* height", "* heigth")


def git(home: Home, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=home.root, check=True, capture_output=True)


@pytest.fixture
def repository(home: Home) -> Home:
    (home.root / ".gitignore").write_text("state\ncache\nmodels\nkeystroke.toml\n")
    (home.root / "a.py").write_text(CODE)
    git(home, "init", "-q", "-b", "main")
    git(home, "add", ".")
    git(home, "commit", "-qm", "first")
    return home


def test_a_clean_tree_is_0_and_a_finding_is_1(repository: Home) -> None:
    assert "0 findings" in repository.keystroke("review").stdout
    (repository.root / "a.py").write_text(WRONG)
    found = repository.keystroke("review", code=1)
    assert "a.py:2:20: high check/undefined-name" in found.stdout
    assert "1 finding in 1 changed file" in found.stdout
    repository.keystroke("review", "--exit-zero")
    assert "0 findings" in repository.keystroke("review", "--severity", "critical").stdout
    assert "0 findings" in repository.keystroke("review", "--staged").stdout


def test_findings_are_json_lines_and_a_summary(repository: Home) -> None:
    (repository.root / "a.py").write_text(WRONG)
    lines = [
        json.loads(line) for line in repository.keystroke("review", "--json", code=1).stdout.splitlines()
    ]
    assert [line["type"] for line in lines] == ["finding", "summary"]
    assert lines[0]["fix"]["edits"] == [{"start": 44, "end": 50, "text": "height"}]
    assert lines[1] == {"type": "summary", "findings": 1, "files": 1, "fixed": 0}


def test_fix_applies_what_was_proved_and_undo_takes_it_back(repository: Home) -> None:
    (repository.root / "a.py").write_text(WRONG)
    repository.keystroke("review", "--fix")
    assert (repository.root / "a.py").read_text() == CODE
    repository.keystroke("undo")
    assert (repository.root / "a.py").read_text() == WRONG


def test_staged_text_that_is_no_longer_on_disk_is_not_fixed(repository: Home) -> None:
    (repository.root / "a.py").write_text(WRONG)
    git(repository, "add", "a.py")
    (repository.root / "a.py").write_text(WRONG + "# mine\n")
    repository.keystroke("review", "--staged", "--fix", code=1)
    assert (repository.root / "a.py").read_text() == WRONG + "# mine\n"


@pytest.mark.parametrize(("pressed", "after", "code"), [("a", CODE, 0), ("s", WRONG, 1), ("q", WRONG, 1)])
def test_on_a_terminal_one_key_applies_a_fix(repository: Home, pressed: str, after: str, code: int) -> None:
    (repository.root / "a.py").write_text(WRONG)
    with terminal(repository, "review") as screen:
        screen.expect(r"\+\+\+ b/a\.py")  # the diff comes before the question
        screen.expect(r"a apply, s skip, q quit\? ")
        screen.type(pressed)
        assert screen.leave() == code
    assert (repository.root / "a.py").read_text() == after


def test_a_configured_model_reviews_too_and_can_be_left_out(
    repository: Home, remote_home: Home, server: OpenAIServer
) -> None:
    remark = chat('{"line": 6, "severity": "low", "message": "Says nothing."}')
    server.on("/chat/completions", remark, chat("A"), chat("B"))  # the new version, whichever comes first
    (repository.root / "a.py").write_text(CODE + "print()\n")
    told = repository.keystroke("review")
    assert "a.py:6: the model suspects, and no example shows: Says nothing." in told.stderr
    assert "0 findings" in told.stdout
    assert len(server.bodies) == 3
    assert "suspects" not in repository.keystroke("review", "--no-model").stderr
    assert len(server.bodies) == 3
    server.on("/chat/completions", remark, chat("A"))  # by position, not by what it reads
    assert "suspects" not in repository.keystroke("review").stderr


def test_what_a_model_says_of_a_shown_fault_is_a_finding(
    repository: Home, remote_home: Home, server: OpenAIServer
) -> None:
    safe = "def share(total: int, count: int):\n    return total // count if count else 0\n"
    (repository.root / "b.py").write_text(safe)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    (repository.root / "b.py").write_text(safe.replace(" if count else 0", ""))
    remark = chat('{"line": 2, "severity": "low", "message": "None may share."}')
    server.on("/chat/completions", remark, chat("A"), chat("B"))
    found = repository.keystroke("review", code=1).stdout
    assert "high example/regression: share(" in found
    assert "low model/remark: None may share." in found


def test_examples_show_what_fails_now_unless_nothing_may_be_run(repository: Home) -> None:
    safe = "def share(total: int, count: int):\n    return total // count if count else 0\n"
    (repository.root / "b.py").write_text(safe)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    (repository.root / "b.py").write_text(safe.replace(" if count else 0", ""))
    found = repository.keystroke("review", code=1).stdout
    assert "high example/regression: share(" in found
    assert "ZeroDivisionError" in found
    assert "0 findings" in repository.keystroke("review", "--no-run").stdout


def test_without_a_model_it_says_how_to_configure_one(repository: Home) -> None:
    assert "keystroke models add coder" in repository.keystroke("review").stderr


def test_bad_reviews_are_one_sentence(home: Home, repository: Home) -> None:
    assert "choose one" in repository.refused("review", "HEAD", "--staged")
    assert "no revision" in repository.refused("review", "nosuch")


def test_outside_a_repository_it_says_so(home: Home) -> None:
    assert "not in a git repository" in home.refused("review")


# ── refactor ──────────────────────────────────────────────────────────────────────────────────


def test_a_rename_is_previewed_applied_and_undone(repository: Home) -> None:
    (repository.root / "b.py").write_text("from a import area\n\nprint(area(3, 4))\n")
    shown = repository.keystroke("refactor", "rename", "a.py:1:5", "surface", "--dry-run").stdout
    assert "+print(surface(3, 4))" in shown
    assert (repository.root / "a.py").read_text() == CODE
    repository.keystroke("refactor", "rename", "a.py:1:5", "surface", "--yes")
    assert (repository.root / "b.py").read_text() == "from a import surface\n\nprint(surface(3, 4))\n"
    repository.keystroke("undo")
    assert (repository.root / "a.py").read_text() == CODE
    assert (repository.root / "b.py").read_text() == "from a import area\n\nprint(area(3, 4))\n"


def test_lines_and_expressions_are_extracted(repository: Home) -> None:
    repository.keystroke("refactor", "extract", "a.py:2:12-2:26", "product", "--variable", "--yes")
    assert "    product = width * height\n    return product\n" in (repository.root / "a.py").read_text()
    repository.keystroke("undo")
    repository.keystroke("refactor", "extract", "a.py:2-2", "measure", "--yes")
    assert "    return measure(width, height)\n" in (repository.root / "a.py").read_text()


def test_the_other_refactorings_answer_as_json(repository: Home) -> None:
    (repository.root / "b.py").write_text("import os\n\nx = 1\n")
    for arguments, path in (
        (("signature", "a.py:1:5", "width, height, depth=1"), "a.py"),
        (("imports", "b.py"), "b.py"),
        (("move", "a.py:1:5", "b.py"), "b.py"),
        (("inline", "a.py:1:5"), "a.py"),
    ):
        done = json.loads(repository.keystroke("refactor", *arguments, "--dry-run", "--json").stdout)
        assert not done["applied"]
        assert path in {file["path"] for file in done["files"]}
    assert (repository.root / "a.py").read_text() == CODE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rename", "a.py", "x"), "the position must be"),
        (("rename", "a.py:99:1", "x"), "does not exist"),
        (("rename", "a.py:1:99", "x"), "does not exist"),
        (("rename", "nosuch.py:1:1", "x"), "does not exist"),
        (("rename", "../a.py:1:1", "x"), "outside"),
        (("rename", "a.py:1:5", "1x"), "not a name"),
        (("extract", "a.py:1", "x"), "the range must be"),
        (("extract", "a.py:1:1-2", "x"), "both ends"),
        (("move", "a.py:1:5", "nosuch.py"), "does not exist"),
    ],
)
def test_bad_refactorings_are_one_sentence(repository: Home, arguments: tuple[str, ...], words: str) -> None:
    result = repository.keystroke("refactor", *arguments, code=None)
    assert result.code in (1, 2)
    assert words in result.stderr
    assert (repository.root / "a.py").read_text() == CODE
