"""The router inside Ray's own selection: which replica a call reaches when replicas are slow to answer."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass

import pytest

pytest.importorskip("ray", reason="the [scale] extra is not installed")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from keystroke.engine.generation import GenerationParams
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.scale.call import ReplicaCall
from keystroke.scale.ring import Ring
from keystroke.scale.router import PrefixRouter

DEPLOYMENT = DeploymentID("engine", "keystroke")


@dataclass
class Replica:
    """As much of a running replica as choosing one asks for."""

    replica_id: ReplicaID
    pause: float = 0.0  # seconds before it says how much it has to do
    max_ongoing_requests: int = 8
    node_id: str = "here"
    availability_zone: str | None = None
    multiplexed_model_ids: frozenset[str] = frozenset()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await asyncio.sleep(self.pause)
        return 0

    def update_replica_info(self, _: object) -> None:
        pass


def call(affinity: str) -> ReplicaCall:
    return ReplicaCall(
        "1", "local", affinity, array("i", [1]), GenerationParams(), Priority.CHAT, Tier.DEFAULT
    )


async def chosen(replicas: list[Replica], affinity: str) -> str:
    router = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    router.initialize_state()
    router.update_replicas(replicas)
    pending = PendingRequest(args=[call(affinity)], kwargs={}, metadata=RequestMetadata("1", "1"))
    return str((await router._choose_replica_for_request(pending)).replica_id.unique_id)


@pytest.mark.parametrize("pause", [0.0, 0.3])
async def test_a_call_waits_for_the_replica_that_holds_its_prefix(pause: float) -> None:
    names = [f"r{i}" for i in range(4)]
    home = next(Ring(names).order("key/conversation"))
    replicas = [Replica(ReplicaID(name, DEPLOYMENT), pause if name == home else 0.0) for name in names]
    async with asyncio.timeout(60):
        assert await chosen(replicas, "key/conversation") == home


async def test_a_replica_that_does_not_answer_is_passed_over() -> None:
    names = [f"r{i}" for i in range(4)]
    home, second, *_ = Ring(names).order("key/conversation")
    replicas = [Replica(ReplicaID(name, DEPLOYMENT), 600 if name == home else 0.0) for name in names]
    async with asyncio.timeout(60):
        assert await chosen(replicas, "key/conversation") == second
