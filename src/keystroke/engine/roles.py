"""Chooses the model for each role: fast (completion while typing), deep (instructions) and chat.

The settings come first, then the installed models. Loads and downloads nothing.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from keystroke.config import NamedModel, Settings
from keystroke.engine import builtin
from keystroke.engine.library import EMBEDDED, InstalledModel, ModelLibrary
from keystroke.engine.locate import resolve, shipped_model
from keystroke.errors import KeystrokeError, NotFound


class Role(StrEnum):
    FAST = "fast"
    DEEP = "deep"
    CHAT = "chat"


def model_for(role: Role, settings: Settings) -> str | None:
    """The name of the model for a role; None if no model on this machine suits it."""
    if role is Role.FAST:
        return settings.model.default
    wanted = settings.model.deep if role is Role.DEEP else settings.model.chat
    if wanted is not None:
        return wanted
    for name, table in settings.models.items():
        if table.role == role:
            return name
    if role is Role.CHAT and settings.model.deep is not None:
        return settings.model.deep
    if can_chat(settings.model.default, settings):
        return settings.model.default
    if role is Role.CHAT and (deep := model_for(Role.DEEP, settings)) is not None:
        return deep
    return next(iter(instruction_models(settings)), None)


def require_model(role: Role, settings: Settings) -> str:
    """The model for a role. Raises NotFound, saying how to install one."""
    found = model_for(role, settings)
    if found is None:
        raise NotFound(
            f"no model on this machine follows instructions; {chat_model_advice(settings)}", param="model"
        )
    return found


def instruction_models(settings: Settings) -> list[str]:
    """The installed models that follow instructions, the best first: the built-in one, then the latest added.
    SmolLM2 has a chat template but is too weak to be chosen automatically."""
    library = ModelLibrary(settings.paths.models)
    found = [
        entry
        for entry in library.entries()
        if isinstance(entry, InstalledModel)
        and entry.name != builtin.SMOLLM2.name
        and _entry_converses(library, entry)
    ]
    found.sort(key=lambda entry: entry.added, reverse=True)
    found.sort(key=lambda entry: entry.name != builtin.CODER.name)
    return [entry.name for entry in found]


def chat_model_advice(settings: Settings) -> str:
    """How to get a model that follows instructions, for error messages."""
    if here := instruction_models(settings):
        return f"name one with --model ({', '.join(here[:4])}), or for good: `keystroke models use {here[0]}`"
    coder = builtin.CODER
    return (
        f"`keystroke models add {coder.name}` installs one ({coder.size / 1e9:.1f} GB), `keystroke setup` "
        "the best for this machine; or name a server's with --model URL#NAME or a [models.NAME] table"
    )


def can_chat(name: str, settings: Settings) -> bool:
    """Whether the model `name` has a chat template; remote models are assumed to."""
    table = settings.models.get(name)
    if is_remote(table) or (settings.engine.kind == "remote" and name == settings.model.default):
        return True
    try:
        if name == EMBEDDED:
            own = shipped_model()
            return own is not None and _has_chat_template(own)
        if table is None and name in builtin.BUILT_IN:
            return True
        library = ModelLibrary(settings.paths.models)
        if table is None and name in library.names():
            return _entry_converses(library, library.get(name))
        return _has_chat_template(resolve(name, settings))
    except KeystrokeError:
        return False


def is_remote(table: NamedModel | None) -> bool:
    return table is not None and (table.engine == "remote" or table.base_url is not None)


def _entry_converses(library: ModelLibrary, entry: InstalledModel) -> bool:
    if entry.traits is not None:
        return entry.traits.chat
    try:
        return _has_chat_template(library.path(entry))
    except KeystrokeError:
        return False


def _has_chat_template(path: Path) -> bool:
    from keystroke.engine.templates import detect_chat

    return detect_chat(path) is not None
