"""`keystroke do`: gives a task to a model, from an instruction to one edit that `undo` reverts.

Combines the models, sandbox, approvals and records of `keystroke.agent`. Only requested or approved
commands run, and the one edit at the end is the only write.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.errors import InputError, KeystrokeError, UsageError

if TYPE_CHECKING:
    from keystroke.agent.loop import ApprovalLevel
    from keystroke.assist.edit import Workspace

_RUNS = re.compile(
    r"\b(?:run|execute)\b[^.;]*\b(?:tests?|suite|pytest|check|command|script|linter|make|npm|cargo|it)\b"
    r"|\btests?\s+(?:still\s+)?pass|\bmake\s+the\s+tests?\b|`[^`]+`\s+(?:must|should)\s+pass",
    re.IGNORECASE,
)


def do(
    ctx: typer.Context,
    task: Annotated[str, argument("What to do, in words.")] = "",
    file: Annotated[
        list[str] | None, option("--file", "-f", "A file to work on; found from the task otherwise.")
    ] = None,
    check: Annotated[str, option("A command that must pass at the end.", metavar="CMD")] = "",
    attempts: Annotated[
        str,
        option(
            "--attempts",
            "-n",
            "Attempts at the same time, 1 to 64; auto: as many as take little extra time.",
            metavar="N",
        ),
    ] = "auto",
    model: options.Model = None,
    deep: Annotated[
        str | None, option("A larger model that continues where the first one fails.", metavar="MODEL")
    ] = None,
    approve: Annotated[
        str, option("When to ask: never, commands (before each), or all (before the change too).")
    ] = "commands",
    run_commands: Annotated[
        bool, option("--run", "Let the model run commands; implied by a task that asks to run something.")
    ] = False,
    network: Annotated[bool, option("--network", "Commands may use the network.")] = False,
    types: Annotated[str, option("A type checker command that every attempt must pass.", metavar="CMD")] = "",
    tries: Annotated[int, option("Rounds without progress before a model gives up.", min=1, max=20)] = 2,
    seconds: Annotated[float, option("Time limit of one command.", min=0.1, max=86400)] = 300.0,
    review: Annotated[bool, option("--review", "The deep model reviews the change.")] = False,
    mcp: Annotated[
        list[str] | None, option("Use the tools of this MCP server; each call is asked for.", metavar="NAME")
    ] = None,
    dry_run: Annotated[bool, option("--dry-run", "Show the change; write nothing.")] = False,
    background: Annotated[
        bool, option("--background", "Run it in the gateway with low priority; see `keystroke tasks`.")
    ] = False,
    go_on: Annotated[
        bool, option("--continue", "Continue the last task; TASK is a further instruction.")
    ] = False,
    json: options.Json = False,
    local: options.Local = False,
) -> None:
    from keystroke.agent.loop import TaskOptions, TaskStore
    from keystroke.agent.loop.record import ALREADY_DONE
    from keystroke.agent.loop.task import waiting_record
    from keystroke.clients.cli.changes import open_workspace, show_diff

    run = invocation_of(ctx)
    if not task.strip() and not go_on:
        raise UsageError('say what to do: keystroke do "..."; or continue with --continue')
    level = _level(approve)
    may_run = run_commands or bool(_RUNS.search(task))
    fields: dict[str, Any] = {
        "check": check, "types": types, "attempts": _count(attempts), "tries": tries, "run": may_run,
        "network": network, "review": review, "dry_run": dry_run, "seconds": seconds, "mcp": list(mcp or ()),
        "approve": "all" if background else approve,
    }  # fmt: skip
    if background:
        if go_on:
            raise UsageError("a task in the background is continued with `keystroke tasks resume`")
        fields |= {"background": True, "model": model or "auto", "deep": deep, "files": list(file or ())}
        _run_in_background(run, task, fields)
        return
    workspace, journal = open_workspace(run)
    store = TaskStore(run.settings.paths.state, workspace.root)
    previous = store.latest() if go_on else None
    if previous is not None:
        if previous.status == "done" and not task.strip():
            raise UsageError(ALREADY_DONE)
        check = check or previous.check
        file = file or list(previous.files)
    chosen = TaskOptions(
        check=check,
        types=types,
        files=tuple(_workspace_name(workspace, name) for name in file or ()),
        may_run=may_run,
        attempts=_count(attempts),
        tries=tries,
        max_tokens=run.settings.generation.max_tokens or 2048,
        seed=run.settings.generation.seed,
        workers=max(1, min(_count(attempts) or 8, os.cpu_count() or 1)),
        dry_run=dry_run,
        review=review,
    )
    from keystroke.agent.chat.model import NoModel
    from keystroke.agent.loop import (
        AgentTask,
        Approvals,
        EndStatus,
        TaskControl,
        TaskFiles,
        TaskIdentity,
        TaskModels,
        TaskPermissions,
        describe_receipts,
    )
    from keystroke.agent.sandbox import CommandLimits, find_sandbox
    from keystroke.agent.tools.mcp import load_servers
    from keystroke.clients.cli.do_gateway import GatewayTask
    from keystroke.clients.cli.do_view import TerminalTaskView
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.open_model import gateway_model, open_task_model, served_name
    from keystroke.clients.cli.shared_gateway import shared_gateway
    from keystroke.clients.cli.writers import slow_model_note

    needs_model = bool(previous or check or types) or not _is_rename(workspace, task, chosen.files)
    if previous is not None and previous.given.get("model") not in (None, "auto"):
        model = model or previous.given["model"]
    worker, other = _models(run, model, deep) if needs_model else ("", None)
    faster = ("name the files with --file", "take fewer --attempts")
    if needs_model and not run.json and (slow := slow_model_note(worker, run, faster)) is not None:
        run.console.note(slow)
    view = TerminalTaskView(run)
    fields |= {"deep": other, "files": list(chosen.files), "max_tokens": chosen.max_tokens}
    if needs_model:
        fields["model"] = served_name(worker, run.settings)
    identity = TaskIdentity(id=previous.id) if previous is not None else TaskIdentity(given=fields)
    if previous is None:  # recorded before a gateway is started or a model loaded: a stop loses nothing
        store.save(waiting_record(identity, task, worker, chosen, workspace.root))
    try:
        at_gateway = needs_model and gateway_model(worker, run) is not None
    except KeystrokeError:
        if previous is None:
            store.remove(identity.id)
        raise
    with interruptible() as interrupt:
        if at_gateway:
            shared = GatewayTask(
                shared_gateway(run).locate,
                str(workspace.root),
                fields,
                view,
                interrupt,
                go_on=go_on,
                on_created=lambda: store.remove(identity.id),
            )
            try:
                ended = view.watch(lambda: shared.run(task), interrupt)
            except KeystrokeError:
                if previous is None and not interrupt.is_set:
                    store.remove(identity.id)
                raise
        else:
            opened = open_task_model(worker, run) if needs_model else NoModel()
            try:
                agent = AgentTask(
                    files=TaskFiles(
                        workspace=workspace, journal=journal, store=store, exclude=run.settings.assist.exclude
                    ),
                    models=TaskModels(
                        model=opened, open_deep=(lambda: open_task_model(other, run)) if other else None
                    ),
                    permissions=TaskPermissions(
                        sandbox=find_sandbox(),
                        approvals=Approvals(level, view.ask),
                        limits=CommandLimits(seconds=seconds),
                        network=network,
                        servers=load_servers(run.settings.assist.mcp_servers, mcp or []),
                    ),
                    options=chosen,
                    identity=identity,
                    control=TaskControl(
                        on_event=view.handle_event, interrupt=interrupt, steering=view.steering
                    ),
                )
                ended = view.watch(lambda: agent.run(task, previous), interrupt)
            finally:
                opened.close()
    if ended is None:
        raise InputError("the task ended without a result")
    if not run.json:
        show_diff(run, ended.diff)
        run.console.note(ended.line)
        if ended.receipts:
            run.console.note(describe_receipts(ended.receipts))
    if ended.status is EndStatus.INTERRUPTED:
        raise KeyboardInterrupt
    if ended.status is EndStatus.FAILED:
        raise typer.Exit(1)


def _run_in_background(run: Invocation, task: str, fields: dict[str, Any]) -> None:
    """Give the task to this machine's gateway and return at once."""
    from keystroke.clients.cli.changes import workspace_root
    from keystroke.clients.cli.tasks import with_client

    started = with_client(run, lambda client: client.create(str(workspace_root()), task, **fields))
    run.report(
        started,
        f"{started.id[-8:]} started; `keystroke tasks show` follows it; its change waits for your approval",
    )


