"""The live channel as the language server holds it: wherever the gateway is, with answers to await.

Adds two things to the live client. Each connection first asks where the gateway is, so one that died and
was started again elsewhere is found. `ask` sends a request and returns its one answer, or raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from keystroke.clients.connection import RemoteError
from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.live_connection import LiveClient, OnEvent, OnNotice
from keystroke.errors import EngineError, Unavailable
from keystroke.protocol import live_messages as live

Ask = live.ProblemsAsk | live.RefactorAsk | live.EditAsk | live.NextEditAsk
Reply = live.Problems | live.Changes | live.NextEdit | live.NextEditDropped


class Channel(LiveClient):
    def __init__(
        self, locate: Callable[[], Awaitable[GatewayAddress]], *, on_event: OnEvent, on_notice: OnNotice
    ) -> None:
        super().__init__(on_event=self._received, on_notice=on_notice)
        self._locate = locate
        self._pass_on = on_event
        self._replies: dict[str, asyncio.Future[Reply]] = {}

    async def request(self, request: Ask) -> Reply:
        """The answer to a request. Raises RemoteError with the gateway's words, Unavailable where there is no
        gateway. Cancelling the awaiting task cancels the request."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[request.id] = reply
        try:
            if not self._send(request):
                raise Unavailable("The gateway is not running; try again shortly.")
            return await reply
        except asyncio.CancelledError:
            self._send(live.CancelRequest(id=request.id))
            raise
        finally:
            self._replies.pop(request.id, None)

    def new_id(self) -> str:
        self._count += 1
        return f"a{self._count}"

    def _received(self, event: live.LiveEvent) -> None:
        names = event.answers if isinstance(event, live.NextEdit) else [getattr(event, "id", None)]
        for name in names:
            reply = self._replies.get(name or "")
            if reply is None or reply.done():
                continue
            if isinstance(event, live.LiveError):
                reply.set_exception(RemoteError(event.error, event.status))
            elif isinstance(event, Reply):
                reply.set_result(event)
            elif isinstance(event, live.NotShown):
                reply.set_exception(EngineError(f"The request ended: {event.reason}."))
        self._pass_on(event)

    async def _connect(self) -> None:
        place = await self._locate()
        self._url = f"ws{place.url.rstrip('/').removesuffix('/v1').removeprefix('http')}/v1/live"
        self._api_key = place.token or self._api_key
        await super()._connect()

    def _give_up(self, reason: str) -> None:
        super()._give_up(reason)
        for reply in tuple(self._replies.values()):
            if not reply.done():
                reply.set_exception(Unavailable("The gateway went away; try again shortly."))
