"""The check as a function of plain values, to be run in a process of its own with a time limit.

Projects are cached for some seconds, because their folders rarely change.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from keystroke.analysis.check.check import check
from keystroke.analysis.check.diagnostic import Diagnostic
from keystroke.analysis.check.modules import Project
from keystroke.errors import KeystrokeError

_PROJECT_AGE = 10.0  # seconds for which a project's folders are taken to be the same
_PROJECTS = 8
_projects: dict[str | None, tuple[float, Project]] = {}


def check_in_worker(text: str, path: str, root: str | None) -> tuple[str, Any]:
    """("found", diagnostics) or ("refused", the message of the error)."""
    try:
        found = check(text, path, project=_cached_project(root))
    except KeystrokeError as error:
        return "refused", error.message
    return "found", msgspec.to_builtins(found)


def diagnostics_from_plain(plain: Any) -> tuple[Diagnostic, ...]:
    """The diagnostics that `check_in_worker` returned."""
    return msgspec.convert(plain, tuple[Diagnostic, ...])


def _cached_project(root: str | None) -> Project:
    created, project = _projects.get(root, (0.0, None))
    now = time.monotonic()
    if project is None or now - created > _PROJECT_AGE:
        if len(_projects) >= _PROJECTS:
            _projects.clear()
        project = Project(None if root is None else Path(root))
        _projects[root] = (now, project)
    return project
