"""`keystroke learn`: off until turned on; shown, exported as training reads it, forgotten on demand."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import stat
import time
from contextlib import closing
from pathlib import Path

import pytest
from cli_home import Home, home  # noqa: F401

from keystroke.config import load_settings
from keystroke.errors import ConfigError
from keystroke.gateway.record.outcome_store import OutcomeStore, SuggestionOutcome
from keystroke.text.cases import CompletionCase, read_cases


def outcome(**more: object) -> SuggestionOutcome:
    row: dict[str, object] = {
        "at": time.time() + 60,
        "project": "p1",
        "language": "python",
        "model": "m",
        "kind": "completion",
        "extent": "rest",
        "confidence": 0.9,
        "became": "accepted",
        "shown": 3,
        "taken": 3,
        "worth": 1.0,
        "path": "a.py",
        "prefix": "x = ",
        "suggestion": "one",
        "written": "one",
        "suffix": "\n",
    }
    return SuggestionOutcome(**{**row, **more})  # type: ignore[arg-type]


def keep(home: Home, *outcomes: SuggestionOutcome) -> None:
    with closing(OutcomeStore(home.root / "state" / "learned.db")) as learned:
        for row in outcomes:
            learned.save(row)


def status(home: Home) -> dict[str, object]:
    said: dict[str, object] = json.loads(home.keystroke("learn", "status", "--json").stdout)
    return said


def test_it_is_off_and_looking_makes_no_file(home: Home) -> None:
    assert status(home)["enabled"] is False
    assert home.keystroke("learn", "show", "--json").stdout.strip() == "[]"
    assert "deleted 0 suggestions" in home.keystroke("learn", "forget", "--yes").stderr
    assert not (home.root / "state" / "learned.db").exists()


def test_on_and_off_are_settings_of_the_user(home: Home) -> None:
    said = home.keystroke("learn", "on").stderr
    assert "nothing is sent anywhere" in said
    assert status(home)["enabled"] is True
    keep(home, outcome())
    home.keystroke("learn", "off")
    assert status(home)["enabled"] is False
    keep(home, outcome())  # as a gateway that still runs would
    assert len(json.loads(home.keystroke("learn", "show", "--json").stdout)) == 1


def test_a_project_cannot_turn_it_on(tmp_path: Path) -> None:
    (tmp_path / "keystroke.toml").write_text("[learn]\nenabled = true\n")
    own = tmp_path / "own.toml"
    own.write_text("")
    with pytest.raises(ConfigError, match=r"a project may not set learn\.enabled"):
        load_settings(cwd=tmp_path, environ={"KEYSTROKE_CONFIG": str(own)})


def test_what_is_kept_is_shown_and_one_of_it_whole(home: Home) -> None:
    keep(home, outcome(), *[outcome(language="go", became="rejected", worth=0.0, taken=0)] * 60)
    groups = {row["language"]: row for row in status(home)["groups"]}  # type: ignore[attr-defined]
    assert groups["python"]["shown"] == groups["python"]["accepted"] == 1
    assert (groups["go"]["shown"], groups["go"]["accepted"]) == (60, 0)
    assert groups["go"]["threshold"] > groups["go"]["default"]
    listed = home.keystroke("learn", "show", "--language", "python").stdout
    assert "accepted" in listed
    assert "one" in listed
    assert "rejected" not in listed
    whole = home.keystroke("learn", "show", "1").stdout
    assert "x = " in whole
    assert "a.py" in whole
    assert "there is no suggestion 999" in home.keystroke("learn", "show", "999", code=2).stderr


def test_exported_cases_are_what_training_reads(home: Home) -> None:
    keep(
        home,
        outcome(),
        outcome(became="rejected", written="two", extent="line"),
        outcome(became="unseen_right", written=""),
        outcome(kind="next_edit", extent="rename", written=""),
    )
    file = home.root / "mine.jsonl.xz"
    assert json.loads(home.keystroke("learn", "export", str(file), "--json").stdout)["cases"] == 2
    assert read_cases(file) == [
        CompletionCase("rest_of_line", "p1", "", "private", "a.py", "x = ", "one", "\n"),
        CompletionCase("line", "p1", "", "private", "a.py", "x = ", "two", "\n"),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "already exists" in home.keystroke("learn", "export", str(file), code=2).stderr
    home.keystroke("learn", "export", str(home.root / "wrong.json"), code=None)
    assert not (home.root / "wrong.json").exists()


def test_exporting_nothing_or_nowhere_is_a_clear_error(home: Home) -> None:
    assert "nothing to export" in home.keystroke("learn", "export", "a.jsonl.xz", code=2).stderr
    keep(home, outcome())
    (home.root / "file").write_text("")
    said = home.keystroke("learn", "export", str(Path("file") / "a.jsonl.xz"), code=2).stderr
    assert "cannot be written" in said


def test_forgetting_a_part_and_all(home: Home) -> None:
    keep(home, outcome(), outcome(language="go"), outcome(at=1.0), outcome(project="p2"))
    assert "use --yes" in home.keystroke("learn", "forget", code=None).stderr
    for arguments in (("--language", "go"), ("--days", "30"), ("--project", "p2")):
        said = home.keystroke("learn", "forget", "--yes", "--json", *arguments).stdout
        assert json.loads(said) == {"forgotten": 1}
    assert json.loads(home.keystroke("learn", "forget", "--yes", "--json").stdout) == {"forgotten": 1}
    assert status(home)["groups"] == []