def _count(attempts: str) -> int:
    """The number of attempts; 0 for `auto`."""
    if attempts == "auto":
        return 0
    if attempts.isdecimal() and 1 <= int(attempts) <= 64:
        return int(attempts)
    raise UsageError(f"--attempts is auto or a number from 1 to 64, not {attempts!r:.40}")


def _level(approve: str) -> ApprovalLevel:
    from keystroke.agent.loop import ApprovalLevel

    try:
        return ApprovalLevel(approve)
    except ValueError:
        raise UsageError(f"--approve is {', '.join(ApprovalLevel)}, not {approve!r:.40}") from None


def _workspace_name(workspace: Workspace, path: str) -> str:
    """The name of a file in the workspace; it need not exist yet."""
    name = workspace.name(path) if (Path.cwd() / path).exists() else path
    workspace.locate(name)
    return name


def _is_rename(workspace: Workspace, task: str, files: tuple[str, ...]) -> bool:
    """Whether the task is a rename, for which no model is loaded. InputError where several definitions have
    the name."""
    from keystroke.assist.edit.renaming import parse_renaming

    if parse_renaming(task) is None:
        return False
    from keystroke.agent.loop.renaming import rename_in_project
    from keystroke.agent.workspace import Overlay

    return bool(rename_in_project(Overlay(workspace), task, files))


def _models(run: Invocation, model: str | None, deep: str | None) -> tuple[str, str | None]:
    """The model that works, and the one that takes over."""
    from keystroke.engine.roles import Role, model_for, require_model

    worker = model or model_for(Role.CHAT, run.settings) or require_model(Role.DEEP, run.settings)
    other = deep or run.settings.model.deep
    return worker, other if other != worker else None
