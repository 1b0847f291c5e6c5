"""`keystroke keys`: manages the API keys of a server. Only a hash of each key is stored."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.console import format_time
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option

if TYPE_CHECKING:
    from keystroke.gateway.record.store import Store

MonthlyTokens = Annotated[
    int | None, option("--monthly-tokens", "Tokens computed and written in a month; 0: any.", min=0)
]
MonthlyCost = Annotated[
    float | None, option("--monthly-cost", "Cost in a month, at the models' prices; 0: any.", min=0.0)
]

app = options.command_group("keys", "Create, list and revoke API keys of a server.")


@app.command()
def create(
    ctx: typer.Context,
    name: Annotated[str, argument("Name of the key's owner; shown in `keystroke usage`.")],
    priority: Annotated[bool, option("--priority", "Allow requests with priority or service_tier.")] = False,
    tokens: MonthlyTokens = None,
    cost: MonthlyCost = None,
    json: options.Json = False,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    from keystroke.gateway.access.keys import make_key

    run = invocation_of(ctx)
    with _store(run) as store:
        key, token = make_key(name, priority=priority, monthly_tokens=tokens or 0, monthly_cost=cost or 0.0)
        store.add_key(key)
    if run.json:
        run.console.json({"id": key.id, "name": key.name, "key": token, "priority": key.priority})
        return
    run.console.line(token)
    run.console.note("Save this key: it cannot be shown again. Servers accept it within seconds.")


@app.command("list")
def list_(ctx: typer.Context, json: options.Json = False) -> None:
    """List keys, without the keys themselves."""
    run = invocation_of(ctx)
    with _store(run) as store:
        keys = store.keys()
    if run.json:
        shown = ("id", "name", "created_at", "revoked_at", "priority", "monthly_tokens", "monthly_cost")
        run.console.json([{name: getattr(key, name) for name in shown} for key in keys])
        return
    rows = [
        (k.id, k.name, "yes" if k.priority else "", format_time(k.created_at), format_time(k.revoked_at))
        for k in keys
    ]
    run.console.table(("id", "name", "priority", "created", "revoked"), rows)


@app.command()
def budget(
    ctx: typer.Context,
    name: Annotated[str, argument("The key's id or name.")],
    tokens: MonthlyTokens = None,
    cost: MonthlyCost = None,
    json: options.Json = False,
) -> None:
    """Set what a key may spend in a calendar month; servers apply it within seconds."""
    run = invocation_of(ctx)
    with _store(run) as store:
        key = store.set_budget(name, tokens, cost)
    parts = [f"{key.monthly_tokens:,} tokens"] if key.monthly_tokens else []
    parts += [f"{key.monthly_cost:g} currency units"] if key.monthly_cost else []
    values = {"id": key.id, "monthly_tokens": key.monthly_tokens, "monthly_cost": key.monthly_cost}
    run.report(values, f"{key.name} may spend {' and '.join(parts) or 'any amount'} a month")


@app.command()
def revoke(ctx: typer.Context, name: Annotated[str, argument("The key's id or name.")]) -> None:
    """Revoke a key; servers stop accepting it within seconds."""
    run = invocation_of(ctx)
    with _store(run) as store:
        key = store.revoke_key(name)
    run.console.note(f"revoked {key.name} ({key.id})")


def _store(run: Invocation) -> closing[Store]:
    from keystroke.gateway.record.store import open_store

    return closing(open_store(run.settings))
