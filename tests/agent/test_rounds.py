"""What a round that failed leaves to the next: the attempt after which more of the named tests pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_task import Desk, in_turn, scripted

from keystroke.agent.loop import EndStatus
from keystroke.agent.loop.events import NoteEvent, StepEvent

SOURCE = """\
def double(n):
    return n


def half(n):
    return n


def same(n):
    return n
"""
TESTS = """\
import unittest

from pair import double, half, same


class Tests(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(3), 6, "double is wrong")

    def test_half(self):
        self.assertEqual(half(6), 3, "half is wrong")

    def test_same(self):
        self.assertEqual(same(5), 5, "same is wrong")
"""
CHECK = "python3 -m unittest -q test_pair"
TASK = "make the tests in test_pair.py pass"
WHOLE = "correct all functions of pair.py, so that the tests in test_pair.py pass"  # one region
DOUBLED = SOURCE.replace("double(n):\n    return n", "double(n):\n    return 2 * n")
BOTH = DOUBLED.replace("half(n):\n    return n", "half(n):\n    return n // 2")
BREAKING = BOTH.replace("same(n):\n    return n", "same(n):\n    return -n")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.project.write("pair.py", SOURCE)
    made.project.write("test_pair.py", TESTS)
    return made


class Told:
    """A model that answers with one text after the other, and what it was shown."""

    def __init__(self, *answers: str) -> None:
        self.prompts: list[str] = []
        self._next = in_turn(*(f"{answer}```\n" for answer in answers))

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self._next(prompt)


def test_the_next_round_begins_from_the_attempt_that_passed_more(desk: Desk) -> None:
    before = desk.project.tree()
    told = Told("def double(n):\n    return 2 * n\n", "def half(n):\n    return n // 2\n")
    ended = desk.task(scripted(told, small=True), check=CHECK, tries=2).run(TASK)
    assert ended.status is EndStatus.DONE
    assert desk.project.tree() == {**before, "pair.py": BOTH}
    assert any("2 of 3 tests pass now" in line for line in desk.lines(NoteEvent))
    first, second = told.prompts
    assert "double is wrong" in first
    assert "return 2 * n" in second
    assert "half is wrong" in second
    assert "double is wrong" not in second
    assert desk.project.journal.undo()
    assert desk.project.tree() == before


def test_a_round_mends_one_failure_and_after_one_in_vain_the_next(desk: Desk) -> None:
    told = Told(
        "def double(n):\n    return n\n",
        "def half(n):\n    return n // 2\n",
        "def double(n):\n    return 2 * n\n",
    )
    quick = "env PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"  # of the machine's plugins none is needed
    check = f"{quick} {sys.executable} -m pytest -q -p no:cacheprovider test_pair.py"
    ended = desk.task(scripted(told, small=True), check=check, tries=2).run(TASK)
    assert ended.status is EndStatus.DONE
    assert [("double is wrong" in prompt, "half is wrong" in prompt) for prompt in told.prompts] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert all("The tests are right and this code is wrong" in prompt for prompt in told.prompts)
    assert (desk.project.root / "pair.py").read_text() == BOTH


def test_an_attempt_that_breaks_what_passed_is_not_built_on(desk: Desk) -> None:
    """More tests pass with it, but one that passed fails: the next round begins as the first did."""
    told = Told(BREAKING, BOTH)
    ended = desk.task(scripted(told, small=True), check=CHECK, tries=2).run(WHOLE)
    assert ended.status is EndStatus.DONE
    assert "return -n" not in told.prompts[1]
    assert "return 2 * n" not in told.prompts[1]
    assert not any("tests pass now" in line for line in desk.lines(NoteEvent))
    assert "the change fails: 2 of 3 tests pass" in desk.lines(NoteEvent)


def test_of_several_attempts_the_one_that_breaks_nothing_is_built_on(desk: Desk) -> None:
    told = Told(BREAKING, DOUBLED, BREAKING, BOTH)
    ended = desk.task(scripted(told, small=True), check=CHECK, tries=2, attempts=2).run(WHOLE)
    assert ended.status is EndStatus.DONE
    assert any("it passed 67% of the check" in line for line in desk.lines(NoteEvent))
    second = told.prompts[-1]
    assert "return 2 * n" in second
    assert "return -n" not in second


def test_where_not_everything_passes_in_the_end_nothing_is_changed_and_how_far_it_got_is_kept(
    desk: Desk,
) -> None:
    before = desk.project.tree()
    ended = desk.task(scripted(Told(DOUBLED), small=True), check=CHECK, tries=2).run(WHOLE)
    assert ended.status is EndStatus.FAILED
    assert desk.project.tree() == before
    assert "nothing was changed" in ended.line
    assert "2 of 3 tests pass" in ended.line
    assert "+    return 2 * n" in ended.diff
    record = desk.records.latest()
    assert record.overlay.texts == {"pair.py": DOUBLED}
    # Going on begins there.
    told = Told(BOTH)
    again = desk.task(scripted(told, small=True), check=CHECK).run("", record)
    assert again.status is EndStatus.DONE
    assert "return 2 * n" in told.prompts[0]
    assert desk.project.tree() == {**before, "pair.py": BOTH}
    desk.project.journal.undo()
    assert desk.project.tree() == before


def test_what_is_left_alone_in_the_last_place_is_checked_all_the_same(desk: Desk) -> None:
    """Two places; the first to be rewritten is made worse, the second comes back as it was."""
    far = "".join(f"LINE_{n} = {n}\n" for n in range(20))
    desk.project.write("pair.py", SOURCE.replace("def same", f"{far}\n\ndef same"))
    before = desk.project.tree()
    told = Told("def same(n):\n    return -n\n", "def double(n):\n    return n\n")
    chat = scripted(told, small=True)
    ended = desk.task(chat, check=CHECK, tries=1).run("change same and double in pair.py")
    assert [line for line in desk.lines(StepEvent) if line.startswith("rewrite")] == [
        "rewrite pair.py, lines 31 to 32: def same(n):",
        "rewrite pair.py, lines 1 to 2: def double(n):",
    ]
    assert ended.status is EndStatus.FAILED
    assert desk.project.tree() == before
