"""The conversation of a session, over the open socket.

Sends only what is new while the server knows the rest, and everything where it does not. What comes of a
turn is told to one listener; stopping and redirecting act on the turn under way.
"""

from __future__ import annotations

from typing import Protocol

from keystroke.clients.connection import AnswerStream, Client, RemoteError, Restarted
from keystroke.clients.gateway_address import GatewayAddress
from keystroke.errors import KeystrokeError
from keystroke.protocol import events
from keystroke.protocol.items import Item
from keystroke.protocol.response import Receipt, Response


class AnswerListener(Protocol):
    """Who shows the answer."""

    def on_text(self, piece: str) -> None: ...
    def on_restart(self) -> None:
        """What was heard is void: the answer begins anew."""

    def on_redirect(self) -> None:
        """What was heard stays; what comes now follows the line that redirected it."""


class ChatClient:
    def __init__(self, place: GatewayAddress) -> None:
        self._client = Client(place.url, api_key=place.token or "none")
        self._stream: AnswerStream | None = None
        self._previous: str | None = None

    @property
    def answering(self) -> bool:
        return self._stream is not None

    def reset(self) -> None:
        """The next turn sends everything: the conversation was rewound, or is another one."""
        self._previous = None

    async def close(self) -> None:
        await self._client.close()

    async def send_turn(
        self, messages: list[tuple[str, str]], model: str, listener: AnswerListener
    ) -> Response:
        """Answer the last of `messages`. Raises KeystrokeError."""
        try:
            return await self._turn(messages if self._previous is None else messages[-1:], model, listener)
        except RemoteError as error:
            if error.code != "previous_response_not_found":
                raise
            self._previous = None
            return await self._turn(messages, model, listener)

    async def steer(self, line: str) -> None:
        """Redirect the answer under way."""
        if self._stream is not None:
            await self._stream.steer(line)

    async def stop(self) -> None:
        if self._stream is not None:
            await self._stream.cancel()

    async def _turn(self, messages: list[tuple[str, str]], model: str, listener: AnswerListener) -> Response:
        items = [Item(role=role, content=content) for role, content in messages]
        self._stream = await self._client.respond(items, model=model, previous_response_id=self._previous)
        try:
            async for event in self._stream:
                if isinstance(event, events.TextDelta):
                    listener.on_text(event.delta)
                elif isinstance(event, Restarted):
                    listener.on_restart()
                elif isinstance(event, events.IncompleteEvent) and _steered(event.response):
                    listener.on_redirect()
            response = self._stream.response
            if response is None:
                raise KeystrokeError("The answer did not come; ask again.")
            if response.status == "failed" and response.error is not None:
                raise KeystrokeError(response.error.message)
            self._previous = response.id
            return response
        except KeystrokeError:
            self._previous = None
            raise
        finally:
            self._stream = None


def _steered(response: Response) -> bool:
    return response.incomplete_details is not None and response.incomplete_details.reason == "steered"


def format_speed(receipt: Receipt) -> str:
    """Tokens a second while it wrote."""
    if receipt.output_tokens < 2 or receipt.decode_ms <= 0:
        return "– tok/s"
    return f"{receipt.output_tokens / receipt.decode_ms * 1e3:,.0f} tok/s"
