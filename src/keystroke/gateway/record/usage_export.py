"""Usage for other programs: comma-separated values, and OpenTelemetry metrics.

Contains names of keys and models and their sums, no content.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from keystroke.errors import ConfigError, Unavailable
from keystroke.gateway.record.store import UsageRow

_KINDS = {"input": "computed_tokens", "reused": "reused_tokens", "output": "output_tokens"}


def usage_csv(rows: Sequence[UsageRow]) -> str:
    """One line of names, then one a key and model. A name that a spreadsheet would run is quoted."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for field in fields(UsageRow)]
    writer.writerow(names)
    for row in rows:
        writer.writerow([_quote_formula(getattr(row, name)) for name in names])
    return out.getvalue()


def _quote_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def send_usage(rows: Sequence[UsageRow], url: str) -> None:
    """Send the sums as `keystroke.usage.*` to a collector. Raises ConfigError where the exporter is not
    installed, Unavailable where the collector does not accept them."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult
        from opentelemetry.sdk.resources import Resource
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"sending usage needs {error.name}; install it with: pip install 'keystroke[scale]'"
        ) from None
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], Resource.create({"service.name": "keystroke"}))
    meter = provider.get_meter("keystroke.usage")
    responses = meter.create_counter("keystroke.usage.responses")
    tokens = meter.create_counter("keystroke.usage.tokens")
    cost = meter.create_counter("keystroke.usage.cost")
    for row in rows:
        whose = {"key": row.key, "model": row.model}
        responses.add(row.responses, whose)
        cost.add(row.cost, whose)
        for kind, name in _KINDS.items():
            tokens.add(getattr(row, name), {**whose, "kind": kind})
    collected = reader.get_metrics_data()
    exporter = OTLPMetricExporter(endpoint=url, timeout=10)
    try:
        done = exporter.export(collected) if collected is not None else MetricExportResult.SUCCESS
    finally:
        exporter.shutdown()
        provider.shutdown()
    if done is not MetricExportResult.SUCCESS:
        raise Unavailable(f"the collector at {url} did not accept the usage; check the address")
