"""The project's own rules: what its files say about how code in it is written.

project_rules(path) -> ProjectRules      for one file of a project
rules.prompt_header()                           a short, stable text for prompts to models that follow instructions
rules.format_insertion(inserted, line)                inserted text in the project's indentation, quotes and line ends
"""

from __future__ import annotations

from keystroke.analysis.rules.project import ProjectRules, project_rules

__all__ = ["ProjectRules", "project_rules"]
