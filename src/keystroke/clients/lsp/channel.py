"""The language server's connection to the live channel.

Extends LiveClient in two ways: the gateway's address is looked up before each connection, so that a gateway
that restarted elsewhere is found, and `request` sends a request and returns its reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from keystroke.clients.connection import RemoteError
from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.gateway_socket import websocket_url
from keystroke.clients.live_connection import LiveClient, OnEvent, OnNotice
from keystroke.errors import EngineError, Unavailable
from keystroke.protocol import live_messages as live

ChannelRequest = live.ProblemsAsk | live.RefactorAsk | live.EditAsk | live.NextEditAsk
ChannelReply = live.Problems | live.Changes | live.NextEdit | live.NextEditDropped


class Channel(LiveClient):
    def __init__(
        self, locate: Callable[[], Awaitable[GatewayAddress]], *, on_event: OnEvent, on_notice: OnNotice
    ) -> None:
        super().__init__(on_event=self._on_live_event, on_notice=on_notice)
        self._locate = locate
        self._forward_event = on_event
        self._replies: dict[str, asyncio.Future[ChannelReply]] = {}

    async def request(self, request: ChannelRequest) -> ChannelReply:
        """The reply to a request. Raises RemoteError with the gateway's message, Unavailable without a
        gateway. Cancelling the awaiting task cancels the request."""
        reply: asyncio.Future[ChannelReply] = asyncio.get_running_loop().create_future()
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

    def _on_live_event(self, event: live.LiveEvent) -> None:
        names = event.answers if isinstance(event, live.NextEdit) else [getattr(event, "id", None)]
        for name in names:
            reply = self._replies.get(name or "")
            if reply is None or reply.done():
                continue
            if isinstance(event, live.LiveError):
                reply.set_exception(RemoteError(event.error, event.status))
            elif isinstance(event, ChannelReply):
                reply.set_result(event)
            elif isinstance(event, live.NotShown):
                reply.set_exception(EngineError(f"The request ended: {event.reason}."))
        self._forward_event(event)

    async def _connect(self) -> None:
        address = await self._locate()
        self._url = websocket_url(address.url, "/v1/live")
        self._api_key = address.token or self._api_key
        await super()._connect()

    def _fail_pending(self, reason: str) -> None:
        super()._fail_pending(reason)
        for reply in tuple(self._replies.values()):
            if not reply.done():
                reply.set_exception(Unavailable("The gateway was lost; try again shortly."))
