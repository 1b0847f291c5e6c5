"""Which models a scaled application serves.

Reads settings and what is installed; loads nothing and does not know Ray.
"""

from __future__ import annotations

from keystroke.config import NamedModel, Settings
from keystroke.engine.roles import Role, model_for


def tables_of(settings: Settings) -> dict[str, NamedModel]:
    """The models to serve: those configured, the default one where none is fast, and the deep and the
    conversing one where they are named. What is only installed is not given a replica unasked."""
    tables = dict(settings.models)
    if settings.model.default not in tables and not any(t.role == "fast" for t in tables.values()):
        tables = {settings.model.default: NamedModel(), **tables}
    for role in (Role.DEEP, Role.CHAT):
        name = model_for(role, settings) if getattr(settings.model, role) else None
        if name is not None and name not in tables:
            tables[name] = NamedModel(role=role)
    return tables


def replicas_of(table: NamedModel, settings: Settings) -> int:
    """How many engine replicas a model begins with."""
    return table.replicas or settings.scale.replicas
