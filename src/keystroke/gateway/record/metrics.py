"""Prometheus metrics.

Updated when work begins or ends, never per token. Labels are model, priority and status only: nothing a
caller can multiply, and no content.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from keystroke.engine.base import EngineStats
from keystroke.protocol.response import Receipt

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Uses its own collector registry, so that several servers can run in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.responses = Counter(
            "keystroke_responses", "Responses ended", ["model", "priority", "status"], registry=registry
        )
        self.tokens = Counter("keystroke_tokens", "Tokens", ["model", "kind"], registry=registry)
        self.first_token = Histogram(
            "keystroke_first_token_seconds",
            "Arrival to first token",
            ["model", "priority"],
            buckets=SECONDS,
            registry=registry,
        )
        self.queue = Histogram(
            "keystroke_queue_seconds", "Waiting for a place", ["model"], buckets=SECONDS, registry=registry
        )
        self.token_gap = Histogram(
            "keystroke_token_p99_seconds",
            "99th percentile token time of each response",
            ["model"],
            buckets=SECONDS,
            registry=registry,
        )
        self.rejected = Counter("keystroke_rejected", "Requests refused", ["code"], registry=registry)
        self.connections = Gauge("keystroke_connections", "Open WebSocket connections", registry=registry)
        self.waiting = Gauge("keystroke_waiting", "Requests waiting", ["model"], registry=registry)
        self.running = Gauge("keystroke_running", "Responses running", ["model"], registry=registry)
        self.sessions = Gauge("keystroke_sessions", "Engine sessions open", ["model"], registry=registry)
        self.kv_bytes = Gauge("keystroke_kv_bytes", "KV cache bytes", ["model", "kind"], registry=registry)
        self._series: dict[tuple[str, str], _Series] = {}

    def record_response(self, receipt: Receipt, status: str) -> None:
        names = receipt.model, receipt.priority
        series = self._series.get(names)
        if series is None:
            series = self._series[names] = _Series(self, *names)
        series.add(receipt, status)

    def sample(self, model: str, waiting: int, running: int, stats: EngineStats | None) -> None:
        """Update the gauges of one model; called when they are read."""
        self.waiting.labels(model).set(waiting)
        self.running.labels(model).set(running)
        if stats is not None:
            self.sessions.labels(model).set(stats.sessions)
            self.kv_bytes.labels(model, "live").set(stats.kv_bytes)
            self.kv_bytes.labels(model, "cached").set(stats.cached_bytes)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _Series:
    """The counters of one model and priority, looked up once: finding them by label costs more than
    counting."""

    def __init__(self, metrics: Metrics, model: str, priority: str) -> None:
        tokens = metrics.tokens
        self._responses, self._names = metrics.responses, (model, priority)
        self._statuses: dict[str, Counter] = {}
        self._input, self._reused = tokens.labels(model, "input"), tokens.labels(model, "reused")
        self._output = tokens.labels(model, "output")
        self._drafted, self._accepted = tokens.labels(model, "drafted"), tokens.labels(model, "accepted")
        self._queue, self._gap = metrics.queue.labels(model), metrics.token_gap.labels(model)
        self._first = metrics.first_token.labels(model, priority)

    def add(self, receipt: Receipt, status: str) -> None:
        if status not in self._statuses:
            self._statuses[status] = self._responses.labels(*self._names, status)
        self._statuses[status].inc()
        self._input.inc(receipt.computed_tokens)
        self._reused.inc(receipt.reused_tokens)
        self._output.inc(receipt.output_tokens)
        if receipt.drafted_tokens:
            self._drafted.inc(receipt.drafted_tokens)
            self._accepted.inc(receipt.accepted_tokens)
        self._queue.observe(receipt.queue_ms / 1e3)
        if receipt.first_token_ms:
            self._first.observe(receipt.first_token_ms / 1e3)
            self._gap.observe(receipt.token_p99_ms / 1e3)
