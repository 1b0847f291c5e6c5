"""The two kinds of replica, as Ray Serve runs them.

Glue. What Ray calls (construction, health, the end) becomes what an engine replica and a gateway have
anyway; what Ray raises becomes `Lost`. No decision is made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.types import Scope

from keystroke.config import NamedModel, Settings
from keystroke.errors import EngineError, Unavailable
from keystroke.gateway.app import Gateway, GatewayServer, listen, tune_interpreter, uvicorn_config
from keystroke.gateway.record.shared_limits import SharedLimits
from keystroke.gateway.record.store import open_store
from keystroke.gateway.work.registry import Registry, ServedModel, remote_entry
from keystroke.scale.call import Call, Reply, Splice, TextSide
from keystroke.scale.distant import distant_entry
from keystroke.scale.engine_replica import EngineReplica
from keystroke.scale.loopback import bind_replica
from keystroke.scale.ray_metrics import RayMetrics
from keystroke.scale.replica_queue import Lost, ReplicaQueue
from keystroke.scale.tables import replicas_of
from keystroke.scale.tracing import span, start_tracing, stop_tracing

log = logging.getLogger("keystroke.scale")

_SAMPLE = 5.0  # seconds between two readings of the gauges


class EngineDeployment(EngineReplica):
    """`load` travels to the replica and makes the model there."""

    def __init__(self, load: Callable[[], ServedModel], traces: str | None) -> None:
        bind_replica()
        super().__init__(load, serve.get_replica_context().replica_id.unique_id, traces)

    def check_health(self) -> None:
        self.check()

    async def __del__(self) -> None:
        await self.close()


class RayPool:
    """The engine replicas of one model, through Serve's handle and so through our router."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(stream=True, method_name="generate")
        self._splice = handle.options(method_name="splice")
        self._describe = handle.options(method_name="describe")

    async def generate(self, call: Call) -> AsyncGenerator[Reply, None]:
        replies: Any = self._generate.remote(call)
        try:
            async for reply in replies:
                yield reply
        except RayTaskError as error:  # the replica lives and its code failed: another would fail too
            log.exception("a replica failed on a call")
            raise EngineError("The engine failed on this request; the server's log says how.") from error
        except Exception as error:
            raise Lost(type(error).__name__) from error
        finally:
            with contextlib.suppress(Exception):
                replies.cancel()

    async def splice(self, wanted: Splice) -> bool:
        return bool(await self._splice.remote(wanted))

    async def describe(self) -> TextSide:
        side = await self._describe.remote()
        assert isinstance(side, TextSide)
        return side


class GatewayDeployment:
    """A gateway that listens by itself, beside others at the same address, and asks pools of engines.

    Sockets do not go through Serve's proxy: that would put two more processes between a token and its
    reader. Serve places, watches, replaces and stops the replica all the same."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, tables: Mapping[str, NamedModel], **pools: DeploymentHandle[Any]
    ) -> None:
        bind_replica()
        tune_interpreter()
        name = serve.get_replica_context().replica_id.unique_id
        start_tracing(settings.scale.traces, "gateway")
        store = await asyncio.to_thread(open_store, settings)
        store.durable = True
        entries = []
        for at, (model, table) in enumerate(tables.items()):
            if table.engine == "remote":
                entries.append(remote_entry(model, table, settings))
                continue
            pool = RayPool(pools[f"pool{at}"])
            side, replicas = await pool.describe(), replicas_of(table, settings)
            queue = ReplicaQueue(
                pool,
                model,
                waiting_at_most=settings.server.max_queue * replicas,
                patience=settings.scale.patience_s,
                concurrent=side.slots * replicas,
            )
            entries.append(distant_entry(side, queue, table))
        shared = await asyncio.to_thread(SharedLimits, store.engine)
        self._gateway = Gateway(Registry(entries), settings, store=store, shared=shared)
        self._gateway.service.metrics = RayMetrics(name)
        self._gateway.visit = _traced
        self._server = GatewayServer(uvicorn_config(self._gateway))
        self._server.gateway, self._server.replaced = self._gateway, True
        listening = listen(settings.server, shared=True)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        self._sampling = asyncio.create_task(self._sample())
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise Unavailable("The gateway ended before it listened; its log says why.")
            await asyncio.sleep(0.02)

    def check_health(self) -> None:
        if self._serving.done():
            raise Unavailable("The gateway no longer listens.")

    async def drained(self) -> bool:
        """Hand clients over, end what runs, and close. True when done."""
        self._sampling.cancel()
        self._server.should_exit = True
        await asyncio.wait({self._serving})
        return True

    async def __del__(self) -> None:
        if hasattr(self, "_serving"):
            await self.drained()
        stop_tracing()

    async def _sample(self) -> None:
        metrics = self._gateway.service.metrics
        while True:
            await asyncio.sleep(_SAMPLE)
            for entry in self._gateway.service.registry.entries.values():
                metrics.sample(entry.name, entry.scheduler.waiting, entry.scheduler.running, None)


@contextmanager
def _traced(scope: Scope) -> Iterator[None]:
    """A span for every request and socket, under the client's own where it sent one."""
    if scope["type"] == "lifespan" or scope["path"] in ("/health", "/metrics"):
        yield
        return
    sent = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"] if k in _CARRIED}
    with span("gateway", sent, {"path": scope["path"], "kind": scope["type"]}):
        yield


_CARRIED = (b"traceparent", b"tracestate")
