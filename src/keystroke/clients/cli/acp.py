"""`keystroke acp`: the agent for editors that speak the Agent Client Protocol.

Puts the agent together with a way to a gateway: the one named, or this machine's own. Standard output
belongs to the editor.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Annotated, Any

import typer

from keystroke.clients.cli.invocation import Invocation, invocation_of
from keystroke.errors import UsageError


def acp(
    ctx: typer.Context,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Use this gateway; without it one is found or started here."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="The model that works.")
    ] = None,
    deep: Annotated[
        str | None, typer.Option("--deep", metavar="MODEL", help="Takes over where the first one fails.")
    ] = None,
    attempts: Annotated[
        int, typer.Option("--attempts", "-n", min=1, max=64, help="Several at once; the best is kept.")
    ] = 1,
    check: Annotated[
        str, typer.Option("--check", metavar="CMD", help="A command that must pass in the end.")
    ] = "",
    approve: Annotated[
        str, typer.Option("--approve", help="Ask before: never, commands, or all (changes too).")
    ] = "all",
    run_commands: Annotated[bool, typer.Option("--run", help="The model may run commands.")] = False,
) -> None:
    """Be the agent of an editor that speaks the Agent Client Protocol."""
    if approve not in ("never", "commands", "all"):
        raise UsageError(f"--approve is never, commands or all, not {approve!r:.40}")
    run = invocation_of(ctx)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    options: dict[str, Any] = {"attempts": attempts, "check": check, "approve": approve, "run": run_commands}
    named = {"model": model, "deep": deep}
    options |= {key: value for key, value in named.items() if value is not None}
    asyncio.run(_serve(run, gateway, options))


async def _serve(run: Invocation, gateway: str | None, options: dict[str, Any]) -> None:
    from acp import run_agent

    from keystroke.clients.acp.agent import TaskAgent
    from keystroke.clients.cli.lsp import locate_by
    from keystroke.clients.cli.release import release
    from keystroke.clients.task_client import TaskClient

    client = TaskClient(locate_by(run, gateway))
    try:
        await run_agent(TaskAgent(client, release(), options))  # type: ignore[arg-type]
    finally:
        await client.close()
