"""Spans reach a collector by OTLP, as the exporter of OpenTelemetry sends them."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from local_http import Handler, listening

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the [scale] extra is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from keystroke.scale.tracing import begin_span, headers_of, span, start_tracing, stop_tracing


@dataclass
class Collector:
    """Takes what a collector takes at `/v1/traces`, and keeps it."""

    url: str
    heard: list[ExportTraceServiceRequest] = field(default_factory=list)


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Taking(Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            if self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf":
                made.heard.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.reply(200, answer, {"Content-Type": "application/x-protobuf"})

    with listening(Taking) as url:
        made = Collector(f"{url}/v1/traces")
        try:
            yield made
        finally:
            stop_tracing()


def test_spans_of_a_request_reach_the_collector_as_one_trace(collector: Collector) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    start_tracing(collector.url, "gateway")
    with span(
        "gateway", {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}, {"path": "/v1/responses"}
    ) as outer:
        inner = begin_span("work", headers_of(outer), {"model": "echo"})
        inner.end()
    stop_tracing()  # writes what is left
    resources = [one for request in collector.heard for one in request.resource_spans]
    names = {a.key: a.value.string_value for one in resources for a in one.resource.attributes}
    assert names["service.name"] == "keystroke-gateway"
    spans = {s.name: s for one in resources for scope in one.scope_spans for s in scope.spans}
    assert {s.trace_id.hex() for s in spans.values()} == {trace}
    assert spans["gateway"].parent_span_id.hex() == "00f067aa0ba902b7"
    assert spans["work"].parent_span_id == spans["gateway"].span_id
    assert {a.key: a.value.string_value for a in spans["work"].attributes} == {"model": "echo"}


def test_a_collector_that_is_gone_costs_spans_and_nothing_else(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds that it is tried for at the end
    start_tracing("http://127.0.0.1:9/v1/traces", "gateway")
    with span("gateway") as made:
        assert made is not None
    assert not collector.heard
