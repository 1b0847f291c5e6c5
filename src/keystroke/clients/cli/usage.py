"""`keystroke usage`: sums up the receipts that servers stored, by key and model."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import invocation_of, option


def usage(
    ctx: typer.Context,
    days: Annotated[float, option("Look back this many days; 0 means all time.", min=0.0)] = 30.0,
    key: Annotated[str | None, option("Only this key, by name or id.")] = None,
    as_csv: Annotated[bool, option("--csv", "Print comma-separated values for a spreadsheet.")] = False,
    otlp: Annotated[
        str | None,
        option("--otlp", "Send the sums to an OpenTelemetry collector (OTLP over HTTP).", metavar="URL"),
    ] = None,
    json: options.Json = False,
) -> None:
    from keystroke.gateway.record.store import open_store

    run = invocation_of(ctx)
    since = time.time() - days * 86_400 if days else 0.0
    with closing(open_store(run.settings)) as store:
        rows = store.usage(since, key)
    if otlp is not None:
        from keystroke.gateway.record.usage_export import send_usage

        send_usage(rows, otlp)
        run.console.note(f"sent the usage of {len(rows)} pairs of key and model to {otlp}")
        return
    if as_csv:
        from keystroke.gateway.record.usage_export import usage_csv

        run.console.write(usage_csv(rows))
        return
    if run.json:
        run.console.json(rows)
        return
    if not rows:
        run.console.note("no usage in that time")
        return
    shown = [
        (
            r.key,
            r.model,
            f"{r.responses:,}",
            f"{r.input_tokens:,}",
            f"{r.reused_tokens:,}",
            f"{r.output_tokens:,}",
            f"{r.first_token_ms:.0f} ms",
            f"{r.cost:.4f}",
        )
        for r in rows
    ]
    headings = ("key", "model", "responses", "input", "reused", "output", "first token", "cost")
    run.console.table(headings, shown)
