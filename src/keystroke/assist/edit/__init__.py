"""Minimal, precise edits to files: asked of a model, taken from a patch, and taken back."""

from keystroke.assist.edit.journal import Journal, JournalEntry
from keystroke.assist.edit.operations import EditFailure, EditFailureReason
from keystroke.assist.edit.plan import EditPlan, FileChange, plan_edit, plan_patch
from keystroke.assist.edit.rewrite import Region
from keystroke.assist.edit.steps import edit_steps, propose_edit
from keystroke.assist.edit.task import EditProposal, EditTask, RewriteQuestion
from keystroke.assist.edit.workspace import Workspace
from keystroke.assist.edit.writer import ModelWriter, RemoteWriter, Writer

__all__ = [
    "EditFailure",
    "EditFailureReason",
    "EditPlan",
    "EditProposal",
    "EditTask",
    "FileChange",
    "Journal",
    "JournalEntry",
    "ModelWriter",
    "Region",
    "RemoteWriter",
    "RewriteQuestion",
    "Workspace",
    "Writer",
    "edit_steps",
    "plan_edit",
    "plan_patch",
    "propose_edit",
]
