"""Runs commands in a copy of the workspace, in the sandbox.

A command of the model is split into words and executed without a shell, if `approve` allows it. A command
that the user named (a check) runs in a shell; naming it is the approval, unless there is no sandbox. Files
that the model's commands change become part of the task; a check changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from keystroke.agent.sandbox import CommandLimits, CompletedCommand, ExitReason, Sandbox
from keystroke.agent.sandbox.busy_clock import BusyClock
from keystroke.agent.tools.call import AgentTool, ToolResult
from keystroke.agent.tools.warm_tests import PytestCommand, WarmTests
from keystroke.agent.workspace import Overlay, Replica, WorkspaceReplicas
from keystroke.assist.edit.workspace import MAX_BYTES
from keystroke.engine.base import Interrupt
from keystroke.errors import Forbidden, InputError, Interrupted
from keystroke.text.encoding import decode

_REMOVED = 20  # files that a command may remove without another approval
_NAMED = 5  # files that a message names


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """A command that needs approval. `line` is shown to the user."""

    line: str
    confined: bool
    network: bool = False


ApproveCommand = Callable[[CommandRequest], bool]


class Runner:
    """Runs the commands of one task. `busy` counts the time in which commands run."""

    def __init__(
        self,
        sandbox: Sandbox,
        overlay: Overlay,
        copies: WorkspaceReplicas,
        approve: ApproveCommand,
        *,
        limits: CommandLimits | None = None,
        network: bool = False,
        interrupt: Interrupt | None = None,
        busy: BusyClock | None = None,
    ) -> None:
        self.sandbox, self.overlay, self.limits = sandbox, overlay, limits or CommandLimits()
        self._copies, self._approve, self._network = copies, approve, network
        self._interrupt = interrupt
        self.on_output: Callable[[str], None] | None = None
        self._busy = busy or BusyClock()
        self._warm = WarmTests(sandbox, self.limits)

    def run_check(
        self, line: str, overlay: Overlay | None = None, interrupt: Interrupt | None = None
    ) -> CompletedCommand:
        """Run a command that the user named, on the task's changes or on `overlay`. Threads that call it
        at the same time pass interrupts of their own. Forbidden where there is no sandbox and the user
        does not approve; Interrupted."""
        if not self.sandbox.confines and not self._approve(CommandRequest(line, False, self._network)):
            raise Forbidden(f"{line!r:.80} was not run: no sandbox holds here and it was not approved")
        quiet = interrupt is not None
        tests = PytestCommand.parse(line, self.overlay.workspace.root) if self.sandbox.confines else None
        with self._copies.borrow() as replica:
            return self._run(
                replica, ["/bin/sh", "-c", line], overlay or self.overlay, interrupt, quiet, tests
            )

    def prepare_check(self, line: str) -> None:
        """Load the test runner of a check that will be run soon, if that is possible."""
        tests = PytestCommand.parse(line, self.overlay.workspace.root) if self.sandbox.confines else None
        if tests is None:
            return
        with self._copies.borrow() as replica:
            replica.sync(self.overlay)
            self._warm.prepare(tests, replica.sandbox_policy(network=self._network))

    def run(self, line: str) -> CompletedCommand:
        """Run a command of the model and take over its changes. Forbidden where it is not approved;
        InputError where it cannot be split into words; Interrupted."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise InputError(f"the command {line!r:.80} cannot be read: {error}") from None
        if not words:
            raise InputError("the command is empty; name a program")
        if not self._approve(CommandRequest(line, self.sandbox.confines, self._network)):
            raise Forbidden(f"{line!r:.80} was not approved; do without it")
        with self._copies.borrow() as replica:
            result = self._run(replica, words, self.overlay)
            lost = self._adopt_changes(replica)
        if not lost:
            return result
        if self.on_output is not None:
            self.on_output(lost)
        return replace(result, output=f"{_end_with_newline(result.output)}{lost}")

    def _run(
        self,
        replica: Replica,
        words: list[str],
        overlay: Overlay,
        interrupt: Interrupt | None = None,
        quiet: bool = False,
        tests: PytestCommand | None = None,
    ) -> CompletedCommand:
        replica.sync(overlay)
        place = replica.sandbox_policy(network=self._network)
        interrupt, on_output = interrupt or self._interrupt, None if quiet else self.on_output
        with self._busy:
            result = self._warm.run(tests, place, interrupt, on_output) if tests is not None else None
            if result is None:
                result = self.sandbox.run(words, place, self.limits, interrupt, on_output=on_output)
        if tests is not None and result.exit_reason is ExitReason.EXITED and not result.ok:
            self._warm.prepare(tests, place)  # it is run again after the next change
        if result.exit_reason is ExitReason.INTERRUPTED:
            raise Interrupted("stopped on request; the command and all it started were ended")
        return result

    def close(self) -> None:
        """End the test runners that wait. Idempotent."""
        self._warm.close()

    def _adopt_changes(self, replica: Replica) -> str:
        """Take over the files that a command changed; returns a line on those that are lost."""
        changed, large = replica.changes()
        removed = [path for path, data in changed.items() if data is None]
        if len(removed) > _REMOVED and not self._approve(
            CommandRequest(
                f"(remove {len(removed)} files, {', '.join(removed[:3])}, …)", self.sandbox.confines
            )
        ):
            raise Forbidden(
                f"the command removed {len(removed)} files; that was not approved and is not kept"
            )
        lost = [f"{path} (larger than {MAX_BYTES >> 20} MB)" for path in large]
        for path, data in changed.items():
            try:
                self.overlay.write_by_command(path, None if data is None else decode(data, path).text)
            except Forbidden:
                lost.append(f"{path} (may not be changed)")
            except InputError:
                lost.append(f"{path} (not text)")
        if not lost:
            return ""
        more = f" and {len(lost) - _NAMED:,} more" if len(lost) > _NAMED else ""
        return f"[not kept after the command: {', '.join(lost[:_NAMED])}{more}]\n"


class RunArguments(msgspec.Struct, forbid_unknown_fields=True):
    command: Annotated[
        str, msgspec.Meta(description="program and arguments; no shell reads it", min_length=1)
    ]


class RunTool(AgentTool):
    name = "run"
    description = "Run a command in the workspace, for example the tests, and see what it prints."
    arguments = RunArguments

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def describe(self, arguments: RunArguments) -> str:
        return f"run {arguments.command:.100}"

    def call(self, arguments: RunArguments) -> ToolResult:
        result = self._runner.run(arguments.command)
        return ToolResult(result_text(result, self._runner.limits), failed=not result.ok)


def result_text(result: CompletedCommand, limits: CommandLimits) -> str:
    """A command's output and exit, for the model."""
    return f"{_end_with_newline(result.output)}The command {result.describe(limits)}."


def _end_with_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"
