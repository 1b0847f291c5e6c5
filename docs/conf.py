"""The documentation site: the repository's own Markdown, rendered by Sphinx with MyST (make docs).

Pages are read where they lie, so the links that work in the repository work on the site. Nothing is
fetched while it is built, and a page that nobody links to is an error.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "Keystroke"
author = "the Keystroke authors"
copyright = author  # noqa: A001 Sphinx's own name for it
release = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "log/*.md", "models/*/README.md"]
exclude_patterns = [
    ".*",
    "**/.*",
    "bench",
    "editors",
    "examples",
    "runs",
    "schema",
    "src",
    "tests",
    "web",
    "site",
]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
suppress_warnings = [
    "misc.highlighting_failure",  # code with marks in it, as on the model's card, is no longer code
    "myst.xref_missing",  # links to folders and source files: tests/test_documentation.py checks those
    "myst.xref_missing_file",
]

html_theme = "furo"
html_title = "Keystroke"
html_copy_source = False
html_extra_path = ["site_root"]
html_show_sphinx = False
