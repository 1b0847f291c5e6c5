"""`/v1/tasks`: a task made, told by events, steered, answered, taken back.

One small function an address: read, ask the tasks, write. A listener that leaves changes nothing; a task
goes on without one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.responses import StreamingResponse
from starlette.routing import Route

from keystroke.errors import InputError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.tasks.desk import Tasks
from keystroke.gateway.transport.http import json_response, read_body
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

Admit = Callable[[Any], Caller]


class TaskEndpoints:
    def __init__(self, tasks: Tasks, admit: Admit, max_body: int) -> None:
        self.tasks = tasks
        self._admit, self._max_body = admit, max_body

    def routes(self) -> list[Route]:
        one = "/v1/tasks/{task_id}"
        acts = {
            "steer": self.steer,
            "approve": self.approve,
            "reject": self.reject,
            "cancel": self.cancel,
            "apply": self.apply,
            "undo": self.undo,
            "resume": self.resume,
        }
        return [
            Route("/v1/tasks", self.create, methods=["POST"]),
            Route("/v1/tasks", self.all, methods=["GET"]),
            Route(one, self.get, methods=["GET"]),
            Route(f"{one}/events", self.events, methods=["GET"]),
            Route(f"{one}/diff", self.diff, methods=["GET"]),
            *(Route(f"{one}/{name}", act, methods=["POST"]) for name, act in acts.items()),
        ]

    async def create(self, request: Request) -> HttpResponse:
        caller = self._admit(request.headers)
        wanted = codec.decode_task(await read_body(request, self._max_body), TaskCreate)
        task = await self.tasks.create(wanted, caller)
        if wanted.stream:
            return _stream(await self.tasks.events(task.id, caller, 0))
        return json_response(task)

    async def all(self, request: Request) -> HttpResponse:
        caller = self._admit(request.headers)
        return json_response(
            TaskList(data=await self.tasks.all(caller, request.query_params.get("workspace")))
        )

    async def get(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        return json_response(await self.tasks.get(task, caller))

    async def events(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        after = request.query_params.get("after") or request.headers.get("last-event-id") or "0"
        if not after.isascii() or not after.isdigit() or len(after) > 15:
            raise InputError("`after` must be the number of an event", param="after")
        return _stream(await self.tasks.events(task, caller, int(after)))

    async def diff(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        return json_response(await self.tasks.diff(task, caller))

    async def steer(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        return json_response(await self.tasks.steer(task, caller, await self._body(request, TaskSteer)))

    async def approve(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        wanted = await self._body(request, TaskAnswer)
        return json_response(await self.tasks.answer(task, caller, wanted, yes=True))

    async def reject(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        wanted = await self._body(request, TaskAnswer)
        return json_response(await self.tasks.answer(task, caller, wanted, yes=False))

    async def cancel(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        return json_response(await self.tasks.cancel(task, caller))

    async def apply(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        wanted = await self._body(request, TaskApply)
        return json_response(await self.tasks.apply(task, caller, wanted.hunks))

    async def undo(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        return json_response(await self.tasks.undo(task, caller))

    async def resume(self, request: Request) -> HttpResponse:
        caller, task = self._who(request)
        wanted = await self._body(request, TaskResume)
        return json_response(await self.tasks.resume(task, caller, wanted.instruction))

    def _who(self, request: Request) -> tuple[Caller, str]:
        return self._admit(request.headers), request.path_params["task_id"]

    async def _body(self, request: Request, kind: type[codec.T]) -> codec.T:
        """A body that may be left out."""
        return codec.decode_task(await read_body(request, self._max_body) or b"{}", kind)


def _stream(batches: AsyncIterator[list[TaskEvent]]) -> HttpResponse:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_encoded(batches), media_type="text/event-stream", headers=headers)


async def _encoded(batches: AsyncIterator[list[TaskEvent]]) -> AsyncIterator[bytes]:
    async for batch in batches:
        yield b"".join(map(codec.encode_numbered, batch)) if batch else b": still here\n\n"
