"""Which commands and changes need the user's approval.

Only the user's options and the sandbox decide, never text of a model, a file or a command's output. Where
there is nobody to ask, what needs approval is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from keystroke.agent.tools import CommandRequest
from keystroke.assist.edit import EditPlan


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """A question to the user, about a command or about the change of a task."""

    text: str
    command: str = ""
    plan: EditPlan | None = None
    diff: str = ""


@dataclass(frozen=True, slots=True)
class ApprovalDecision:
    """`hunks`: only these hunks of a change; None: all of it."""

    approved: bool
    hunks: frozenset[int] | None = None


AskUser = Callable[[ApprovalRequest], ApprovalDecision]


class ApprovalLevel(StrEnum):
    """What needs approval."""

    NEVER = "never"  # nothing that runs in the sandbox
    COMMANDS = "commands"
    ALL = "all"  # changes of files too


class Approvals:
    def __init__(self, level: ApprovalLevel, ask: AskUser | None) -> None:
        """`ask` asks the user; None where there is nobody to ask."""
        self._level, self._ask = level, ask
        self.seconds = 0.0  # that the user took to answer

    def approve_command(self, command: CommandRequest) -> bool:
        """Whether a command may run. One outside a sandbox always needs approval."""
        if command.confined and self._level is ApprovalLevel.NEVER:
            return True
        where = "in the sandbox" if command.confined else "WITHOUT a sandbox"
        network = ", with network access" if command.network else ""
        return self._decide(ApprovalRequest(f"Run `{command.line}` {where}{network}?", command.line)).approved

    def approve_change(self, plan: EditPlan) -> ApprovalDecision:
        """Whether a change may be applied, and which of its hunks. A change of files that run by
        themselves always needs approval: there is no other question before they run."""
        if self._level is not ApprovalLevel.ALL and not plan.auto_executed():
            return ApprovalDecision(True)
        text = f"Make this change ({plan.sentence()})?"
        return self._decide(ApprovalRequest(text, plan=plan, diff=plan.diff()))

    def _decide(self, question: ApprovalRequest) -> ApprovalDecision:
        if self._ask is None:
            return ApprovalDecision(False)
        started = time.perf_counter()
        try:
            return self._ask(question)
        finally:
            self.seconds += time.perf_counter() - started
