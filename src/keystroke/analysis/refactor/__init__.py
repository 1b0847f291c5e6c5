"""Refactoring of Python by its meaning: every change is a preview of edits, also over unsaved buffers."""

from keystroke.analysis.python_files import python_files
from keystroke.analysis.refactor.refactoring import Refactoring, RefactoringPlan

__all__ = ["Refactoring", "RefactoringPlan", "python_files"]
