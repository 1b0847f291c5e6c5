"""An asyncio client for a gateway's tasks, over HTTP.

A broken event stream is resumed after the last event received, at the gateway's current address; Unavailable
is raised only if that keeps failing. The server's errors are raised as their own classes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import httpx
import msgspec

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.gateway_http import error_from_body
from keystroke.errors import Unavailable
from keystroke.protocol.codec import decode_task_event
from keystroke.protocol.status import GatewayStatus
from keystroke.protocol.tasks import Task, TaskDiff, TaskEnded, TaskEvent, TaskList

_TIMEOUT = httpx.Timeout(5.0, read=60.0, pool=None)  # the gateway sends a keep-alive every 15 seconds
_RETRY_DELAYS = (0.1, 0.5, 2.0, 5.0)  # seconds
_PATH = "/v1/tasks"


class TaskClient:
    """`gateway`: its address, or a function that is called for the address before each request."""

    def __init__(self, gateway: GatewayAddress | Callable[[], Awaitable[GatewayAddress]]) -> None:
        self._gateway = gateway
        self._http = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def status(self) -> GatewayStatus:
        return msgspec.json.decode(await self._request("GET", "/v1/status"), type=GatewayStatus)

    async def create(self, workspace: str, instruction: str, **options: Any) -> Task:
        """Create a task; `options` are fields of TaskCreate."""
        body = {"workspace": workspace, "instruction": instruction, **options}
        return msgspec.json.decode(await self._request("POST", _PATH, body), type=Task)

    async def get(self, task: str) -> Task:
        return msgspec.json.decode(await self._request("GET", f"{_PATH}/{task}"), type=Task)

    async def list_tasks(self, workspace: str) -> list[Task]:
        data = await self._request("GET", _PATH, params={"workspace": workspace})
        return msgspec.json.decode(data, type=TaskList).data

    async def diff(self, task: str) -> TaskDiff:
        return msgspec.json.decode(await self._request("GET", f"{_PATH}/{task}/diff"), type=TaskDiff)

    async def act(self, task: str, action: str, **fields: Any) -> Task:
        """steer, approve, reject, cancel, apply, undo or resume."""
        return msgspec.json.decode(await self._request("POST", f"{_PATH}/{task}/{action}", fields), type=Task)

    async def events(self, task: str, after: int = 0) -> AsyncGenerator[TaskEvent, None]:
        """The task's events after sequence number `after`, up to its end; close the generator to leave early.
        Raises Unavailable if the gateway stays unreachable."""
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
                if failures == len(_RETRY_DELAYS):
                    raise Unavailable("The gateway ended and did not come back; try again.") from error
            await asyncio.sleep(_RETRY_DELAYS[failures])
            failures += 1

    async def _stream(self, task: str, after: int) -> AsyncGenerator[TaskEvent, None]:
        address = await self._locate()
        url = f"{address.url}{_PATH}/{task}/events"
        async with self._http.stream(
            "GET", url, params={"after": after}, headers=_auth_headers(address)
        ) as answer:
            if answer.status_code != 200:
                raise error_from_body(await answer.aread(), answer.status_code)
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield decode_task_event(line[6:])

    async def _locate(self) -> GatewayAddress:
        return self._gateway if isinstance(self._gateway, GatewayAddress) else await self._gateway()

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, params: dict[str, str] | None = None
    ) -> bytes:
        address = await self._locate()
        try:
            answer = await self._http.request(
                method, f"{address.url}{path}", json=body, params=params, headers=_auth_headers(address)
            )
        except httpx.HTTPError as error:
            raise Unavailable(f"The gateway does not answer ({type(error).__name__}); try again.") from None
        if answer.status_code != 200:
            raise error_from_body(answer.content, answer.status_code)
        return answer.content


def _auth_headers(address: GatewayAddress) -> dict[str, str]:
    return {"authorization": f"Bearer {address.token}"} if address.token else {}
