"""The engine and gateway replicas as Ray Serve deployments.

Adapts Ray's calls (construction, health checks, shutdown) to an engine replica and a gateway, and Ray's
exceptions to `ReplicaLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle
from starlette.types import Scope

from keystroke.config import NamedModel, Settings
from keystroke.errors import EngineError, Restarting, Unavailable
from keystroke.gateway.app import Gateway, GatewayServer, listen, tune_interpreter, uvicorn_config
from keystroke.gateway.record.shared_limits import SharedLimits
from keystroke.gateway.record.store import open_store
from keystroke.gateway.record.turns import TurnJournal
from keystroke.gateway.work.registry import ModelRegistry, ServedModel, remote_entry
from keystroke.scale.autoscaling import TOKENS
from keystroke.scale.call import ModelDescription, ReplicaCall, ReplicaReply, Splice
from keystroke.scale.engine_replica import EngineReplica
from keystroke.scale.engine_stub import stub_entry
from keystroke.scale.loopback import bind_replica, on_loopback
from keystroke.scale.ray_metrics import RayMetrics, ReplicaMetrics
from keystroke.scale.replica_queue import ReplicaLost, ReplicaQueue
from keystroke.scale.served_models import initial_replicas
from keystroke.scale.tracing import span, start_tracing, stop_tracing

log = logging.getLogger("keystroke.scale")

_SAMPLE = 5.0  # seconds between two readings of the gauges
_HEARTBEAT, _MISSED = 0.5, 2  # seconds between two calls at the head, and how many may fail
HEAD_LOST = "The server lost its cluster head and starts again; resume the response by its id in a moment."


class EngineDeployment(EngineReplica):
    """`load` is pickled to the replica and loads the model there."""

    def __init__(self, load: Callable[[], ServedModel], traces: str | None) -> None:
        bind_replica()
        name = serve.get_replica_context().replica_id.unique_id
        super().__init__(load, name, traces)
        threading.Thread(target=self._sample, args=(name,), name="metrics", daemon=True).start()

    def _sample(self, name: str) -> None:
        metrics = ReplicaMetrics(name, self.model_name)
        while True:
            with contextlib.suppress(RuntimeError):  # the engine's thread changed a set meanwhile
                metrics.sample(*self.engine_state(), self.tokens_in_flight)
            time.sleep(_SAMPLE)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {TOKENS: float(self.tokens_in_flight)}

    async def __del__(self) -> None:
        await self.close()


class RayPool:
    """The engine replicas of one model, called through Serve's handle and `PrefixRouter`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._generate = handle.options(stream=True, method_name="generate")
        self._splice = handle.options(method_name="splice")
        self._describe = handle.options(method_name="describe")

    async def generate(self, call: ReplicaCall) -> AsyncGenerator[ReplicaReply, None]:
        replies: Any = self._generate.remote(call)
        try:
            async for reply in replies:
                yield reply
        except RayTaskError as error:  # the replica runs and its code failed: another would fail too
            log.exception("a replica failed on a call")
            raise EngineError("The engine failed on this request; the server's log says how.") from error
        except Exception as error:
            raise ReplicaLost(type(error).__name__) from error
        finally:
            with contextlib.suppress(Exception):
                replies.cancel()

    async def splice(self, splice: Splice) -> bool:
        return bool(await self._splice.remote(splice))

    async def describe(self) -> ModelDescription:
        side = await self._describe.remote()
        assert isinstance(side, ModelDescription)
        return side


class GatewayDeployment:
    """A gateway that listens itself, beside others at the same address, and uses pools of engines.

    Connections do not go through Serve's proxy, which would put two more processes between a token and its
    reader. Serve still places, monitors, replaces and stops the replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, tables: Mapping[str, NamedModel], **pools: DeploymentHandle[Any]
    ) -> None:
        bind_replica()
        tune_interpreter()
        name = serve.get_replica_context().replica_id.unique_id
        start_tracing(settings.scale.traces, "gateway")
        store = await asyncio.to_thread(open_store, settings)
        entries = []
        for at, (model, table) in enumerate(tables.items()):
            if table.engine == "remote":
                entries.append(remote_entry(model, table, settings))
                continue
            pool = RayPool(pools[f"pool{at}"])
            side, replicas = await pool.describe(), initial_replicas(table, settings)
            queue = ReplicaQueue(
                pool,
                model,
                waiting_at_most=settings.server.max_queue * replicas,
                patience=settings.scale.patience_s,
                concurrent=side.slots * replicas,
            )
            entries.append(stub_entry(side, queue, table))
        shared = await asyncio.to_thread(SharedLimits, store.engine)
        self._gateway = Gateway(ModelRegistry(entries), settings, store=store, shared=shared)
        self._gateway.service.metrics = RayMetrics(name)
        self._journal = await asyncio.to_thread(TurnJournal, store.engine)
        self._gateway.endpoints.responses.journal = self._journal
        self._gateway.request_context = _trace_request
        self._server = GatewayServer(uvicorn_config(self._gateway))
        self._server.gateway, self._server.replaced = self._gateway, True
        listening = listen(settings.server, shared=True)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        self._sampling = asyncio.create_task(self._sample())
        if on_loopback():  # on a cluster Ray restarts a lost head, and replicas go on meanwhile
            self._watching = asyncio.create_task(self._watch_head())
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise Unavailable("The gateway ended before it listened; its log says why.")
            await asyncio.sleep(0.02)

    def check_health(self) -> None:
        if self._serving.done():
            raise Unavailable("The gateway no longer listens.")

    async def drain_and_close(self) -> bool:
        """Hand clients over, drain and close."""
        self._sampling.cancel()
        self._server.should_exit = True
        await asyncio.wait({self._serving})
        await asyncio.to_thread(self._journal.close)
        return True

    async def __del__(self) -> None:
        if hasattr(self, "_serving"):
            await self.drain_and_close()
        stop_tracing()

    async def _watch_head(self) -> None:
        """End with the head of a local Ray: nobody would replace a replica without it."""
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        missed = 0
        while missed < _MISSED:
            await asyncio.sleep(_HEARTBEAT)
            try:
                async with asyncio.timeout(5.0):
                    _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                missed = 0
            except OSError:  # TimeoutError too
                missed += 1
        log.error("the head of the local Ray is gone")
        try:
            await self._gateway.abandon(Restarting(HEAD_LOST))
            await asyncio.to_thread(self._journal.flush)
        finally:
            os._exit(1)

    async def _sample(self) -> None:
        metrics = self._gateway.service.metrics
        assert isinstance(metrics, RayMetrics)
        while True:
            await asyncio.sleep(_SAMPLE)
            for entry in self._gateway.service.registry.entries.values():
                queue = entry.scheduler
                metrics.sample(entry.name, queue.waiting, queue.running, None)
                if isinstance(queue, ReplicaQueue):
                    metrics.sample_age(entry.name, queue.oldest_waiting)


@contextmanager
def _trace_request(scope: Scope) -> Iterator[None]:
    """A span for every request and socket, under the client's own if it sent one."""
    if scope["type"] == "lifespan" or scope["path"] in ("/health", "/metrics"):
        yield
        return
    sent = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"] if k in _CARRIED}
    with span("gateway", sent, {"path": scope["path"], "kind": scope["type"]}):
        yield


_CARRIED = (b"traceparent", b"tracestate")
