"""Who may do what without being asked.

What needs a yes follows from the user's own options and from whether a sandbox holds, from nothing else:
no text of a model, a file or a command's output is looked at here. Where there is nobody to ask, what needs a
yes is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from keystroke.agent.tools import Command
from keystroke.assist.edit import EditPlan


@dataclass(frozen=True, slots=True)
class Question:
    """What the user is asked: about a command, or about the change that a task would make."""

    text: str
    command: str = ""
    plan: EditPlan | None = None
    diff: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """`hunks`: of a change, only these; None: all of it."""

    yes: bool
    hunks: frozenset[int] | None = None


NO = Answer(False)
Ask = Callable[[Question], Answer]


class Approve(StrEnum):
    """What the user is asked before."""

    NEVER = "never"  # nothing that the sandbox confines
    COMMANDS = "commands"
    ALL = "all"  # changes of files too


class Approvals:
    def __init__(self, level: Approve, ask: Ask | None) -> None:
        """`ask` puts a question to the user; None where there is nobody."""
        self._level, self._ask = level, ask

    def command(self, command: Command) -> bool:
        """Whether a command may run. Unconfined ones are asked for each time, whatever the level."""
        if command.confined and self._level is Approve.NEVER:
            return True
        where = "in the sandbox" if command.confined else "WITHOUT a sandbox"
        network = ", with network access" if command.network else ""
        return self._asked(Question(f"Run `{command.line}` {where}{network}?", command.line)).yes

    def change(self, plan: EditPlan) -> Answer:
        """Whether a change of the workspace may land, and which of its hunks. One of files that run by
        themselves is asked for each time, whatever the level: later nobody would be asked again."""
        if self._level is not Approve.ALL and not plan.self_running():
            return Answer(True)
        text = f"Make this change ({', '.join(plan.summary())})?"
        return self._asked(Question(text, plan=plan, diff=plan.diff()))

    def _asked(self, question: Question) -> Answer:
        return self._ask(question) if self._ask is not None else NO
