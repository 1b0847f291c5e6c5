"""The status of the server and its models, and the progress of a load."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from keystroke.errors import KeystrokeError
from keystroke.gateway.work.registry import ModelRegistry, ServedModel
from keystroke.gateway.work.service import Service
from keystroke.protocol.codec import encode_line
from keystroke.protocol.faults import error_detail
from keystroke.protocol.status import GatewayStatus, LoadStep, ModelStatus

_INTERVAL = 0.2  # seconds between two progress lines


def server_status(service: Service, version: str) -> GatewayStatus:
    registry = service.registry
    models = [model_status(entry) for entry in registry.entries.values()]
    models += [
        ModelStatus(name=name, role=registry.role_of(name), state="loading")
        for name in sorted(registry.loads)
    ]
    models += [
        ModelStatus(
            name=offer.name, role=offer.role, state="offered", chat=offer.converses, context=offer.context
        )
        for offer in registry.offers.values()
        if offer.name not in registry.entries and offer.name not in registry.loads
    ]
    (sockets,) = service.metrics.connections.collect()
    open_sockets = int(sum(sample.value for sample in sockets.samples))
    return GatewayStatus(version=version, pid=os.getpid(), models=models, sockets=open_sockets)


def model_status(entry: ServedModel) -> ModelStatus:
    model, queue = entry.model, entry.scheduler
    if model is None:
        return ModelStatus(
            name=entry.name, role=entry.role, state="remote", running=queue.running, waiting=queue.waiting
        )
    info = model.engine.info
    return ModelStatus(
        name=entry.name,
        role=entry.role,
        state="loaded",
        chat=model.chat is not None,
        fill_in=model.fim.order if model.fim is not None else None,
        engine=type(model.engine).__name__,
        architecture=info.architecture,
        precision=info.precision,
        parameters=info.parameters,
        weight_bytes=info.weight_bytes,
        cached_bytes=model.engine.stats().cached_bytes,
        context=info.context_length,
        path=str(model.path) if model.path is not None else None,
        languages=sorted(model.languages) if model.languages is not None else None,
        running=queue.running,
        waiting=queue.waiting,
        parallel=max(1, min(model.engine.free_batch, queue.concurrent)),
        joint=max(1, min(model.engine.max_batch, queue.concurrent)),
    )


async def load_lines(service: Service, name: str) -> AsyncIterator[bytes]:
    """The progress of loading a model that `resolve` returned, as lines of JSON; one line if it is loaded."""
    ready = asyncio.ensure_future(service.ensure_loaded(name))
    try:
        await asyncio.wait({ready}, timeout=0.02)
        while not ready.done():
            yield encode_line(_step(service.registry, name))
            await asyncio.wait({ready}, timeout=_INTERVAL)
        try:
            yield encode_line(LoadStep(state="ready", model=model_status(ready.result())))
        except KeystrokeError as error:
            yield encode_line(LoadStep(state="failed", error=error_detail(error), status=error.status))
    finally:
        ready.cancel()  # the load itself continues


def _step(registry: ModelRegistry, name: str) -> LoadStep:
    load = registry.loads.get(name)
    if load is None:
        return LoadStep(state="loading", what=f"loading {name}")
    return LoadStep(state="loading", what=load.what, done=load.done, total=load.total)
