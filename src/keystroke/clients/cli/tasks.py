"""`keystroke tasks`: tasks that this machine's gateway does in the background, watched and answered for.

Asks the gateway and shows what it says; decides nothing. A task is named by its id or the end of it;
without a name the newest of this folder is meant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.changes import workspace_root
from keystroke.clients.cli.console import RED
from keystroke.clients.cli.invocation import Invocation, of
from keystroke.errors import NotFound
from keystroke.protocol import tasks as wire

if TYPE_CHECKING:
    from keystroke.clients.tasks import TaskClient

app = typer.Typer(
    name="tasks", help="Tasks in the background: list, watch, answer, undo.", no_args_is_help=False,
    rich_markup_mode=None, invoke_without_command=True,
)  # fmt: skip
Which = Annotated[
    str, typer.Argument(metavar="[TASK]", help="Its id, or the end of it; the newest otherwise.")
]
Hunks = Annotated[
    str, typer.Option("--hunks", metavar="0,2", help="Only these hunks of the change, by number.")
]


@app.callback()
def list_(ctx: typer.Context, json: options.Json = False) -> None:
    """List the tasks of this folder, newest first."""
    if ctx.invoked_subcommand is not None:
        return
    run = of(ctx)
    tasks = with_client(run, lambda client: client.all(str(workspace_root())))
    if run.wants_json(json):
        run.console.json(msgspec.to_builtins(tasks))
        return
    rows = [(task.id[-8:], task.status, _when(task.created_at), task.instruction[:60]) for task in tasks]
    run.console.table(("task", "status", "given", "what"), rows)


@app.command()
def show(ctx: typer.Context, task: Which = "", json: options.Json = False) -> None:
    """Follow a task to its end, or to its question."""
    run = of(ctx)

    async def follow(client: TaskClient) -> None:
        known = await _found(client, task)
        async with aclosing(client.events(known.id)) as events:
            async for event in events:
                if run.wants_json(json):
                    run.console.line(msgspec.json.encode(event).decode())
                else:
                    _shown(run, event)
                asked = event.question if isinstance(event, wire.TaskAsked) else None
                if asked is not None and (await client.get(known.id)).question == asked:
                    return

    with_client(run, follow)


@app.command()
def steer(
    ctx: typer.Context,
    line: Annotated[str, typer.Argument(help="What to say to it.")],
    task: Which = "",
    deep: Annotated[bool, typer.Option("--deep", help="The deep model takes over.")] = False,
) -> None:
    """Say something to a task under way."""
    _act(of(ctx), task, "steer", line=line, deep=deep)


@app.command()
def approve(ctx: typer.Context, task: Which = "", hunks: Hunks = "") -> None:
    """Answer its question with yes."""
    _act(of(ctx), task, "approve", **_numbers(hunks))


@app.command()
def reject(ctx: typer.Context, task: Which = "") -> None:
    """Answer its question with no; a change is kept and can be applied later."""
    _act(of(ctx), task, "reject")


@app.command()
def cancel(ctx: typer.Context, task: Which = "") -> None:
    """Stop it."""
    _act(of(ctx), task, "cancel")


@app.command()
def apply(ctx: typer.Context, task: Which = "", hunks: Hunks = "") -> None:
    """Make the change that it proposed."""
    _act(of(ctx), task, "apply", **_numbers(hunks))


@app.command()
def undo(ctx: typer.Context, task: Which = "") -> None:
    """Take its change back."""
    _act(of(ctx), task, "undo")


@app.command()
def resume(
    ctx: typer.Context,
    task: Which = "",
    say: Annotated[str, typer.Option("--say", help="What else to say to it.")] = "",
) -> None:
    """Go on with a task that has ended."""
    _act(of(ctx), task, "resume", instruction=say)


def with_client(run: Invocation, work: Callable[[TaskClient], Awaitable[Any]]) -> Any:
    """What `work` gives, asked of this machine's gateway, which is started if need be."""
    from keystroke.clients.cli.shared import shared_gateway
    from keystroke.clients.tasks import TaskClient

    async def asked() -> Any:
        client = TaskClient(shared_gateway(run).locate)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(asked())


def _act(run: Invocation, task: str, what: str, **fields: Any) -> None:
    async def act(client: TaskClient) -> wire.Task:
        known = await _found(client, task)
        return await client.act(known.id, what, **fields)

    done = with_client(run, act)
    run.console.note(f"{done.id[-8:]} is {done.status}{f': {done.line}' if done.line else ''}")


async def _found(client: TaskClient, wanted: str) -> wire.Task:
    tasks = await client.all(str(workspace_root()))
    named = [task for task in tasks if task.id.endswith(wanted)] if wanted else tasks[:1]
    if not named:
        raise NotFound(f"there is no task {wanted} in this folder" if wanted else "there is no task here yet")
    return named[0]


def _shown(run: Invocation, event: wire.TaskEvent) -> None:
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


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
