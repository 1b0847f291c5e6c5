"""The handlers of `/v1/tasks`.

A reader of a task's events that disconnects changes nothing; the task continues.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse

from keystroke.errors import InputError
from keystroke.gateway.api.endpoints import ApiRequest, Endpoints
from keystroke.gateway.transport.http import json_response
from keystroke.protocol import codec
from keystroke.protocol.tasks import (
    TaskAnswer,
    TaskApply,
    TaskCreate,
    TaskEvent,
    TaskList,
    TaskResume,
    TaskSteer,
)


async def create_task(api: Endpoints, call: ApiRequest[TaskCreate]) -> HttpResponse:
    task = await api.tasks.create(call.body, call.caller)
    if call.body.stream:
        return _stream(await api.tasks.events(task.id, call.caller, 0))
    return json_response(task)


async def list_tasks(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    workspace = call.http.query_params.get("workspace")
    return json_response(TaskList(data=await api.tasks.all(call.caller, workspace)))


async def get_task(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    return json_response(await api.tasks.get(call.path_value("task_id"), call.caller))


async def task_events(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    after = call.query_value("after") or call.http.headers.get("last-event-id") or "0"
    if not after.isascii() or not after.isdigit() or len(after) > 15:
        raise InputError("`after` must be the number of an event", param="after")
    return _stream(await api.tasks.events(call.path_value("task_id"), call.caller, int(after)))


async def task_diff(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    return json_response(await api.tasks.diff(call.path_value("task_id"), call.caller))


async def steer_task(api: Endpoints, call: ApiRequest[TaskSteer]) -> HttpResponse:
    return json_response(await api.tasks.steer(call.path_value("task_id"), call.caller, call.body))


async def approve_task(api: Endpoints, call: ApiRequest[TaskAnswer]) -> HttpResponse:
    return json_response(await api.tasks.answer(call.path_value("task_id"), call.caller, call.body, yes=True))


async def reject_task(api: Endpoints, call: ApiRequest[TaskAnswer]) -> HttpResponse:
    return json_response(
        await api.tasks.answer(call.path_value("task_id"), call.caller, call.body, yes=False)
    )


async def cancel_task(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    return json_response(await api.tasks.cancel(call.path_value("task_id"), call.caller))


async def apply_task(api: Endpoints, call: ApiRequest[TaskApply]) -> HttpResponse:
    return json_response(await api.tasks.apply(call.path_value("task_id"), call.caller, call.body.hunks))


async def undo_task(api: Endpoints, call: ApiRequest[None]) -> HttpResponse:
    return json_response(await api.tasks.undo(call.path_value("task_id"), call.caller))


async def resume_task(api: Endpoints, call: ApiRequest[TaskResume]) -> HttpResponse:
    return json_response(
        await api.tasks.resume(call.path_value("task_id"), call.caller, call.body.instruction)
    )


def _stream(batches: AsyncIterator[list[TaskEvent]]) -> HttpResponse:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_encode(batches), media_type="text/event-stream", headers=headers)


async def _encode(batches: AsyncIterator[list[TaskEvent]]) -> AsyncIterator[bytes]:
    async for batch in batches:
        yield b"".join(map(codec.encode_numbered, batch)) if batch else b": still here\n\n"
