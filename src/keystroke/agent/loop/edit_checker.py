"""Checks an attempt at a change: it applies, it parses, its types check, and the user's check command passes.

Cheap checks come first and a failure ends the rest. Commands run in copies of the workspace, several at a
time.
"""

from __future__ import annotations

from keystroke.agent.attempts import CheckResult, normalise
from keystroke.agent.attempts.checker import COMPLETE, CONTINUE, AttemptWatch
from keystroke.agent.loop.focused_check import affected_tests, focused_command
from keystroke.agent.loop.region_edit import RegionEdit
from keystroke.agent.sandbox import CompletedCommand, ExitReason
from keystroke.agent.tools import Runner
from keystroke.agent.workspace import Overlay
from keystroke.analysis.failures.output_summary import distinct_reports, summarize_output
from keystroke.analysis.failures.tally import count_tests
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import EditFailure
from keystroke.assist.edit.operations import EditFailureReason
from keystroke.assist.edit.rule_checks import find_violation
from keystroke.engine.base import Interrupt

# Scores of changes that apply, and of those whose types check; tiny, because a score is the share of passed
# tests.
_APPLIES, _TYPES_PASS = 0.001, 0.002


class EditChecker:
    """`check` and `types` are the user's shell commands. `needed`: an answer that changes nothing fails;
    otherwise another region may be the one to change. `keep_rules`: one that breaks a rule of the project
    fails. `before`: the check's result without the change."""

    def __init__(
        self,
        overlay: Overlay,
        edit: RegionEdit,
        runner: Runner,
        check: str = "",
        types: str = "",
        *,
        needed: bool = True,
        keep_rules: bool = True,
        before: CompletedCommand | None = None,
    ) -> None:
        self._overlay, self._edit, self._needed = overlay, edit, needed
        self._keep_rules, self._before = keep_rules, before
        self._runner, self._check, self._types = runner, check, types

    def watch(self) -> AttemptWatch:
        is_complete = self._edit.watch()
        return lambda piece: COMPLETE if is_complete(piece) else CONTINUE

    def apply_answer(self, text: str) -> Overlay | str:
        """The overlay with an attempt's change, or why the change cannot be applied."""
        new = self._edit.apply_answer(text)
        trial = self._overlay.fork()
        if isinstance(new, str):
            trial.write(self._edit.region.path, new)
        elif self._needed or new.reason is not EditFailureReason.UNCHANGED:
            return new.message
        return trial

    def check(self, text: str, interrupt: Interrupt) -> CheckResult | None:
        trial = self.apply_answer(text)
        if isinstance(trial, str):
            return CheckResult(0.0, trial)
        edit = self._edit
        if self._keep_rules and (changed := trial.read(edit.region.path)) is not None:
            broken = find_violation(edit.text, changed, edit.region.path, edit.rules)
            if broken is not None:
                return CheckResult(_APPLIES, broken)
        if self._types:
            types = self._runner.run_check(self._types, trial, interrupt)
            if not types.ok:
                return CheckResult(_APPLIES, f"the types do not fit:\n{failure_message(types)}")
        if not self._check:
            return None
        before, path = self._before, edit.region.path
        first = focused_command(self._check, before, lambda: affected_tests(trial, path))
        if first is not None and before is not None:
            failing = self._runner.run_check(first, trial, interrupt)
            # A test that passed fails now, or none of the failing ones passes.
            if not failing.ok and (before.ok or not count_tests(failing.output).passed):
                return CheckResult(_TYPES_PASS, f"`{self._check}` fails:\n{failure_message(failing)}")
        result = self._runner.run_check(self._check, trial, interrupt)
        if result.ok:
            return CheckResult(1.0)
        share = count_tests(result.output).share
        return CheckResult(
            _TYPES_PASS + (1 - 2 * _TYPES_PASS) * share,
            f"`{self._check}` fails:\n{failure_message(result)}",
            result,
        )

    def key(self, text: str) -> str:
        new = self._edit.apply_answer(text)
        return text if isinstance(new, EditFailure) else normalise(new, language_of(self._edit.region.path))


def failure_messages(result: CompletedCommand) -> list[str]:
    """The failures in a command's output, one by one: a small model repairs one at a time."""
    return (distinct_reports(result.output) if result.exit_reason is not ExitReason.TIMEOUT else []) or [
        failure_message(result)
    ]


def failure_message(result: CompletedCommand) -> str:
    """A failed command's output for a model: expected and actual values, or that it never ended."""
    text = summarize_output(result.output)
    if result.exit_reason is ExitReason.TIMEOUT:
        waited = f"It did not end within {result.seconds:.0f} seconds and was stopped"
        return f"{waited}: is there an endless loop?\n{text}"
    return text
