"""The turn loop: a task from an instruction to one edit that can be taken back."""

from keystroke.agent.loop.approvals import Answer, Approvals, Approve, Question
from keystroke.agent.loop.events import Ended, Event, Status
from keystroke.agent.loop.record import Records, TaskRecord
from keystroke.agent.loop.task import AgentTask, sums
from keystroke.agent.loop.working import TaskOptions

__all__ = [
    "AgentTask",
    "Answer",
    "Approvals",
    "Approve",
    "Ended",
    "Event",
    "Question",
    "Records",
    "Status",
    "TaskOptions",
    "TaskRecord",
    "sums",
]
