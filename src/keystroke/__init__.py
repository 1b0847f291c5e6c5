"""Keystroke: a real-time coding system anyone can run.

The names in `__all__` are the public Python API (docs/api.md); everything else may change in any release.
Names are imported on first use, so that `import keystroke` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keystroke.analysis.audit import Auditor, Finding, LiveAudit
    from keystroke.analysis.check import Diagnostic, Fix, Project, check, fixes_for
    from keystroke.analysis.refactor import Refactoring
    from keystroke.assist.completion import Completion, complete
    from keystroke.assist.edit import (
        EditPlan,
        Journal,
        ModelWriter,
        Region,
        RemoteWriter,
        Workspace,
        plan_edit,
        plan_patch,
    )
    from keystroke.clients.connection import Client
    from keystroke.clients.live_connection import LiveClient
    from keystroke.config import Settings, load_settings
    from keystroke.engine.generation import Chunk, Generation, GenerationParams
    from keystroke.engine.load import load_model
    from keystroke.engine.model import Model
    from keystroke.engine.remote import BlockingModel, Endpoint, RemoteModel, Usage
    from keystroke.engine.speculative import drafter_for
    from keystroke.errors import KeystrokeError
    from keystroke.protocol.live_messages import NotShown, Suggestion
    from keystroke.text import Document, Edit, apply_edits, minimal_diff, unified_diff

    __version__: str

_HOMES = {
    "analysis.audit": ("Auditor", "Finding", "LiveAudit"),
    "analysis.check": ("Diagnostic", "Fix", "Project", "check", "fixes_for"),
    "analysis.refactor": ("Refactoring",),
    "assist.completion": ("Completion", "complete"),
    "assist.edit": (
        "EditPlan", "Journal", "ModelWriter", "Region", "RemoteWriter", "Workspace",
        "plan_edit", "plan_patch",
    ),
    "clients.connection": ("Client",),
    "clients.live_connection": ("LiveClient",),
    "config": ("Settings", "load_settings"),
    "engine.generation": ("Chunk", "Generation", "GenerationParams"),
    "engine.load": ("load_model",),
    "engine.model": ("Model",),
    "engine.remote": ("BlockingModel", "Endpoint", "RemoteModel", "Usage"),
    "engine.speculative": ("drafter_for",),
    "errors": ("KeystrokeError",),
    "protocol.live_messages": ("NotShown", "Suggestion"),
    "text": ("Document", "Edit", "apply_edits", "minimal_diff", "unified_diff"),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Auditor", "BlockingModel", "Chunk", "Client", "Completion", "Diagnostic", "Document", "Edit",
    "EditPlan", "Endpoint", "Finding", "Fix", "Generation", "GenerationParams", "Journal",
    "KeystrokeError", "LiveAudit", "LiveClient", "Model", "ModelWriter", "NotShown", "Project",
    "Refactoring", "Region", "RemoteModel", "RemoteWriter", "Settings", "Suggestion", "Usage",
    "Workspace", "__version__", "apply_edits", "check", "complete", "drafter_for", "fixes_for",
    "load_model", "load_settings", "minimal_diff", "plan_edit", "plan_patch", "unified_diff",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        found: Any = import_module("keystroke.clients.cli.installed_version").release()
    elif name in _HOME:
        found = getattr(import_module(f"keystroke.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
