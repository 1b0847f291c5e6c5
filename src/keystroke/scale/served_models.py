"""The models that a scaled application serves, from the settings and what is installed; loads nothing."""

from __future__ import annotations

from keystroke.config import NamedModel, Settings
from keystroke.engine.roles import Role, model_for

NAME = "keystroke"  # of the Serve application
ECHO = "echo"
GATEWAY = "gateway"
GATEWAY_CPU = 0.1  # it mostly waits


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


def model_tables(settings: Settings, echo: bool) -> dict[str, NamedModel]:
    """The tables of the models to serve; with `echo`, only that of the echo model."""
    return {ECHO: settings.models.get(ECHO, NamedModel())} if echo else served_models(settings)


def pool_name(model: str) -> str:
    """The deployment of a model's engine replicas."""
    return f"engine-{model}"


def replica_needs(settings: Settings, *, echo: bool = False) -> dict[str, dict[str, float]]:
    """The resources of one replica of each deployment, by Ray's names."""
    needs = {
        pool_name(name): {"CPU": float(table.cpus), "GPU": float(table.gpus)}
        for name, table in model_tables(settings, echo).items()
        if table.engine != "remote"
    }
    resource = settings.scale.gateway_resource
    return {**needs, GATEWAY: {"CPU": GATEWAY_CPU, **({resource: 1.0} if resource else {})}}
