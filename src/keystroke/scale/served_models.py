"""The models that a scaled application serves, from the settings and what is installed; loads nothing."""

from __future__ import annotations

from keystroke.config import NamedModel, Settings
from keystroke.engine.roles import Role, model_for


def served_models(settings: Settings) -> dict[str, NamedModel]:
    """The configured models, the default one where none is fast, and the deep and chat models where they are
    named. A model that is only installed gets no replica."""
    tables = dict(settings.models)
    if settings.model.default not in tables and not any(t.role == "fast" for t in tables.values()):
        tables = {settings.model.default: NamedModel(), **tables}
    for role in (Role.DEEP, Role.CHAT):
        name = model_for(role, settings) if getattr(settings.model, role) else None
        if name is not None and name not in tables:
            tables[name] = NamedModel(role=role)
    return tables


def initial_replicas(table: NamedModel, settings: Settings) -> int:
    """The number of engine replicas a model starts with."""
    return table.replicas or settings.scale.replicas
