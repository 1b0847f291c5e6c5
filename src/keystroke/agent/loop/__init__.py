"""The agent loop: a task from an instruction to one edit that `undo` reverts."""

from keystroke.agent.loop.approvals import ApprovalDecision, ApprovalLevel, ApprovalRequest, Approvals
from keystroke.agent.loop.events import EndedEvent, EndStatus, Event
from keystroke.agent.loop.record import TaskRecord, TaskStore
from keystroke.agent.loop.state import (
    TaskControl,
    TaskFiles,
    TaskIdentity,
    TaskModels,
    TaskOptions,
    TaskPermissions,
)
from keystroke.agent.loop.task import AgentTask, describe_receipts

__all__ = [
    "AgentTask",
    "ApprovalDecision",
    "ApprovalLevel",
    "ApprovalRequest",
    "Approvals",
    "EndStatus",
    "EndedEvent",
    "Event",
    "TaskControl",
    "TaskFiles",
    "TaskIdentity",
    "TaskModels",
    "TaskOptions",
    "TaskPermissions",
    "TaskRecord",
    "TaskStore",
    "describe_receipts",
]
