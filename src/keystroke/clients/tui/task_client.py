"""A gateway's tasks, for whoever shows them.

Law: speaks the protocol's types over HTTP. Events are followed by number: a stream that breaks is asked for
again from the last one seen, so nothing is shown twice and nothing is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from keystroke.clients.gateway_http import refusal
from keystroke.clients.place import Place
from keystroke.errors import KeystrokeError, ProtocolError, Unavailable
from keystroke.protocol.codec import decode_task_event
from keystroke.protocol.response import ErrorBody
from keystroke.protocol.status import Status
from keystroke.protocol.tasks import Task, TaskEnded, TaskEvent, TaskList

_PAUSE = 0.5  # seconds before a lost stream is asked for again
_TRIES = 20  # times in a row


class TaskClient:
    def __init__(self, place: Place) -> None:
        headers = {"authorization": f"Bearer {place.token}"} if place.token else {}
        self._http = httpx.AsyncClient(
            base_url=place.url, headers=headers, timeout=httpx.Timeout(30, read=None)
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def status(self) -> Status:
        return msgspec.json.decode(await self._ask("GET", "/v1/status"), type=Status)

    async def create(self, workspace: str, instruction: str, **fields: Any) -> Task:
        """Begin a task. Raises what the gateway refuses it with."""
        body = {"workspace": workspace, "instruction": instruction, **fields}
        return msgspec.json.decode(await self._ask("POST", "/v1/tasks", body), type=Task)

    async def get(self, task: str) -> Task:
        return msgspec.json.decode(await self._ask("GET", f"/v1/tasks/{task}"), type=Task)

    async def list(self, workspace: str) -> list[Task]:
        answer = await self._ask("GET", str(httpx.URL("/v1/tasks", params={"workspace": workspace})))
        return msgspec.json.decode(answer, type=TaskList).data

    async def act(self, task: str, what: str, **fields: Any) -> Task:
        """Steer, approve, reject, cancel, apply, undo or resume. Raises what the gateway refuses it with."""
        return msgspec.json.decode(await self._ask("POST", f"/v1/tasks/{task}/{what}", fields), type=Task)

    async def events(self, task: str, after: int = 0) -> AsyncIterator[TaskEvent]:
        """The task's events after number `after`, until it has ended. Raises Unavailable where the gateway
        stays away."""
        lost = 0
        while True:
            try:
                address = f"/v1/tasks/{task}/events?after={after}"
                async with self._http.stream("GET", address) as answer:
                    if answer.status_code != 200:
                        raise _refused(answer.status_code, await answer.aread())
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: "):
                            continue
                        lost = 0
                        event = decode_task_event(line[6:])
                        after = event.sequence_number
                        yield event
                        if isinstance(event, TaskEnded):
                            return
                return
            except httpx.HTTPError as error:
                lost += 1
                if lost > _TRIES:
                    raise Unavailable("The gateway does not come back; start keystroke again.") from error
                await asyncio.sleep(_PAUSE)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        try:
            answer = await self._http.request(method, path, content=data)
        except httpx.HTTPError as error:
            raise Unavailable(
                f"The gateway cannot be reached ({type(error).__name__}); try again."
            ) from error
        if answer.status_code != 200:
            raise _refused(answer.status_code, answer.content)
        return answer.content


def _refused(status: int, body: bytes) -> KeystrokeError:
    try:
        return refusal(msgspec.json.decode(body, type=ErrorBody).error, status)
    except msgspec.MsgspecError:
        return ProtocolError(f"The gateway answered {status} without saying why.")
