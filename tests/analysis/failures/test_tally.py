"""How many tests passed and which failed, read from reports of test runners."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keystroke.analysis.failures.tally import PassFailTally, count_tests

PYTEST = """
def test_good():
    print("3 passed, 9 failed")


def test_bad():
    assert 1 == 2, "5 passed"


def test_worse():
    raise KeyError("x - y")
"""
UNITTEST = """
import unittest


class Tests(unittest.TestCase):
    def test_good(self):
        pass

    def test_parts(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertEqual(n, 0)

    def test_error(self):
        raise KeyError
"""
CARGO = """\
running 2 tests
test tests::good ... ok
test tests::bad ... FAILED

failures:
    tests::bad

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.16s
"""
NODE = """\
ok 1 - adds
not ok 2 - halves
  error: '1 subtest failed'
# tests 2
# suites 0
# pass 1
# fail 1
# duration_ms 513.130166
"""
JEST = """\
  ● halves

    expect(received).toBe(expected)

Test Suites: 1 failed, 1 total
Tests:       1 failed, 2 passed, 3 total
"""


def ran(folder: Path, text: str, *command: str) -> PassFailTally:
    (folder / "test_it.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # reading those here takes seconds
        capture_output=True,
        text=True,
        check=False,
    )
    return count_tests(done.stdout + done.stderr)


def test_pytest(tmp_path: Path) -> None:
    plain = ("pytest", "-q", "-p", "no:cacheprovider")
    names = frozenset({"test_it.py::test_bad", "test_it.py::test_worse"})
    assert ran(tmp_path, PYTEST, *plain) == PassFailTally(1, 2, names)
    assert ran(tmp_path, PYTEST, *plain, "-v") == PassFailTally(1, 2, names)
    assert ran(tmp_path, PYTEST, *plain, "-x") == PassFailTally(
        1, 1, frozenset({"test_it.py::test_bad"}), cut=True
    )
    assert ran(tmp_path, "import nowhere\n", *plain) == PassFailTally(0, 1, frozenset({"test_it.py"}))
    assert ran(tmp_path, "def test_good():\n    pass\n", *plain) == PassFailTally(1)


def test_unittest(tmp_path: Path) -> None:
    counted = ran(tmp_path, UNITTEST, "unittest", "-q", "test_it")
    assert (counted.passed, counted.failed) == (1, 2)  # the parts of a test are one test
    assert {name.split()[0] for name in counted.names} == {"test_parts", "test_error"}


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (CARGO, PassFailTally(1, 1, frozenset({"tests::bad"}))),
        (NODE, PassFailTally(1, 1, frozenset({"halves"}))),
        (JEST, PassFailTally(2, 1, frozenset({"halves"}))),
        ("  2 passing (4ms)\n  1 failing\n", PassFailTally(2, 1)),
        ("Traceback (most recent call last):\nValueError: 3 passed\n", PassFailTally()),
        ("", PassFailTally()),
    ],
    ids=["cargo", "node", "jest", "mocha", "no tests", "nothing"],
)
def test_other_runners(output: str, expected: PassFailTally) -> None:
    assert count_tests(output) == expected


def failing(passed: int, *names: str, cut: bool = False) -> PassFailTally:
    return PassFailTally(passed, len(names), frozenset(names), cut)


def test_further_is_more_passed_and_none_lost() -> None:
    begun = failing(1, "a", "b")
    assert failing(2, "b").improves_on(begun)
    assert failing(3).improves_on(begun)
    assert not begun.improves_on(begun)
    assert not failing(2, "c").improves_on(begun)  # c passed before
    assert not PassFailTally(2, 1).improves_on(begun)  # which one fails is not told
    assert PassFailTally(1, 1).improves_on(PassFailTally(0, 2))  # there was nothing to lose
    assert not PassFailTally().improves_on(PassFailTally())


def test_tests_of_a_file_that_could_not_be_read_had_not_passed() -> None:
    assert failing(3, "test_b.py::two").improves_on(failing(2, "test_b.py"))
    assert not failing(3, "test_a.py::one").improves_on(failing(2, "test_b.py"))


def test_a_run_that_stops_at_the_first_failure_gets_further_by_what_passes_before_it() -> None:
    assert failing(2, "c", cut=True).improves_on(failing(1, "b", cut=True))
    assert not failing(2, "c").improves_on(failing(1, "b", cut=True))
