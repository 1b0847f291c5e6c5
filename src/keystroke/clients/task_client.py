"""A gateway's tasks as a client with an event loop asks for them.

Speaks the protocol's types over HTTP. A stream of events that breaks is taken up again after the last
event seen, at whatever place the gateway is then; only one that stays away is Unavailable. What the server
refuses is raised as the error it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx
import msgspec

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.gateway_http import error_from_detail
from keystroke.errors import KeystrokeError, ProtocolError, Unavailable
from keystroke.protocol.codec import decode_task_event
from keystroke.protocol.response import ErrorBody
from keystroke.protocol.status import GatewayStatus
from keystroke.protocol.tasks import Task, TaskDiff, TaskEnded, TaskEvent, TaskList

_CONNECT = httpx.Timeout(5.0, read=60.0, pool=None)  # signs of life come every quarter of a minute
_AGAIN = (0.1, 0.5, 2.0, 5.0)  # seconds between attempts to come back
_PATH = "/v1/tasks"


class TaskClient:
    """`gateway`: its place, or who says each time it is asked where the gateway is."""

    def __init__(self, gateway: GatewayAddress | Callable[[], Awaitable[GatewayAddress]]) -> None:
        self._gateway = gateway
        self._http = httpx.AsyncClient(timeout=_CONNECT, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def status(self) -> GatewayStatus:
        return msgspec.json.decode(await self._asked("GET", "/v1/status"), type=GatewayStatus)

    async def create(self, workspace: str, instruction: str, **options: Any) -> Task:
        """Give a task; `options` are fields of TaskCreate."""
        body = {"workspace": workspace, "instruction": instruction, **options}
        return msgspec.json.decode(await self._asked("POST", _PATH, body), type=Task)

    async def get(self, task: str) -> Task:
        return msgspec.json.decode(await self._asked("GET", f"{_PATH}/{task}"), type=Task)

    async def list_tasks(self, workspace: str) -> list[Task]:
        data = await self._asked("GET", _PATH, params={"workspace": workspace})
        return msgspec.json.decode(data, type=TaskList).data

    async def diff(self, task: str) -> TaskDiff:
        return msgspec.json.decode(await self._asked("GET", f"{_PATH}/{task}/diff"), type=TaskDiff)

    async def act(self, task: str, what: str, **fields: Any) -> Task:
        """steer, approve, reject, cancel, apply, undo or resume."""
        return msgspec.json.decode(await self._asked("POST", f"{_PATH}/{task}/{what}", fields), type=Task)

    async def events(self, task: str, after: int = 0) -> AsyncGenerator[TaskEvent, None]:
        """Its events after a number, up to its end; close it where you leave before. Raises Unavailable where
        the gateway stays away."""
        failures = 0
        while True:
            try:
                async with aclosing(self._stream(task, after)) as stream:
                    async for event in stream:
                        after, failures = event.sequence_number, 0
                        yield event
                        if isinstance(event, TaskEnded):
                            return
                return
            except (httpx.HTTPError, Unavailable) as error:
                if failures == len(_AGAIN):
                    raise Unavailable("The gateway went away and did not come back; try again.") from error
            await asyncio.sleep(_AGAIN[failures])
            failures += 1

    async def _stream(self, task: str, after: int) -> AsyncGenerator[TaskEvent, None]:
        place = await self._locate()
        url = f"{place.url}{_PATH}/{task}/events"
        async with self._http.stream("GET", url, params={"after": after}, headers=_key(place)) as answer:
            if answer.status_code != 200:
                raise _refused(answer.status_code, await answer.aread())
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield decode_task_event(line[6:])

    async def _locate(self) -> GatewayAddress:
        return self._gateway if isinstance(self._gateway, GatewayAddress) else await self._gateway()

    async def _asked(
        self, method: str, path: str, body: dict[str, Any] | None = None, params: dict[str, str] | None = None
    ) -> bytes:
        place = await self._locate()
        try:
            answer = await self._http.request(
                method, f"{place.url}{path}", json=body, params=params, headers=_key(place)
            )
        except httpx.HTTPError as error:
            raise Unavailable(f"The gateway does not answer ({type(error).__name__}); try again.") from None
        if answer.status_code != 200:
            raise _refused(answer.status_code, answer.content)
        return answer.content


def _key(place: GatewayAddress) -> dict[str, str]:
    return {"authorization": f"Bearer {place.token}"} if place.token else {}


def _refused(status: int, body: bytes) -> KeystrokeError:
    try:
        return error_from_detail(msgspec.json.decode(body, type=ErrorBody).error, status)
    except msgspec.MsgspecError:
        return ProtocolError(f"The gateway answered {status} without saying why.")
