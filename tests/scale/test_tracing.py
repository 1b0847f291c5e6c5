"""Spans reach a collector by OTLP, as the exporter of OpenTelemetry sends them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the [scale] extra is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from keystroke.scale.tracing import begin_span, headers_of, span, start_tracing, stop_tracing


class Collector(ThreadingHTTPServer):
    """Takes what a collector takes at `/v1/traces`, and keeps it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.heard: list[ExportTraceServiceRequest] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        if self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf":
            self.server.heard.append(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        stop_tracing()
        server.shutdown()
        server.server_close()


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
