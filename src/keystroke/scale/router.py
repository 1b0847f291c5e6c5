"""Chooses the engine replica for a call: the one whose cache holds its prefix, unless it is overloaded.

A Ray Serve request router; it runs in every gateway and keeps only a ring of the live replicas, so all
gateways send equal calls to the same replica. Loads are Ray's own counts.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from keystroke.scale.call import ReplicaCall, Splice
from keystroke.scale.ring import Ring, rank_replicas
from keystroke.scale.tracing import span


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """`load_factor` and `slots` bound the load, see `ring.max_load`; `spread` uses round-robin instead, for
    comparison."""

    # Waiting for the owner's queue length on a busy machine costs less than computing a prefix elsewhere; a
    # dead replica fails at once. (Ray's default is a tenth of a second.)
    queue_len_response_deadline_s = 1.0
    max_queue_len_response_deadline_s = 2.0

    def initialize_state(self, load_factor: float = 1.25, slots: int = 1, spread: bool = False) -> None:
        self._factor, self._slots, self._spread = load_factor, slots, spread
        self._ring = Ring(())
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        request: Any = pending_request.args[0] if pending_request.args else None
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if isinstance(request, Splice):
            target = by_name.get(request.replica)
            return (
                [[target]] if target is not None else [candidate_replicas]
            )  # any replica reports that the call is not there
        if not isinstance(request, ReplicaCall):
            return [candidate_replicas]
        if self._spread:
            self._turn += 1
            names = sorted(by_name)
            return [[by_name[names[(self._turn + i) % len(names)]]] for i in range(len(names))]
        return [[by_name[name]] for name in self._rank(request, by_name)]

    def _rank(self, call: ReplicaCall, replicas: dict[str, RunningReplica]) -> list[str]:
        if self._ring.members != replicas.keys():
            self._ring = Ring(replicas.keys())
        loads = {name: self._load(replica.replica_id) for name, replica in replicas.items()}
        with span("route", call.trace) as recorded:
            order = rank_replicas(self._ring, call.affinity, loads, self._factor, self._slots)
            if recorded is not None:
                home = next(self._ring.order(call.affinity))
                recorded.set_attributes({"replica": order[0], "home": home, "spilled": order[0] != home})
        return order

    def _load(self, replica: ReplicaID) -> int:
        """Running calls of a replica, as last reported; 0 where unknown."""
        return self.replica_queue_len_cache.get(replica) or 0
