"""The review of a real repository's changes: what changed and only that, each fault once, fixes that hold."""
# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from keystroke.analysis.audit import Severity
from keystroke.assist.edit import Workspace
from keystroke.assist.review import (
    ChangedFile,
    ReviewFinding,
    changed_files,
    combine_fixes,
    review,
    sort_findings,
)
from keystroke.errors import InputError, NotFound
from keystroke.text import apply_edits


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "old.py").write_text(
        "import os\n\n\ndef f(width):\n    return width\n\n\nprint(f(1), undefined_before)\n"
    )
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def files(folder: Path, *, staged: bool = False, revision: str = "") -> list[ChangedFile]:
    return changed_files(Workspace(folder), staged=staged, revision=revision)[0]


def findings(folder: Path, changed: Sequence[ChangedFile] | None = None) -> list[ReviewFinding]:
    return [item for item in review(changed if changed is not None else files(folder), folder) if isinstance(item, ReviewFinding)]  # fmt: skip


def test_only_changed_lines_are_reviewed(repository: Path) -> None:
    text = (repository / "old.py").read_text()
    (repository / "old.py").write_text(text.replace("return width", "return widht"))
    (found,) = findings(repository)
    assert (found.code, found.line, found.path) == ("undefined-name", 5, "old.py")


def test_new_files_staged_changes_and_revisions_are_told_apart(repository: Path) -> None:
    (repository / "new.py").write_text("print(missing_one)\n")
    assert [file.path for file in files(repository)] == ["new.py"]
    assert files(repository, staged=True) == []
    git(repository, "add", "new.py")
    (repository / "new.py").write_text("print(1)\n")
    (staged,) = files(repository, staged=True)
    assert (staged.text, staged.on_disk) == ("print(missing_one)\n", False)
    git(repository, "commit", "-qm", "second")
    assert [file.path for file in files(repository, revision="HEAD~1..HEAD")] == ["new.py"]
    assert files(repository, revision="HEAD~1..HEAD")[0].text == "print(missing_one)\n"
    assert files(repository, revision="HEAD~1")[0].text == "print(1)\n"


def test_a_repository_without_a_commit_is_reviewed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("print(missing_one)\n")
    assert [item.code for item in findings(tmp_path)] == ["undefined-name"]
    git(tmp_path, "add", "a.py")
    assert [item.code for item in findings(tmp_path, files(tmp_path, staged=True))] == ["undefined-name"]


