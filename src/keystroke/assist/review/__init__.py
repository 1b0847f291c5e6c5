"""Review of what changed: by the checks, the audit, the project's linter and a model, each with its fix."""

from keystroke.assist.review.changes import ChangedFile, changed_files
from keystroke.assist.review.finding import ReviewFinding
from keystroke.assist.review.review import combine_fixes, review, sort_findings

__all__ = ["ChangedFile", "ReviewFinding", "changed_files", "combine_fixes", "review", "sort_findings"]
