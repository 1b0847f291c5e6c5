"""Review of what changed: by the checks, the audit, the project's linter and a model, each with its fix."""

from keystroke.assist.review.changes import Changed, changed_files
from keystroke.assist.review.finding import Finding
from keystroke.assist.review.review import fixed_texts, ranked, review

__all__ = ["Changed", "Finding", "changed_files", "fixed_texts", "ranked", "review"]
