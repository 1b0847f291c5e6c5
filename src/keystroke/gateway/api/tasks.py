"""The handlers of `/v1/tasks`.

A reader of a task's events that disconnects changes nothing; the task continues.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from keystroke.errors import InputError
from keystroke.gateway.api.endpoints import ApiRequest, Endpoints
from keystroke.gateway.transport.http import json_response
from keystroke.protocol import codec
from keystroke.protocol.tasks import TaskCreate, TaskEvent, TaskList

Handler = Callable[[Endpoints, ApiRequest[Any]], Awaitable[HttpResponse]]


async def create_task(api: Endpoints, call: ApiRequest[TaskCreate]) -> HttpResponse:
    task = await api.tasks.create(call.body, call.caller)
    if call.body.stream:
        return _stream(await api.tasks.events(task.id, call.caller, 0))
    return json_response(task)


async def list_tasks(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    workspace = call.http.query_params.get("workspace")
    return json_response(TaskList(data=await api.tasks.all(call.caller, workspace)))


def task_handler(act: Callable[..., Awaitable[Any]]) -> Handler:
    """A handler that replies with what `act` returns for the manager, the task's id, the caller and, where
    there is one, the body."""

    async def handle(api: Endpoints, call: ApiRequest[Any]) -> HttpResponse:
        body = () if call.body is None else (call.body,)
        return json_response(await act(api.tasks, call.path_value("task_id"), call.caller, *body))

    return handle


async def task_events(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    after = call.query_value("after") or call.http.headers.get("last-event-id") or "0"
    if not after.isascii() or not after.isdigit() or len(after) > 15:
        raise InputError("`after` must be the number of an event", param="after")
    return _stream(await api.tasks.events(call.path_value("task_id"), call.caller, int(after)))


def _stream(batches: AsyncIterator[list[TaskEvent]]) -> HttpResponse:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_encode(batches), media_type="text/event-stream", headers=headers)


async def _encode(batches: AsyncIterator[list[TaskEvent]]) -> AsyncIterator[bytes]:
    async for batch in batches:
        yield b"".join(map(codec.encode_numbered, batch)) if batch else b": still here\n\n"
