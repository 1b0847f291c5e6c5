"""Counts passed and failed tests in the output of a test runner.

Reads the summaries of pytest, unittest, cargo, node and jest, and of other runners that print "N passed, M
failed".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_KINDS = r"(?:passed|passing|failed|failing|errors?|skipped|deselected|xfailed|xpassed|warnings?)\b"
# Suites and files are counted too, on lines that begin with their name.
_SUMMARY = re.compile(
    rf"^(?:=+ |\s*Tests:?\s+|test result: \w+\. |\s*)(?=\d+ {_KINDS})|^(?:#|ℹ) (?:pass|fail) \d"
)
_PASSED = re.compile(r"\b(\d{1,6}) (?:passed|passing)\b|\bpass (\d{1,6})$")
_FAILED = re.compile(r"\b(\d{1,6}) (?:failed|failing|errors?)\b|\bfail (\d{1,6})$")
_RAN = re.compile(r"^Ran (\d{1,6}) tests? in ")  # unittest: the failed ones among them
_NAME = re.compile(
    r"^(?:FAILED|ERROR) (?P<pytest>[^\s(].*?)(?: - .*)?$"
    r"|^(?:FAIL|ERROR): (?P<unittest>\S+ \([^)]*\))"
    r"|^test (?P<cargo>\S+) \.\.\. FAILED$"
    r"|^\s*(?:not ok \d+ - |✖ |● )(?P<node>\S.*?)(?: \([\d.]+ ?ms\))?$"
)
_CUT = re.compile(r"^!+ stopping after 1 failures !+$")


@dataclass(frozen=True, slots=True)
class PassFailTally:
    """`names` are the failed tests, if the runner prints them; `cut`: it stopped at the first failure."""

    passed: int = 0
    failed: int = 0
    names: frozenset[str] = frozenset()
    cut: bool = False

    @property
    def share(self) -> float:
        return self.passed / (self.passed + self.failed) if self.passed else 0.0

    def __str__(self) -> str:
        return f"{self.passed} of {self.passed + self.failed} tests pass"

    def improves_on(self, than: PassFailTally) -> bool:
        """Whether more tests pass and none that passed before fails. False if that cannot be known."""
        if self.passed <= than.passed:
            return False
        if not than.passed or (self.cut and than.cut):
            return True
        known = len(self.names) >= self.failed
        # A file that could not be collected had no test that passed.
        return known and all({name, name.partition("::")[0]} & than.names for name in self.names)


def count_tests(output: str) -> PassFailTally:
    """The counts in a command's output; zeros if there are none."""
    passed = failed = ran = 0
    cut = False
    names: set[str] = set()
    for line in output.splitlines():
        if _SUMMARY.match(line):
            passed += _sum_counts(_PASSED, line)
            failed += _sum_counts(_FAILED, line)
        elif found := _NAME.match(line):
            names.add(found[found.lastgroup or 0])
        elif found := _RAN.match(line):
            ran += int(found[1])
        cut = cut or _CUT.match(line) is not None
    if ran:
        failed += len(names)
        passed += max(0, ran - len(names))
    return PassFailTally(passed, failed, frozenset(names), cut)


def _sum_counts(counts: re.Pattern[str], line: str) -> int:
    return sum(int(one or other) for one, other in counts.findall(line))
