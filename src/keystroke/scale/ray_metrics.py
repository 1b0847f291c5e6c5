"""The gateway's metrics, also reported to Ray, whose agents export all processes of a node to Prometheus.

Same names and labels as a single gateway's, with Ray's prefix (`ray_keystroke_...`). `/metrics` of one
gateway covers that gateway only.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from keystroke.engine.base import EngineStats, ModelInfo
from keystroke.gateway.record.metrics import SECONDS, Metrics
from keystroke.protocol.response import Receipt


class RayMetrics(Metrics):
    """Metrics of one gateway; `replica` names it."""

    def __init__(self, replica: str) -> None:
        super().__init__()
        self._replica = replica
        by_model = ("model", "gateway")
        self._ended = Counter(
            "keystroke_responses", "Responses ended", ("model", "priority", "status", "gateway")
        )
        self._counted = Counter("keystroke_tokens", "Tokens", ("model", "kind", "gateway"))
        self._first = Histogram(
            "keystroke_first_token_seconds",
            "Arrival to first token",
            list(SECONDS),
            ("model", "priority", "gateway"),
        )
        self._queued = Histogram("keystroke_queue_seconds", "Waiting for a place", list(SECONDS), by_model)
        self._losses = Counter("keystroke_taken_up", "Turns taken up by another replica", by_model)
        self._waiting = Gauge("keystroke_waiting", "Requests waiting", by_model)
        self._running = Gauge("keystroke_running", "Responses running", by_model)
        self._oldest = Gauge("keystroke_oldest_waiting_seconds", "Age of the oldest that waits", by_model)

    def record_response(self, receipt: Receipt, status: str) -> None:
        super().record_response(receipt, status)
        model, mine = {"model": receipt.model}, {"gateway": self._replica}
        self._ended.inc(1, {**model, **mine, "priority": receipt.priority, "status": status})
        for kind, amount in (
            ("input", receipt.computed_tokens),
            ("reused", receipt.reused_tokens),
            ("output", receipt.output_tokens),
        ):
            if amount > 0:
                self._counted.inc(amount, {**model, **mine, "kind": kind})
        self._queued.observe(receipt.queue_ms / 1e3, {**model, **mine})
        if receipt.first_token_ms:
            self._first.observe(receipt.first_token_ms / 1e3, {**model, **mine, "priority": receipt.priority})
        if receipt.preemptions:
            self._losses.inc(receipt.preemptions, {**model, **mine})

    def sample(self, model: str, waiting: int, running: int, stats: EngineStats | None) -> None:
        super().sample(model, waiting, running, stats)
        tags = {"model": model, "gateway": self._replica}
        self._waiting.set(waiting, tags)
        self._running.set(running, tags)

    def sample_age(self, model: str, seconds: float) -> None:
        self._oldest.set(seconds, {"model": model, "gateway": self._replica})


class ReplicaMetrics:
    """Gauges of one engine replica: its cache, and where the weights of its model are."""

    def __init__(self, replica: str, model: str) -> None:
        self._tags = {"model": model, "replica": replica}
        tags = ("model", "replica")
        self._kv = Gauge("keystroke_replica_kv_bytes", "KV cache", (*tags, "kind"))
        self._limit = Gauge("keystroke_replica_kv_limit_bytes", "Room for the KV cache", tags)
        self._sessions = Gauge("keystroke_replica_sessions", "Engine sessions open", tags)
        self._tokens = Gauge("keystroke_replica_tokens_in_flight", "Tokens of all calls", tags)
        self._weights = Gauge("keystroke_replica_weight_bytes", "Weights", (*tags, "place"))
        self._experts = Gauge("keystroke_replica_experts", "Experts of a layer", (*tags, "kind"))

    def sample(self, info: ModelInfo, stats: EngineStats, tokens: int) -> None:
        self._kv.set(stats.kv_bytes, {**self._tags, "kind": "live"})
        self._kv.set(stats.cached_bytes, {**self._tags, "kind": "cached"})
        self._limit.set(stats.kv_limit_bytes, self._tags)
        self._sessions.set(stats.sessions, self._tags)
        self._tokens.set(tokens, self._tags)
        self._weights.set(info.host_bytes, {**self._tags, "place": "host"})
        self._weights.set(info.weight_bytes - info.host_bytes, {**self._tags, "place": "device"})
        if info.experts:
            self._experts.set(info.experts, {**self._tags, "kind": "all"})
            self._experts.set(info.active_experts, {**self._tags, "kind": "active"})
