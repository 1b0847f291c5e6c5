"""`keystroke do`: a task given to a model, from an instruction to one edit that can be taken back.

Puts together what `keystroke.agent` has: models, sandbox, approvals, records. Nothing is run that was
not asked for, nothing is written but the one edit at the end, and what was refused stays refused.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import Invocation, of
from keystroke.errors import InputError, UsageError

if TYPE_CHECKING:
    from keystroke.agent.loop import Approve
    from keystroke.assist.edit import Workspace

_RUNS = re.compile(
    r"\b(?:run|execute)\b[^.;]*\b(?:tests?|suite|pytest|check|command|script|linter|make|npm|cargo|it)\b"
    r"|\btests?\s+(?:still\s+)?pass|\bmake\s+the\s+tests?\b|`[^`]+`\s+(?:must|should)\s+pass",
    re.IGNORECASE,
)


def do(
    ctx: typer.Context,
    task: Annotated[str, typer.Argument(help="What to do, in words.")] = "",
    file: Annotated[
        list[str] | None, typer.Option("--file", "-f", help="What it is about; found by itself otherwise.")
    ] = None,
    check: Annotated[
        str, typer.Option("--check", metavar="CMD", help="A command that must pass in the end.")
    ] = "",
    attempts: Annotated[
        int, typer.Option("--attempts", "-n", min=1, max=64, help="Several at once; the best is kept.")
    ] = 1,
    model: options.Model = None,
    deep: Annotated[
        str | None,
        typer.Option("--deep", metavar="MODEL", help="Takes over where the first one fails; reviews."),
    ] = None,
    approve: Annotated[
        str, typer.Option("--approve", help="Ask before: never, commands, or all (changes too).")
    ] = "commands",
    run_commands: Annotated[
        bool, typer.Option("--run", help="The model may run commands; the words of the task may say so too.")
    ] = False,
    network: Annotated[bool, typer.Option("--network", help="Commands may use the network.")] = False,
    types: Annotated[
        str, typer.Option("--types", metavar="CMD", help="A type checker that every attempt must pass.")
    ] = "",
    tries: Annotated[
        int,
        typer.Option("--tries", min=1, max=20, help="Rounds that get no further before a model gives up."),
    ] = 2,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, max=86400, help="Time limit of one command.")
    ] = 300.0,
    review: Annotated[bool, typer.Option("--review", help="The deep model looks at the change.")] = False,
    mcp: Annotated[
        list[str] | None,
        typer.Option("--mcp", metavar="NAME", help="Tools of this MCP server too; each call is asked for."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the change; write nothing.")] = False,
    background: Annotated[
        bool,
        typer.Option("--background", help="Have the gateway do it, behind all else; see `keystroke tasks`."),
    ] = False,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Go on with the last task; TASK is what else to say.")
    ] = False,
    json: options.Json = False,
) -> None:
    from keystroke.agent.loop import Records, TaskOptions
    from keystroke.agent.loop.record import FINISHED
    from keystroke.clients.cli.changes import open_workspace

    run = of(ctx)
    if not task.strip() and not go_on:
        raise UsageError('say what to do: keystroke do "..."; or go on with --continue')
    level = _level(approve)
    may_run = run_commands or bool(_RUNS.search(task))
    fields: dict[str, Any] = {
        "check": check, "types": types, "attempts": attempts, "tries": tries, "run": may_run,
        "network": network, "review": review, "dry_run": dry_run, "seconds": seconds, "mcp": list(mcp or ()),
        "approve": "all" if background else approve,
    }  # fmt: skip
    if background:
        if go_on:
            raise UsageError("a task in the background is gone on with by `keystroke tasks resume`")
        fields |= {"background": True, "model": model or "auto", "deep": deep, "files": list(file or ())}
        _handed_over(run, task, fields, as_json=run.wants_json(json))
        return
    workspace, journal = open_workspace(run)
    records = Records(run.settings.paths.state, workspace.root)
    previous = records.newest() if go_on else None
    if previous is not None:
        if previous.status == "done" and not task.strip():
            raise UsageError(FINISHED)
        check = check or previous.check
        file = file or list(previous.files)
    chosen = TaskOptions(
        check=check,
        types=types,
        files=tuple(_named(workspace, name) for name in file or ()),
        may_run=may_run,
        attempts=attempts,
        tries=tries,
        max_tokens=run.settings.generation.max_tokens or 2048,
        seed=run.settings.generation.seed,
        workers=max(1, min(attempts, os.cpu_count() or 1)),
        dry_run=dry_run,
        review=review,
    )
    from keystroke.agent.loop import AgentTask, Approvals, Status, sums
    from keystroke.agent.sandbox import Limits, find_sandbox
    from keystroke.agent.tools.mcp import named_servers
    from keystroke.clients.cli.chats import open_chat
    from keystroke.clients.cli.do_gateway import GatewayTask
    from keystroke.clients.cli.do_view import TaskView, show_diff
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.shared import shared_gateway
    from keystroke.clients.cli.speaker import gateway_model

    as_json = run.wants_json(json)
    worker, other = _models(run, model, deep)
    view = TaskView(run, as_json=as_json)
    asked = gateway_model(worker, run)
    with interruptible() as interrupt:
        if asked is not None:
            named: dict[str, Any] = {"model": asked, "deep": other, "files": list(chosen.files)}
            named |= {"max_tokens": chosen.max_tokens}
            shared = GatewayTask(
                shared_gateway(run).locate, str(workspace.root), fields | named, view, interrupt, go_on=go_on
            )
            ended = view.watch(lambda: shared.run(task), interrupt)
        else:
            chat = open_chat(worker, run)
            try:
                agent = AgentTask(
                    workspace,
                    journal,
                    chat,
                    find_sandbox(),
                    Approvals(level, view.ask),
                    deep=(lambda: open_chat(other, run)) if other else None,
                    options=chosen,
                    records=records,
                    limits=Limits(seconds=seconds),
                    network=network,
                    sink=view.sink,
                    interrupt=interrupt,
                    steering=view.steering,
                    exclude=run.settings.assist.exclude,
                    servers=named_servers(run.settings.assist.mcp_servers, mcp or []),
                )
                ended = view.watch(lambda: agent.run(task, previous), interrupt)
            finally:
                chat.close()
    if ended is None:
        raise InputError("the task ended without a word")
    if not as_json:
        show_diff(run, ended.diff)
        run.console.note(ended.line)
        if ended.receipts:
            run.console.note(sums(ended.receipts))
    if ended.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    if ended.status is Status.FAILED:
        raise typer.Exit(1)


def _handed_over(run: Invocation, task: str, fields: dict[str, Any], *, as_json: bool) -> None:
    """Give the task to this machine's gateway and come back at once."""
    import msgspec

    from keystroke.clients.cli.changes import workspace_root
    from keystroke.clients.cli.tasks import with_client

    given = with_client(run, lambda client: client.create(str(workspace_root()), task, **fields))
    if as_json:
        run.console.json(msgspec.to_builtins(given))
        return
    run.console.note(f"{given.id[-8:]} begins; `keystroke tasks show` follows it, its change waits for you")


def _level(approve: str) -> Approve:
    from keystroke.agent.loop import Approve

    try:
        return Approve(approve)
    except ValueError:
        raise UsageError(f"--approve is {', '.join(Approve)}, not {approve!r:.40}") from None


def _named(workspace: Workspace, path: str) -> str:
    """The workspace name of a file; one that does not exist yet may be made."""
    name = workspace.name(path) if (Path.cwd() / path).exists() else path
    workspace.locate(name)
    return name


def _models(run: Invocation, model: str | None, deep: str | None) -> tuple[str, str | None]:
    """The model that works, and the one that takes over."""
    from keystroke.engine.roles import Role, model_for, required

    worker = model or model_for(Role.CHAT, run.settings) or required(Role.DEEP, run.settings)
    other = deep or run.settings.model.deep
    return worker, other if other != worker else None
