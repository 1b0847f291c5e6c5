"""The Serve application of a configuration: its deployments, their replicas and resources. Starts nothing.

Every figure comes from the settings or the model's table, so the same file describes a laptop and a cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from keystroke.config import NamedModel, Settings
from keystroke.gateway.work.registry import ServedModel, load_entry, local_entry
from keystroke.scale.deployments import EngineDeployment, GatewayDeployment
from keystroke.scale.rollout import Say, deploy
from keystroke.scale.served_models import (
    ECHO,
    GATEWAY,
    GATEWAY_CPU,
    NAME,
    initial_replicas,
    model_tables,
    pool_name,
    replica_needs,
)

_CALLS = 4096  # concurrent calls of a replica: its own queue orders them, Serve's knows no priorities
RISE = 5.0  # seconds of overload before a replica is added
FALL = 300.0  # seconds of underload before one is removed: its cache took long to fill
_ROOM = 20.0  # seconds between the drain timeout and a replica's shutdown timeout


@dataclasses.dataclass(frozen=True, slots=True)
class EchoLoader:
    """Loads an echo model of fixed speed, for tests."""

    step_cost: float = 0.005
    prefill_cost: float = 0.0
    max_batch: int = 1
    cache_bytes: int = 1 << 24
    max_queue: int = 64

    def __call__(self) -> ServedModel:
        from keystroke.engine.echo_model import echo_model

        model = echo_model(
            self.step_cost,
            prefill_cost=self.prefill_cost,
            max_batch=self.max_batch,
            cache_bytes=self.cache_bytes,
        )
        return local_entry(ECHO, model, max_queue=self.max_queue)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads a configured model in the replica."""

    name: str
    table: NamedModel
    settings: Settings

    def __call__(self) -> ServedModel:
        from keystroke.engine.speculative import measure_verify_cost

        entry = load_entry(self.name, self.table, self.settings)
        assert entry.model is not None  # remote models have no replicas
        measure_verify_cost(entry.model.engine)
        return entry


def application(
    settings: Settings,
    *,
    echo: EchoLoader | None = None,
    loaders: Mapping[str, Callable[[], ServedModel]] = MappingProxyType({}),
    spread: bool = False,
) -> Application:
    """Gateways and a pool of engines for each model. `echo`: one pool of echo models instead of the
    configured ones. `loaders` load the models of these names. `spread`: round-robin routing, for
    comparison."""
    tables = model_tables(settings, echo is not None)
    pools = {}
    for at, (name, table) in enumerate(tables.items()):
        if table.engine == "remote":
            continue
        load = echo or loaders.get(name) or ModelLoader(name, table, settings)
        pools[f"pool{at}"] = _engines(name, table, settings, load, spread)
    gateways = serve.deployment(
        name=GATEWAY,
        num_replicas=settings.scale.gateways,
        ray_actor_options=_gateway_options(settings),
        max_ongoing_requests=_CALLS,
        graceful_shutdown_timeout_s=settings.server.drain_s * 2 + _ROOM,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
    )(GatewayDeployment)
    return gateways.bind(settings, tables, **pools)


def deploy_settings(
    serve: Any, settings: Settings, echo: bool, patience: float | None, say: Say, *, final: bool = False
) -> None:
    """Deploy the application of a configuration. Raises what `deploy` raises."""
    app = application(settings, echo=EchoLoader() if echo else None)
    needs = replica_needs(settings, echo=echo)
    deploy(serve, app, NAME, needs=needs, patience=patience, final=final, say=say)


def _engines(
    name: str,
    table: NamedModel,
    settings: Settings,
    load: Callable[[], ServedModel],
    spread: bool,
) -> Application:
    slots = getattr(load, "max_batch", 0) or table.concurrent or (16 if table.gpus else 1)
    replicas = initial_replicas(table, settings)
    many: dict[str, Any] = {"num_replicas": replicas}
    if table.max_replicas > replicas:
        scaling = AutoscalingConfig(
            min_replicas=replicas,
            max_replicas=table.max_replicas,
            initial_replicas=replicas,
            target_ongoing_requests=slots,
            upscale_delay_s=RISE,
            downscale_delay_s=FALL,
            policy=AutoscalingPolicy(
                policy_function="keystroke.scale.autoscaling:TokenPolicy",
                policy_kwargs={"tokens_per_replica": table.tokens_per_replica},
            ),
        )
        many = {"num_replicas": None, "autoscaling_config": scaling}
    router = RequestRouterConfig(
        request_router_class="keystroke.scale.router:PrefixRouter",
        request_router_kwargs={
            "load_factor": settings.scale.load_factor,
            "slots": slots,
            "spread": spread,
        },
    )
    engines = serve.deployment(
        name=pool_name(name),
        ray_actor_options={"num_cpus": table.cpus, "num_gpus": table.gpus},
        max_ongoing_requests=_CALLS,
        request_router_config=router,
        graceful_shutdown_timeout_s=settings.server.drain_s + _ROOM,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2,
        **many,
    )(EngineDeployment)
    return engines.bind(load, settings.scale.traces)


def _gateway_options(settings: Settings) -> dict[str, Any]:
    resource = settings.scale.gateway_resource
    return {"num_cpus": GATEWAY_CPU, "resources": {resource: 1} if resource else {}}
