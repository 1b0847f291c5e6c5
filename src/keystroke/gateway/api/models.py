"""`GET /v1/models`: one body that the OpenAI SDK and Codex both read.

Law: `data` is OpenAI's list; `models` is the metadata Codex wants before it offers its editing tools. Both
say the same models in the same order: the choices first (auto, fast, deep), then the names.
"""

from __future__ import annotations

from typing import Any

from keystroke.gateway.work.registry import AUTO, ROLES, Registry, ServedModel

_INSTRUCTIONS = (
    "You are a coding agent working in the user's workspace. Make small, precise edits with apply_patch, "
    "run commands only when they are needed, and say briefly what you did."
)
_DESCRIPTIONS = {
    AUTO: "Chooses fast or deep for each request and says why",
    "fast": "Answers at the speed of typing",
    "deep": "Takes over when a task needs more thought",
}


def catalog(registry: Registry) -> dict[str, Any]:
    names: dict[str, ServedModel] = {AUTO: next(iter(registry.entries.values()))}
    for role in ROLES:
        first = next((e for e in registry.entries.values() if e.role == role), None)
        if first is not None:
            names[role] = first
    names.update(registry.entries)
    return {
        "object": "list",
        "data": [_listed(name, entry) for name, entry in names.items()],
        "models": [_codex(name, entry, place) for place, (name, entry) in enumerate(names.items())],
    }


def _listed(name: str, entry: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "keystroke",
        "role": entry.role,
        "context_length": entry.context_length,
    }


def _codex(name: str, entry: ServedModel, place: int) -> dict[str, Any]:
    window = entry.context_length or 128_000
    return {
        "slug": name,
        "display_name": name,
        "description": _DESCRIPTIONS.get(name, f"{entry.role} model"),
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": place,
        "availability_nux": None,
        "upgrade": None,
        "base_instructions": _INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": window,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
