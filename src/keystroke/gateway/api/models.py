"""`GET /v1/models`: one body that the OpenAI SDK and Codex both read.

`data` is OpenAI's list; `models` is the metadata that Codex needs to offer its editing tools. Both list the
same models in the same order: the choices (auto, fast, deep, chat), then the names.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from keystroke.gateway.api.answer_form import SMALL_MODEL
from keystroke.gateway.work.registry import AUTO, ROLES, ModelRegistry

_INSTRUCTIONS = (
    "You are a coding agent working in the user's workspace. Make small, precise edits with apply_patch, "
    "run commands only when they are needed, and say briefly what you did."
)
_SMALL_INSTRUCTIONS = (  # for models with short tool declarations: see assist/tool_calls
    "You are a coding agent working in the user's workspace. To change a file, first read it with cat, then "
    "replace its lines. Do only what the user asks. When it is done, say so in one sentence."
)
_DESCRIPTIONS = {
    AUTO: "Chooses fast or deep for each request and says why",
    "fast": "Answers at the speed of typing",
    "deep": "Takes over when a task needs more thought",
    "chat": "Converses",
}


def model_catalog(registry: ModelRegistry) -> dict[str, Any]:
    contexts = {offer.name: offer.context for offer in registry.offers.values()}
    listed = {c.name: _Entry(c.role, contexts.get(c.name)) for c in registry.router.candidates}
    listed |= {e.name: _Entry(e.role, e.context_length, e.parameters) for e in registry.entries.values()}
    names: dict[str, _Entry] = {AUTO: next(iter(listed.values()))}
    for role in ROLES:
        first = next((c.name for c in registry.router.candidates if c.role == role), None)
        if first is not None:
            names[role] = listed[first]
    names.update(listed)
    return {
        "object": "list",
        "data": [_openai(name, model) for name, model in names.items()],
        "has_more": False,
        "first_id": next(iter(names)),
        "last_id": next(reversed(names)),
        "models": [_codex(name, model, place) for place, (name, model) in enumerate(names.items())],
    }


def models_etag(registry: ModelRegistry) -> str:
    """Changes when the list of models does."""
    return hashlib.sha256(msgspec.json.encode(model_catalog(registry))).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Entry:
    role: str
    context_length: int | None
    parameters: int = 0  # 0: unknown until it is loaded


def _openai(name: str, model: _Entry) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "keystroke",
        "role": model.role,
        "context_length": model.context_length,
    }


def _codex(name: str, entry: _Entry, place: int) -> dict[str, Any]:
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
        "base_instructions": _SMALL_INSTRUCTIONS if 0 < entry.parameters < SMALL_MODEL else _INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, window // 4)},
        "supports_parallel_tool_calls": True,
        "context_window": window,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
