"""Project rules: how a repository wants its code written, read from its configuration files."""

from keystroke.analysis.rules.project import ProjectRules, project_rules

__all__ = ["ProjectRules", "project_rules"]