@pytest.mark.parametrize("name", ["with space.py", "ümlaut.py", 'quo"te.py', "tab\tname.py", "b/a/x.py"])
def test_files_of_any_name_are_reviewed(repository: Path, name: str) -> None:
    file = repository / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("x = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "named")
    file.write_text("x = 1\nprint(missing_one)\n")
    (changed,) = files(repository)
    assert (changed.path, changed.lines) == (name, frozenset({2}))
    assert [item.path for item in findings(repository)] == [name]


def test_lines_that_look_like_headers_are_content(repository: Path) -> None:
    (repository / "old.py").write_text("a = 1\n++ b/other.py\n")
    assert [file.path for file in files(repository)] == ["old.py"]


def test_binary_huge_and_secret_files_are_left_out_and_said(repository: Path) -> None:
    (repository / "data.bin").write_bytes(b"\0" * 100)
    (repository / ".env").write_text("KEY=1\n")
    (repository / "huge.py").write_text("x = 1\n" * 2_000_000)
    found, left = changed_files(Workspace(repository, exclude=(".env",)))
    assert found == []
    assert {item.path for item in left} == {"data.bin", ".env", "huge.py"}


def test_a_security_finding_and_its_fix(repository: Path) -> None:
    (repository / "new.py").write_text(
        "import hashlib\n\nprint(hashlib.md5(b'x').hexdigest())\nimport yaml\nprint(yaml.load(open('f')))\n"
    )
    found = findings(repository)
    assert {item.source for item in found} >= {"audit"}
    assert all("CWE-" in item.message for item in found if item.source == "audit")


def test_a_suggestion_of_the_audit_is_told_and_is_no_fix(repository: Path) -> None:
    text = "import hashlib\n\n\ndef sign(password):\n    return hashlib.md5(password.encode()).hexdigest()\n"
    (repository / "new.py").write_text(text)
    found = [item for item in findings(repository) if item.code == "python-weak-hash"]
    assert [(item.fix, "Suggestion: Use SHA-256" in item.message) for item in found] == [(None, True)]


def test_each_fault_is_said_once_though_the_linter_knows_it_too(repository: Path) -> None:
    (repository / "ruff.toml").write_text('[lint]\nselect = ["F", "E", "C4"]\n')
    (repository / "new.py").write_text("import os\n\nx = list([1, 2])\nprint(x, missing_one)\n")
    found = findings(repository)
    assert sorted((item.source, item.code) for item in found) == [
        ("check", "undefined-name"),
        ("check", "unused-import"),
        ("ruff", "C410"),
    ]


def test_fixes_of_one_review_apply_together_and_silence_what_they_mend(repository: Path) -> None:
    (repository / "ruff.toml").write_text('[lint]\nselect = ["F", "E7"]\n')
    text = "import os\nimport re\n\n\ndef f(width):\n    if width == None:\n        return f'none'\n    return widht\n"
    (repository / "new.py").write_text(text)
    changed = files(repository)
    found = findings(repository, changed)
    edits, done = combine_fixes(changed, sort_findings(found))
    assert len(done) >= 4
    (repository / "new.py").write_text(apply_edits(text, edits["new.py"]))
    left = {(item.code, item.message) for item in findings(repository)}
    assert left.isdisjoint({(item.code, item.message) for item in done})


def test_the_gravest_comes_first() -> None:
    def one(severity: Severity, line: int) -> ReviewFinding:
        return ReviewFinding("check", "x", severity, "m", "a.py", line, 1, line, line)

    given = [one(Severity.LOW, 1), one(Severity.CRITICAL, 9), one(Severity.HIGH, 3), one(Severity.HIGH, 2)]
    assert [item.line for item in sort_findings(given)] == [9, 2, 3, 1]


class Scripted:
    """A writer that says what a model might."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces
        self.asked: list[str] = []

    def write(self, messages: Sequence[Mapping[str, str]], prediction: str | None) -> Iterator[str]:
        self.asked.append(messages[-1]["content"])
        yield from self.pieces


class Confirming(Scripted):
    """It remarks what it was given, and then says which version has the defect: the one with `bad` in it."""

    def __init__(self, bad: str, *pieces: str) -> None:
        super().__init__(*pieces)
        self.bad = bad

    def write(self, messages: Sequence[Mapping[str, str]], prediction: str | None) -> Iterator[str]:
        question = messages[-1]["content"]
        if "Version A" not in question:
            yield from super().write(messages, prediction)
            return
        self.asked.append(question)
        first, _, second = question.partition("Version B")
        yield {(True, False): "A", (False, True): "B"}.get((self.bad in first, self.bad in second), "neither")


REMARKS = (
    'Here is my review:\n{"line": 2, "severity": "high", "mess',
    'age": "Division by zero.", "replacement": "return n / 2"}\n',
    '{"line": 99, "message": "not in the change"}\n',
    '{"line": "two", "message": 3}\n{"line": 1, "message": "a \\u001b[2J b", "replacement": "def half(n"}',
)


def of_model(folder: Path, model: Scripted) -> list[ReviewFinding]:
    found = review(files(folder), folder, model)
    return [item for item in found if isinstance(item, ReviewFinding) and item.source == "model"]


def committed(folder: Path, name: str, before: str, after: str) -> None:
    (folder / name).write_text(before)
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "before")
    (folder / name).write_text(after)


def test_a_models_remarks_are_read_line_by_line_and_doubtful_ones_dropped(repository: Path) -> None:
    committed(repository, "a.py", "def half(n):\n    return n / 2\n", "def half(n): # it\n    return n / 0\n")
    model = Confirming("n / 0", *REMARKS)
    found = of_model(repository, model)
    assert [(item.line, item.severity, item.message) for item in found] == [
        (2, Severity.HIGH, "Division by zero."),
        (1, Severity.MEDIUM, "a [2J b"),
    ]
    assert found[0].fix is not None
    text = (repository / "a.py").read_text()
    assert apply_edits(text, found[0].fix.edits) == "def half(n): # it\n    return n / 2\n"
    assert found[1].fix is None
    assert "+    2     return n / 0" in model.asked[0]


def test_a_remark_may_be_written_over_several_lines_and_what_never_ends_is_none(repository: Path) -> None:
    committed(repository, "a.py", "def half(n):\n    return n / 2\n", "def half(n):\n    return n / 0\n")
    model = Confirming(
        "n / 0",
        "```json\n{ this is no JSON\n",
        '{\n  "line": 2,\n  "severity": "high",\n  "message": "Division ',
        'by zero."\n}\n```\n{"line": 2, "message": "cut',
    )
    assert [item.message for item in of_model(repository, model)] == ["Division by zero."]


@pytest.mark.parametrize("answer", ["A", "B", "both", "neither", "I cannot tell."])
def test_a_remark_that_the_model_contradicts_when_asked_the_other_way_is_no_finding(
    repository: Path, answer: str
) -> None:
    class Habit(Scripted):
        def write(self, messages: Sequence[Mapping[str, str]], prediction: str | None) -> Iterator[str]:
            if "Version A" in messages[-1]["content"]:
                yield answer
            else:
                yield from super().write(messages, prediction)

    committed(repository, "a.py", "def half(n):\n    return n / 2\n", "def half(n):\n    return n / 0\n")
    assert of_model(repository, Habit(*REMARKS)) == []


def test_a_remark_that_no_example_shows_is_a_suspicion_and_no_finding(repository: Path) -> None:
    before, after = (
        "import os\n\ndef here():\n    return os.getcwd()\n",
        "import os\n\ndef here():\n    return os.sep\n",
    )
    committed(repository, "a.py", before, after)
    model = Confirming("os.sep", '{"line": 4, "message": "It is not where we are."}')
    told = list(review(files(repository), repository, model))
    assert told == ["a.py:4: the model suspects, and no example shows: It is not where we are."]


def test_a_remark_on_a_file_that_has_no_earlier_text_cannot_be_confirmed(repository: Path) -> None:
    (repository / "new.py").write_text("def half(n):\n    return n / 0\n")
    assert of_model(repository, Confirming("n / 0", *REMARKS)) == []


def test_what_is_no_repository_or_revision_is_one_sentence(tmp_path: Path, repository: Path) -> None:
    for revision in ("nosuch", "HEAD..nosuch", "-x", "--output=x"):
        with pytest.raises((NotFound, InputError), match="revision"):
            files(repository, revision=revision)


def test_no_repository_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not in a git repository"):
        files(tmp_path)


def test_programs_that_the_repository_names_are_not_run(repository: Path) -> None:
    trap = repository / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {repository}/ran\ncat\n")
    trap.chmod(0o755)
    git(repository, "config", "diff.external", str(trap))
    git(repository, "config", "diff.x.textconv", str(trap))
    git(repository, "config", "core.fsmonitor", str(trap))
    (repository / ".gitattributes").write_text("*.py diff=x\n")
    (repository / "old.py").write_text("print(missing_one)\n")
    assert "undefined-name" in {item.code for item in findings(repository)}
    assert not (repository / "ran").exists()


def test_of_a_renamed_file_only_what_changed_is_reviewed_and_of_a_removed_one_nothing(
    repository: Path,
) -> None:
    (repository / "gone.py").write_text("print(nowhere)\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "second")
    git(repository, "mv", "old.py", "new name.py")
    (repository / "gone.py").unlink()
    assert files(repository) == []
    text = (repository / "new name.py").read_text()
    (repository / "new name.py").write_text(text.replace("return width", "return widht"))
    assert [(item.path, item.line, item.code) for item in findings(repository)] == [
        ("new name.py", 5, "undefined-name")
    ]


def test_a_repository_inside_is_left_out_and_said(repository: Path) -> None:
    inner = repository / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "a.py").write_text("print(nowhere)\n")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "inner")
    git(repository, "-c", "advice.addEmbeddedRepo=false", "add", "inner")
    git(repository, "commit", "-qm", "with inner")
    (inner / "a.py").write_text("print(elsewhere)\n")
    git(inner, "commit", "-qam", "more")
    changed, left = changed_files(Workspace(repository))
    assert changed == []
    assert [(item.path, "of its own" in item.why) for item in left] == [("inner", True)]


def test_a_syntax_error_in_another_language_is_found_where_its_grammar_understood_the_file_before(
    repository: Path,
) -> None:
    (repository / "a.js").write_text("function f() {\n  return (1);\n}\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "js")
    (repository / "a.js").write_text("function f() {\n  return (1;\n}\n")
    (found,) = findings(repository)
    assert (found.source, found.line, found.message) == ("check", 2, "Missing `)`")
    assert found.fix is not None
