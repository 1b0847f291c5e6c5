"""The tool that runs a command: in a copy of the workspace, in the sandbox, if it may.

A command line from a model is cut into words and executed; no shell ever reads it. Whether it may run is
asked of `approve`, and where no sandbox holds, always. A command that the user named (a check) is the user's:
it goes through a shell, and naming it was the approval, unless nothing confines it. What commands change in
the copy becomes part of the task only when the model ran them; a check changes nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from keystroke.agent.sandbox import Ended, Ending, Limits, Sandbox
from keystroke.agent.tools.call import Result, Tool
from keystroke.agent.workspace import Overlay, Replica, Replicas
from keystroke.engine.base import Interrupt
from keystroke.errors import Forbidden, InputError, Interrupted
from keystroke.text.encoding import decode

_REMOVED = 20  # files that a command may remove before somebody must say yes


@dataclass(frozen=True, slots=True)
class Command:
    """What is about to be run, for whoever is asked. `line` is fit to show."""

    line: str
    confined: bool
    network: bool = False


Approve = Callable[[Command], bool]


class Runner:
    """Commands of one task. `changed_by_command` names files that the model's commands changed."""

    def __init__(
        self,
        sandbox: Sandbox,
        overlay: Overlay,
        copies: Replicas,
        approve: Approve,
        *,
        limits: Limits | None = None,
        network: bool = False,
        interrupt: Interrupt | None = None,
        on_output: Callable[[str], None] | None = None,
    ) -> None:
        self.sandbox, self.overlay, self.limits = sandbox, overlay, limits or Limits()
        self._copies, self._approve, self._network = copies, approve, network
        self._interrupt, self.on_output = interrupt, on_output
        self.changed_by_command: set[str] = set()

    def check(self, line: str, overlay: Overlay | None = None, interrupt: Interrupt | None = None) -> Ended:
        """Run a command that the user named, on the task's changes or on `overlay`; several threads may do so
        at once, then with an interrupt of their own. Forbidden where nothing confines it and the user, asked,
        says no; Interrupted."""
        if not self.sandbox.confines and not self._approve(Command(line, False, self._network)):
            raise Forbidden(f"{line!r:.80} was not run: no sandbox holds here and it was not approved")
        with self._copies.lent() as replica:
            quiet = interrupt is not None
            return self._run(replica, ["/bin/sh", "-c", line], overlay or self.overlay, interrupt, quiet)

    def run(self, line: str) -> Ended:
        """Run a command that a model wrote. Forbidden where it is not approved; InputError where it cannot be
        read as words; Interrupted. What it changed becomes part of the task."""
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise InputError(f"the command {line!r:.80} cannot be read: {error}") from None
        if not words:
            raise InputError("the command is empty; name a program")
        if not self._approve(Command(line, self.sandbox.confines, self._network)):
            raise Forbidden(f"{line!r:.80} was not approved; do without it")
        with self._copies.lent() as replica:
            ended = self._run(replica, words, self.overlay)
            self._take_over(replica)
        return ended

    def _run(
        self,
        replica: Replica,
        words: list[str],
        overlay: Overlay,
        interrupt: Interrupt | None = None,
        quiet: bool = False,
    ) -> Ended:
        replica.show(overlay)
        place = replica.place(network=self._network)
        heard = None if quiet else self.on_output
        ended = self.sandbox.run(words, place, self.limits, interrupt or self._interrupt, on_output=heard)
        if ended.ending is Ending.INTERRUPTED:
            raise Interrupted("stopped on request; the command and all it started were ended")
        return ended

    def _take_over(self, replica: Replica) -> None:
        changed = replica.changed()
        removed = [path for path, data in changed.items() if data is None]
        if len(removed) > _REMOVED and not self._approve(
            Command(f"(remove {len(removed)} files, {', '.join(removed[:3])}, …)", self.sandbox.confines)
        ):
            raise Forbidden(
                f"the command removed {len(removed)} files; that was not approved and is not kept"
            )
        for path, data in changed.items():
            try:
                self.overlay.write(path, None if data is None else decode(data, path).text)
            except (InputError, Forbidden):
                continue  # no text, or not to be touched: it stays in the copy
            self.changed_by_command.add(path)


class RunArguments(msgspec.Struct, forbid_unknown_fields=True):
    command: Annotated[
        str, msgspec.Meta(description="program and arguments; no shell reads it", min_length=1)
    ]


class Run(Tool):
    name = "run"
    description = "Run a command in the workspace, for example the tests, and see what it prints."
    arguments = RunArguments

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def about(self, arguments: RunArguments) -> str:
        return f"run {arguments.command:.100}"

    def call(self, arguments: RunArguments) -> Result:
        ended = self._runner.run(arguments.command)
        return Result(told(ended, self._runner.limits), failed=not ended.ok)


def told(ended: Ended, limits: Limits) -> str:
    """What a command printed and how it ended, as a model is told."""
    text = ended.output if not ended.output or ended.output.endswith("\n") else f"{ended.output}\n"
    return f"{text}The command {ended.sentence(limits)}."
