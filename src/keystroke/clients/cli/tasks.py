"""`keystroke tasks`: lists, follows and controls the tasks that this machine's gateway runs.

A task is named by its id or the end of it; without a name the folder's newest task is meant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.changes import workspace_root
from keystroke.clients.cli.console import RED, format_time
from keystroke.clients.cli.options import Invocation, argument, invocation_of, option
from keystroke.errors import NotFound
from keystroke.protocol import tasks as wire

if TYPE_CHECKING:
    from keystroke.clients.task_client import TaskClient

app = typer.Typer(
    name="tasks", help="Tasks in the background: list, watch, answer, undo.", no_args_is_help=False,
    rich_markup_mode=None, invoke_without_command=True,
)  # fmt: skip
Which = Annotated[str, argument("The task's id, or the end of it; the newest otherwise.", metavar="[TASK]")]
Hunks = Annotated[str, option("--hunks", "Only these hunks of the change, by number.", metavar="0,2")]


@app.callback()
def list_(ctx: typer.Context, json: options.Json = False) -> None:
    """List the tasks of this folder, newest first."""
    if ctx.invoked_subcommand is not None:
        return
    run = invocation_of(ctx)
    tasks = with_client(run, lambda client: client.list_tasks(str(workspace_root())))
    if run.json:
        run.console.json(tasks)
        return
    rows = [
        (task.id[-8:], task.status, format_time(task.created_at), task.instruction[:60]) for task in tasks
    ]
    run.console.table(("task", "status", "given", "what"), rows)


@app.command()
def show(ctx: typer.Context, task: Which = "", json: options.Json = False) -> None:
    """Follow a task to its end, or to its question."""
    run = invocation_of(ctx)

    async def follow(client: TaskClient) -> None:
        known = await _find(client, task)
        async with aclosing(client.events(known.id)) as events:
            async for event in events:
                if run.json:
                    run.console.json(event)
                else:
                    _show(run, event)
                asked = event.question if isinstance(event, wire.TaskAsked) else None
                if asked is not None and (await client.get(known.id)).question == asked:
                    return

    with_client(run, follow)


@app.command()
def steer(
    ctx: typer.Context,
    line: Annotated[str, argument("The line to send.")],
    task: Which = "",
    deep: Annotated[bool, option("--deep", "The deep model takes over.")] = False,
) -> None:
    """Send a line to a running task."""
    _act(invocation_of(ctx), task, "steer", line=line, deep=deep)


@app.command()
def approve(ctx: typer.Context, task: Which = "", hunks: Hunks = "") -> None:
    """Approve what the task asks."""
    _act(invocation_of(ctx), task, "approve", **_numbers(hunks))


@app.command()
def reject(ctx: typer.Context, task: Which = "") -> None:
    """Refuse what the task asks; a change is kept and can be applied later."""
    _act(invocation_of(ctx), task, "reject")


@app.command()
def cancel(ctx: typer.Context, task: Which = "") -> None:
    """Stop a task."""
    _act(invocation_of(ctx), task, "cancel")


@app.command()
def apply(ctx: typer.Context, task: Which = "", hunks: Hunks = "") -> None:
    """Apply the change that a task proposed."""
    _act(invocation_of(ctx), task, "apply", **_numbers(hunks))


@app.command()
def undo(ctx: typer.Context, task: Which = "") -> None:
    """Undo the change of a task."""
    _act(invocation_of(ctx), task, "undo")


@app.command()
def resume(
    ctx: typer.Context, task: Which = "", say: Annotated[str, option("A further instruction.")] = ""
) -> None:
    """Continue a task that has ended."""
    _act(invocation_of(ctx), task, "resume", instruction=say)


def with_client(run: Invocation, work: Callable[[TaskClient], Awaitable[Any]]) -> Any:
    """Call `work` with a client of this machine's gateway, which is started if needed."""
    from keystroke.clients.cli.shared_gateway import shared_gateway
    from keystroke.clients.task_client import TaskClient

    async def call() -> Any:
        client = TaskClient(shared_gateway(run).locate)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(call())


def _act(run: Invocation, task: str, what: str, **fields: Any) -> None:
    async def act(client: TaskClient) -> wire.Task:
        known = await _find(client, task)
        return await client.act(known.id, what, **fields)

    done = with_client(run, act)
    run.console.note(f"{done.id[-8:]} is {done.status}{f': {done.line}' if done.line else ''}")


async def _find(client: TaskClient, name: str) -> wire.Task:
    tasks = await client.list_tasks(str(workspace_root()))
    found = [task for task in tasks if task.id.endswith(name)] if name else tasks[:1]
    if not found:
        raise NotFound(f"there is no task {name} in this folder" if name else "there is no task here yet")
    return found[0]


def _show(run: Invocation, event: wire.TaskEvent) -> None:
    console = run.console
    if isinstance(event, wire.TaskDoing):
        console.line(f"→ {event.line}")
    elif isinstance(event, wire.TaskNoted):
        console.line(f"  {event.line}", RED if event.failed else "")
    elif isinstance(event, wire.TaskAsked):
        console.line(event.question.diff or event.question.command)
        console.line(f"{event.question.text} `keystroke tasks approve` or `reject`")
    elif isinstance(event, (wire.TaskEnded, wire.TaskLanded, wire.TaskUndone)):
        console.line(f"{event.task.status}: {event.task.line}")


def _numbers(hunks: str) -> dict[str, Any]:
    parts = [part.strip() for part in hunks.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise typer.BadParameter("hunks are numbers, such as 0,2")
    return {"hunks": [int(part) for part in parts]} if parts else {}
