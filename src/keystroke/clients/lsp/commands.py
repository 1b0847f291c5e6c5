"""The names of the language server's commands, and the kinds of its code actions."""

from __future__ import annotations

EDIT, REFACTOR, SUPPRESS = "keystroke.edit", "keystroke.refactor", "keystroke.suppress"
ACCEPTED, RECONNECT, STATUS = "keystroke.accepted", "keystroke.reconnect", "keystroke.status"
TASK, TASK_ACT, TASKS, TASK_DIFF = (
    "keystroke.task",
    "keystroke.taskAct",
    "keystroke.tasks",
    "keystroke.taskDiff",
)
COMMANDS = (EDIT, REFACTOR, SUPPRESS, ACCEPTED, RECONNECT, STATUS, TASK, TASK_ACT, TASKS, TASK_DIFF)
ACTION_KINDS = (
    "quickfix",
    "refactor.extract",
    "refactor.inline",
    "refactor.rewrite",
    "source.organizeImports",
)
