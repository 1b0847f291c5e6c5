"""The turn loop: a task from an instruction to one edit that can be taken back."""

from keystroke.agent.loop.approvals import Approvals, Approve
from keystroke.agent.loop.events import Ended, Event, Status
from keystroke.agent.loop.record import Records, TaskRecord
from keystroke.agent.loop.task import AgentTask, sums
from keystroke.agent.loop.working import TaskOptions

__all__ = [
    "AgentTask",
    "Approvals",
    "Approve",
    "Ended",
    "Event",
    "Records",
    "Status",
    "TaskOptions",
    "TaskRecord",
    "sums",
]
