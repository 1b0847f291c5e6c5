"""Minimal, precise edits to files: asked of a model, taken from a patch, and taken back."""

from keystroke.assist.edit.journal import Journal, JournalEntry
from keystroke.assist.edit.ladder import edit_steps
from keystroke.assist.edit.operations import Failure, Reason
from keystroke.assist.edit.plan import EditPlan, FileChange, plan_edit, plan_patch
from keystroke.assist.edit.propose import propose_edit
from keystroke.assist.edit.question import Question
from keystroke.assist.edit.rewrite import Region
from keystroke.assist.edit.task import EditTask, Proposal
from keystroke.assist.edit.workspace import Workspace
from keystroke.assist.edit.writer import ModelWriter, RemoteWriter, Writer

__all__ = [
    "EditPlan",
    "EditTask",
    "Failure",
    "FileChange",
    "Journal",
    "JournalEntry",
    "ModelWriter",
    "Proposal",
    "Question",
    "Reason",
    "Region",
    "RemoteWriter",
    "Workspace",
    "Writer",
    "edit_steps",
    "plan_edit",
    "plan_patch",
    "propose_edit",
]
