"""`keystroke edit` and `keystroke undo`: real files, a real server for the model, nothing written unasked."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from cli_home import PROGRAM, Home, home, remote_home, server  # noqa: F401
from openai_server import OpenAIServer, answer, chat, echo_chat
from test_cli_chat import terminal
from tiny_model import write_tiny_model

BEFORE = "def area(w, h):\r\n    return w * h\r\n\r\nprint(area(1, 2))"
BLOCK = "a.py\n<<<<<<< SEARCH\n    return w * h\n=======\n    return w * h * 2\n>>>>>>> REPLACE\n"
AFTER = BEFORE.replace("w * h\r", "w * h * 2\r")
PATCH = (
    "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n def area(w, h):\n-    return w * h\n+    return w * h * 2\n"
)


@pytest.fixture
def file(remote_home: Home) -> Path:
    path = remote_home.root / "a.py"
    path.write_bytes(BEFORE.encode())
    return path


def says(server: OpenAIServer, *answers: str) -> None:
    server.on("/chat/completions", *(chat(text) for text in answers))


def test_an_edit_changes_only_its_bytes_and_undo_takes_it_back(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, BLOCK)
    file.chmod(0o640)
    shown = remote_home.keystroke("edit", "a.py", "-m", "double it", "--yes")
    assert "+    return w * h * 2" in shown.stdout
    assert file.read_bytes() == AFTER.encode()
    assert file.stat().st_mode & 0o777 == 0o640
    assert "double it" in remote_home.keystroke("undo").stdout
    assert file.read_bytes() == BEFORE.encode()
    assert "nothing to undo" in remote_home.refused("undo")


def test_a_dry_run_shows_the_diff_and_writes_nothing(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, BLOCK)
    shown = remote_home.keystroke("edit", "a.py", "-m", "double it", "--dry-run")
    assert shown.stdout.startswith("--- a/a.py")
    assert file.read_bytes() == BEFORE.encode()


def test_without_a_terminal_or_yes_nothing_is_written(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, BLOCK)
    result = remote_home.keystroke("edit", "a.py", "-m", "double it", code=2)
    assert "--yes" in result.stderr
    assert file.read_bytes() == BEFORE.encode()


@pytest.mark.parametrize(("pressed", "after"), [("y", AFTER), ("n", BEFORE), ("x", BEFORE)])
def test_on_a_terminal_one_key_decides(
    remote_home: Home, server: OpenAIServer, file: Path, pressed: str, after: str
) -> None:
    says(server, BLOCK)
    with terminal(remote_home, "edit", "a.py", "-m", "double it") as screen:
        screen.expect(r"Apply this\? \[y/N\] ")
        screen.type(pressed)
        assert screen.leave() == 0
    assert file.read_bytes() == after.encode()


def test_lines_are_rewritten_as_a_region(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    says(server, "```\n    return w * h * 3\n```\n")
    remote_home.keystroke("edit", "a.py", "--lines", "2-2", "-m", "triple it", "--yes")
    assert file.read_bytes() == BEFORE.replace("w * h\r", "w * h * 3\r").encode()


def test_json_tells_edits_and_whether_they_were_applied(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, BLOCK)
    record = json.loads(remote_home.keystroke("edit", "a.py", "-m", "double it", "--yes", "--json").stdout)
    assert record["applied"]
    (changed,) = record["files"]
    start = BEFORE.index("\r\n\r\n")
    assert (changed["path"], changed["edits"]) == ("a.py", [{"start": start, "end": start, "text": " * 2"}])


def test_an_answer_that_does_not_fit_is_asked_again_then_refused(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    wrong = BLOCK.replace("return w * h\n=", "return nothing like it\n=")
    says(server, wrong, BLOCK)
    remote_home.keystroke("edit", "a.py", "-m", "double it", "--yes")
    assert file.read_bytes() == AFTER.encode()
    says(server, "I cannot do that.")
    result = remote_home.keystroke("edit", "a.py", "-m", "again", "--yes", code=2)
    assert "nothing was changed" in result.stderr
    assert file.read_bytes() == AFTER.encode()


def test_a_check_that_passes_keeps_the_edit_and_one_that_fails_takes_it_back(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, BLOCK)
    arguments = ("edit", "a.py", "-m", "double it", "--yes", "--check")
    failed = remote_home.keystroke(*arguments, "echo wrong here; grep -q nosuch a.py", code=2)
    assert "undone" in failed.stderr
    assert "wrong here" in failed.stderr
    assert file.read_bytes() == BEFORE.encode()
    remote_home.keystroke(*arguments, "grep -q 'h \\* 2' a.py")
    assert file.read_bytes() == AFTER.encode()


def test_a_check_that_hangs_is_ended_and_the_edit_taken_back(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, BLOCK)
    command = ("edit", "a.py", "-m", "double it", "--yes", "--check", "sleep 60", "--check-seconds", "0.3")
    assert "did not finish" in remote_home.keystroke(*command, code=2).stderr
    assert file.read_bytes() == BEFORE.encode()


@pytest.mark.parametrize("source", ["p.diff", "-"])
def test_a_patch_is_applied_without_a_model(home: Home, source: str) -> None:
    (home.root / "a.py").write_bytes(BEFORE.encode())
    (home.root / "p.diff").write_text(PATCH)
    home.keystroke("edit", "--patch", source, "--yes", stdin=PATCH)
    assert (home.root / "a.py").read_bytes() == AFTER.encode()
    home.keystroke("undo")
    assert (home.root / "a.py").read_bytes() == BEFORE.encode()


def test_undo_takes_back_the_fixes_of_an_audit(home: Home) -> None:
    before = (
        "\ufeffimport sqlite3\r\n\r\n\r\ndef find(db: sqlite3.Connection, name: str) -> object:\r\n"
        "    return db.execute(f\"select * from t where name = '{name}'\")\r\n"
    ).encode()
    (home.root / "app.py").write_bytes(before)
    done = home.keystroke("audit", "app.py", "--fix", code=1)
    assert "where name = ?" in (home.root / "app.py").read_text()
    assert "keystroke undo" in done.stderr
    assert "audit --fix" in home.keystroke("undo").stdout
    assert (home.root / "app.py").read_bytes() == before


def test_undo_refuses_where_the_file_was_changed_since(home: Home) -> None:
    (home.root / "a.py").write_bytes(BEFORE.encode())
    home.keystroke("edit", "--patch", "-", "--yes", stdin=PATCH)
    (home.root / "a.py").write_text("mine\n")
    assert "changed after the edit" in home.refused("undo")
    assert (home.root / "a.py").read_text() == "mine\n"


def test_a_file_that_changes_while_the_model_writes_is_not_overwritten(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    says(server, "what?", BLOCK)
    remote_home.keystroke("edit", "a.py", "-m", "double it", "--dry-run")  # so that it has been probed
    server.streaming.clear()
    server.on("/chat/completions", chat(*BLOCK, pause=0.02))
    with terminal(remote_home, "edit", "a.py", "-m", "double it", "--yes") as screen:
        assert server.streaming.wait(60)
        file.write_text("mine\n")
        assert screen.leave() == 2
        assert "changed on disk" in screen.shown
    assert file.read_text() == "mine\n"


def test_ctrl_c_stops_the_model_and_changes_nothing(
    remote_home: Home, server: OpenAIServer, file: Path
) -> None:
    server.on("/chat/completions", echo_chat(words=[" more"], count=5000, pause=0.02))
    command = [PROGRAM, "edit", "a.py", "-m", "double it", "--yes"]
    child = subprocess.Popen(
        command, cwd=remote_home.root, env=remote_home.environment, stderr=subprocess.PIPE
    )
    assert server.streaming.wait(60)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"Traceback" not in error
    assert server.cut.wait(60)
    assert file.read_bytes() == BEFORE.encode()


def test_a_small_model_works_and_says_that_it_is_small(home: Home) -> None:
    path = write_tiny_model(home.root / "tiny", context=4096)
    (home.root / "a.py").write_text("x = 1\n")
    result = home.keystroke(
        *(
            "--set",
            "generation.max_tokens=8",
            "edit",
            "a.py",
            "-m",
            "change it",
            "--yes",
            "--model",
            str(path),
        ),
        code=2,
    )
    assert "parameters" in result.stderr
    assert "keystroke models add coder" in result.stderr
    assert "nothing was changed" in result.stderr


REFUSED = [
    (("edit", "-m", "x"), "give the files"),
    (("edit", "a.py"), "describe the change"),
    (("edit", "a.py", "-m", " "), "describe the change"),
    (("edit", "a.py", "-m", "x", "--patch", "p"), "describe the change"),
    (("edit", "a.py", "--patch", "p.diff"), "names its own files"),
    (("edit", "nosuch.py", "-m", "x"), "does not exist"),
    (("edit", "binary.py", "-m", "x"), "binary"),
    (("edit", ".env", "-m", "x"), "secrets"),
    (("edit", "a.py", "-m", "x", "--lines", "9-10"), "does not exist"),
    (("edit", "a.py", "-m", "x", "--lines", "2-1"), "ends before"),
    (("edit", "a.py", "-m", "x", "--lines", "a-b"), "needs A-B"),
    (("edit", "a.py", "b.py", "-m", "x", "--lines", "1-1"), "exactly one"),
    (("edit", "--patch", "nosuch.diff"), "no file"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_bad_input_is_one_sentence_before_any_model_is_asked(
    remote_home: Home, server: OpenAIServer, file: Path, arguments: tuple[str, ...], words: str
) -> None:
    (remote_home.root / "b.py").touch()
    (remote_home.root / "binary.py").write_bytes(b"\0\1")
    (remote_home.root / ".env").write_text("KEY=1\n")
    (remote_home.root.parent / "out.py").touch()
    sentence = remote_home.keystroke(*arguments, code=None)
    assert sentence.code in (1, 2)
    assert words in sentence.stderr
    assert len(sentence.stderr.splitlines()) == 1
    assert server.bodies == []


def test_a_server_that_fails_is_one_sentence(remote_home: Home, server: OpenAIServer, file: Path) -> None:
    server.on("/chat/completions", answer({"error": "broken"}, 500))
    result = remote_home.keystroke("edit", "a.py", "-m", "double it", "--yes", code=None)
    assert result.code != 0
    assert "broken" in result.stderr
    assert file.read_bytes() == BEFORE.encode()


def test_a_file_of_another_project_is_edited_in_its_own_workspace_and_undone_there(
    remote_home: Home, server: OpenAIServer, file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "elsewhere" / "src" / "b.py"
    other.parent.mkdir(parents=True)
    (tmp_path / "elsewhere" / ".git").mkdir()
    other.write_bytes(BEFORE.encode())
    says(server, BLOCK.replace("a.py", "src/b.py"))
    done = remote_home.keystroke("edit", str(other), "-m", "double it", "--yes")
    assert other.read_bytes() == AFTER.encode()
    assert f"keystroke undo --folder {tmp_path / 'elsewhere'}" in done.stderr
    assert "nothing to undo" in remote_home.refused("undo")
    remote_home.keystroke("undo", "--folder", str(tmp_path / "elsewhere"))
    assert other.read_bytes() == BEFORE.encode()
    assert "in several projects" in remote_home.refused("edit", str(file), str(other), "-m", "both", "--yes")
    missing = remote_home.refused("edit", str(tmp_path / "nowhere" / "c.py"), "-m", "x", "--yes")
    assert "c.py" in missing
