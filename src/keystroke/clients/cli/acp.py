"""`keystroke acp`: runs the agent for editors that support the Agent Client Protocol.

It uses the gateway named by `--gateway`, or the shared one. Standard output carries only ACP messages.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, invocation_of, option
from keystroke.errors import UsageError


def acp(
    ctx: typer.Context,
    gateway: options.Gateway = None,
    model: Annotated[str | None, option("--model", "-m", "The model to use.", metavar="MODEL")] = None,
    deep: Annotated[
        str | None, option("A larger model for tasks that the first one fails.", metavar="MODEL")
    ] = None,
    attempts: Annotated[
        int, option("--attempts", "-n", "Run several attempts at once and keep the best.", min=1, max=64)
    ] = 1,
    check: Annotated[str, option("A command that must succeed at the end.", metavar="CMD")] = "",
    approve: Annotated[str, option("Ask before: never, commands, or all (commands and changes).")] = "all",
    run_commands: Annotated[bool, option("--run", "Let the model run commands.")] = False,
) -> None:
    if approve not in ("never", "commands", "all"):
        raise UsageError(f"--approve must be never, commands or all, not {approve!r:.40}")
    run = invocation_of(ctx)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    options: dict[str, Any] = {"attempts": attempts, "check": check, "approve": approve, "run": run_commands}
    models = {"model": model, "deep": deep}
    options |= {key: value for key, value in models.items() if value is not None}
    asyncio.run(_serve(run, gateway, options))


async def _serve(run: Invocation, gateway: str | None, options: dict[str, Any]) -> None:
    from acp import run_agent

    from keystroke.clients.acp.agent import TaskAgent
    from keystroke.clients.cli.installed_version import release
    from keystroke.clients.cli.lsp import gateway_locator
    from keystroke.clients.task_client import TaskClient

    client = TaskClient(gateway_locator(run, gateway))
    try:
        await run_agent(TaskAgent(client, release(), options))  # type: ignore[arg-type]
    finally:
        await client.close()
