"""OpenTelemetry spans across gateway, router and replica.

Off unless configured; spans go to JSON-lines files in a folder, or to a collector. A span contains times,
model and replica, never content. Callers use `span` whether tracing is on or off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_tracer: Any = None
_provider: Any = None


def start_tracing(target: str | None, service: str) -> None:
    """Start recording spans of this process to `target`, a folder or a collector's URL. Raises
    ModuleNotFoundError where the collector's exporter is not installed."""
    global _tracer, _provider
    if not target or _tracer is not None:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

    exporter: SpanExporter
    if target.startswith(("http://", "https://")):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=target)
    else:
        folder = Path(target)
        folder.mkdir(parents=True, exist_ok=True)
        out = (folder / f"{service}-{os.getpid()}.jsonl").open("a", encoding="utf-8", buffering=1)
        exporter = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
    _provider = TracerProvider(resource=Resource.create({"service.name": f"keystroke-{service}"}))
    _provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    _tracer = _provider.get_tracer("keystroke")


@contextmanager
def span(
    name: str, parent: Mapping[str, str] | None = None, attributes: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """A span under `parent` (W3C headers; None: the current span). Yields it, or None."""
    if _tracer is None:
        yield None
        return
    from opentelemetry.propagate import extract

    context = extract(dict(parent)) if parent else None
    with _tracer.start_as_current_span(name, context=context, attributes=dict(attributes or {})) as recorded:
        yield recorded


def begin_span(name: str, parent: Mapping[str, str] | None, attributes: Mapping[str, Any]) -> Any:
    """A span that the caller ends; None where tracing is off."""
    if _tracer is None:
        return None
    from opentelemetry.propagate import extract

    return _tracer.start_span(name, context=extract(dict(parent)) if parent else None, attributes=attributes)


def headers_of(recorded: Any) -> dict[str, str]:
    """W3C headers that pass a span to another process."""
    if recorded is None:
        return {}
    from opentelemetry.propagate import inject
    from opentelemetry.trace import set_span_in_context

    carrier: dict[str, str] = {}
    inject(carrier, set_span_in_context(recorded))
    return carrier


def stop_tracing() -> None:
    """Export remaining spans; idempotent."""
    global _tracer, _provider
    if _provider is not None:
        _provider.shutdown()
    _tracer = _provider = None
