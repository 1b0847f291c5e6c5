"""Immutable values for text: documents, positions, edits, diffs, and rebasing of edits."""

from keystroke.text.diff import minimal_diff, unified_diff
from keystroke.text.document import Document
from keystroke.text.edit import Edit, apply_edits, invert, shift
from keystroke.text.position import Encoding, Position
from keystroke.text.rebase import Dropped, DropReason, rebase, rebase_all

__all__ = [
    "Document",
    "DropReason",
    "Dropped",
    "Edit",
    "Encoding",
    "Position",
    "apply_edits",
    "invert",
    "minimal_diff",
    "rebase",
    "rebase_all",
    "shift",
    "unified_diff",
]
