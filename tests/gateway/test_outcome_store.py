"""What became of suggestions on disk: private, bounded, deletable, without secrets, and never in the way."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from keystroke.assist.completion.tuning import bin_index, tune_threshold
from keystroke.errors import ConfigError
from keystroke.gateway.record.outcome_store import OutcomeStore, SuggestionOutcome

ONE = SuggestionOutcome(
    at=time.time() + 60,
    project="p",
    language="python",
    model="m",
    kind="completion",
    extent="rest",
    confidence=0.9,
    became="accepted",
    shown=5,
    taken=5,
    worth=1.0,
    path="a.py",
    prefix="value = ",
    suggestion="other",
    written="other",
    suffix="\n",
)
SECRET = "AKIA" + "J4EXAMPLEKEY0000"[:16]


def opened(folder: Path, **how: object) -> OutcomeStore:
    return OutcomeStore(folder / "learned.db", **how)  # type: ignore[arg-type]


def kept(folder: Path, *outcomes: SuggestionOutcome, **how: object) -> list[SuggestionOutcome]:
    with closing(opened(folder, **how)) as learned:
        for outcome in outcomes:
            learned.save(outcome)
    with closing(opened(folder, **how)) as learned:
        return learned.outcomes()


def test_what_was_kept_is_there_after_closing(tmp_path: Path) -> None:
    two = replace(ONE, became="rejected", worth=0.0, taken=0, written="else")
    assert [replace(o, id=0) for o in kept(tmp_path, ONE, two)] == [two, ONE]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as learned:
        learned.save(ONE)
        while not learned.outcomes():
            time.sleep(0.01)
        for file in tmp_path.glob("learned.db*"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


@pytest.mark.parametrize(
    "change",
    [
        {"prefix": f'key = "{SECRET}"\nvalue = '},
        {"written": f'"{SECRET}"', "prefix": "key = "},
        {"prefix": 'password = "', "written": "hunter2!x", "suggestion": 'example"'},
        {"suffix": "\nurl = 'postgres://me:s3cretword@db/x'\n"},
        {"prefix": "PASSWORD=", "written": "hunter2hunter2"},
        {"suggestion": "'ghp_" + "a1B2" * 9 + "'"},
        {"prefix": "headers = {'Authorization': 'Bearer abcdefghijklmnop0123'}\n"},
        {"prefix": "x = 'eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2Q'\n"},
    ],
)
def test_a_text_with_a_secret_is_kept_as_numbers_only(tmp_path: Path, change: dict[str, str]) -> None:
    [row] = kept(tmp_path, replace(ONE, **change))  # type: ignore[arg-type]
    assert (row.path, row.prefix, row.suggestion, row.written, row.suffix) == ("",) * 5
    assert (row.became, row.confidence) == ("accepted", 0.9)
    raw = b"".join(file.read_bytes() for file in tmp_path.glob("learned.db*"))
    assert not any(word in raw for word in (b"hunter2", SECRET.encode(), b"s3cretword"))


def test_ordinary_code_about_passwords_is_no_secret(tmp_path: Path) -> None:
    code = "def login(user, password):\n    token = make_token(user)\n    return check(password, token)\n"
    [row] = kept(tmp_path, replace(ONE, prefix=code))
    assert row.prefix == code


def test_without_text_only_numbers_are_kept(tmp_path: Path) -> None:
    [row] = kept(tmp_path, ONE, text=False)
    assert (row.prefix, row.suggestion, row.written, row.path) == ("", "", "", "")


def test_the_oldest_make_room(tmp_path: Path) -> None:
    big = replace(ONE, prefix="x = 1\n" * 2000)
    rows = kept(tmp_path, *(replace(big, shown=n) for n in range(200)), max_mb=1)
    assert 50 < len(rows) < 100
    assert rows[0].shown == 199
    assert sum(row.size for row in rows) <= 1 << 20


def test_what_was_forgotten_leaves_no_bytes_and_does_not_come_back(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as gateway, closing(opened(tmp_path)) as owner:
        gateway.save(replace(ONE, written="a remarkable word"))
        while not owner.outcomes():
            time.sleep(0.01)
        early = replace(ONE, at=time.time() - 1)  # shown before, settled after
        assert owner.delete() == 1
        gateway.save(early)
        gateway.save(replace(ONE, at=time.time() + 1, shown=7))
        while not owner.outcomes():
            time.sleep(0.01)
        assert [row.shown for row in owner.outcomes()] == [7]
        raw = b"".join(file.read_bytes() for file in tmp_path.glob("learned.db*"))
        assert b"a remarkable word" not in raw


def test_a_part_is_forgotten_by_language_project_age_or_number(tmp_path: Path) -> None:
    old, go, other = replace(ONE, at=1e9), replace(ONE, language="go"), replace(ONE, project="q")
    kept(tmp_path, ONE, old, go, other)
    with closing(opened(tmp_path)) as learned:
        assert learned.delete(language="go") == 1
        assert learned.delete(project="q") == 1
        assert learned.delete(before=2e9 - 1e9 + 1) == 1
        [left] = learned.outcomes()
        assert learned.delete(number=left.id + 5) == 0
        assert learned.delete(number=left.id) == 1


def test_paused_nothing_is_kept_by_a_gateway_that_runs(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as gateway:
        with closing(opened(tmp_path)) as owner:
            owner.set_paused(True)
        gateway.save(ONE)
    with closing(opened(tmp_path)) as owner:
        assert owner.outcomes() == []
        owner.set_paused(False)
    assert len(kept(tmp_path, ONE)) == 1


def test_counts_are_by_language_and_by_project(tmp_path: Path) -> None:
    bad = replace(ONE, project="bad", worth=0.0, became="rejected")
    edit = replace(ONE, kind="next_edit")
    kept(tmp_path, *[bad] * 30, *[ONE] * 10, replace(ONE, tunes=False), edit, replace(ONE, language="go"))
    with closing(opened(tmp_path)) as learned:
        language, project = learned.counts("python", "bad")
        at = bin_index(0.9)
        assert (language[at].of, language[at].right) == (40, 10)
        assert (project[at].of, project[at].right) == (30, 0)
        assert tune_threshold(0.8, *learned.counts("python", "bad")) > tune_threshold(
            0.8, *learned.counts("python", "p")
        )


def test_projects_are_hashed_with_a_salt_of_this_file_or_named(tmp_path: Path) -> None:
    with (
        closing(OutcomeStore(tmp_path / "a" / "l.db")) as one,
        closing(OutcomeStore(tmp_path / "b" / "l.db")) as two,
        closing(OutcomeStore(tmp_path / "c" / "l.db", named=True)) as named,
    ):
        assert one.project("/home/me/work") == one.project("/home/me/work") != one.project("/home/me/play")
        assert one.project("/home/me/work") != two.project("/home/me/work")
        assert "work" not in one.project("/home/me/work")
        assert named.project("/home/me/work") == "/home/me/work"
        assert one.project(None) == named.project("") == "-"


def test_a_file_that_is_no_database_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "learned.db").write_text("something else entirely, and long enough to be looked at\n" * 40)
    with pytest.raises(ConfigError, match="keystroke cache --clear learned"):
        opened(tmp_path)


def test_a_database_that_breaks_later_fails_nobody(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as learned:
        with closing(sqlite3.connect(tmp_path / "learned.db")) as other:
            other.execute("DROP TABLE outcomes")
            other.commit()
        learned.save(ONE)
        assert sum(count.of for count in learned.counts("python", "p")[0]) == 0
    learned.save(ONE)  # after the end: nothing happens


def test_what_was_committed_survives_a_kill(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from keystroke.gateway.record.outcome_store import OutcomeStore, SuggestionOutcome\n"
        "l = OutcomeStore(Path(sys.argv[1]))\n"
        "for n in range(20): l.save(SuggestionOutcome(at=2e9, project='p', language='c', model='m',"
        " kind='completion', extent='rest', confidence=0.5, became='typed', shown=n, taken=0, worth=1.0))\n"
        "while len(l.outcomes()) < 10: time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "learned.db")], env=os.environ)
    assert done.returncode == -9
    with closing(opened(tmp_path)) as learned:
        assert len(learned.outcomes()) >= 10
