"""Refactoring of Python code. Every refactoring returns edits and works on unsaved buffers."""

from keystroke.analysis.refactor.refactoring import Refactoring, RefactoringPlan

__all__ = ["Refactoring", "RefactoringPlan"]
