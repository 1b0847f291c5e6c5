"""Which engine replica takes a call: the one whose cache holds its prefix, unless that one is overloaded.

A Ray Serve request router; it runs in every gateway and keeps nothing but a ring of the replicas that
Ray says are alive. Equal calls are sent to equal replicas by all gateways; loads are Ray's own counts.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from keystroke.scale.call import Call, Splice
from keystroke.scale.ring import Ring, place
from keystroke.scale.tracing import span


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """`load_factor` and `slots` bound the load, as `ring.bound` does; `spread` sends calls round in turn
    instead, for comparison."""

    # To wait for the home's word on a busy machine costs less than to read a prefix again elsewhere; one
    # that has died says so at once. (Ray's own patience is a tenth of a second.)
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
        asked: Any = pending_request.args[0] if pending_request.args else None
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if isinstance(asked, Splice):
            held = by_name.get(asked.replica)
            return [[held]] if held is not None else [candidate_replicas]  # any will say that it is not there
        if not isinstance(asked, Call):
            return [candidate_replicas]
        if self._spread:
            self._turn += 1
            names = sorted(by_name)
            return [[by_name[names[(self._turn + i) % len(names)]]] for i in range(len(names))]
        return [[by_name[name]] for name in self._placed(asked, by_name)]

    def _placed(self, call: Call, replicas: dict[str, RunningReplica]) -> list[str]:
        if self._ring.members != replicas.keys():
            self._ring = Ring(replicas.keys())
        loads = {name: self._load(replica.replica_id) for name, replica in replicas.items()}
        with span("route", call.trace) as told:
            order = place(self._ring, call.affinity, loads, self._factor, self._slots)
            if told is not None:
                home = next(self._ring.order(call.affinity))
                told.set_attributes({"replica": order[0], "home": home, "spilled": order[0] != home})
        return order

    def _load(self, replica: ReplicaID) -> int:
        """Calls under way there, as far as is known; one that nobody has asked for long has none."""
        return self.replica_queue_len_cache.get(replica) or 0
