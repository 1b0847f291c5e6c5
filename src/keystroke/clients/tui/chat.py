"""Sends the turns of a session to the gateway.

Sends only the new message while the server knows the rest, otherwise all of them. A listener receives the
answer; `stop` and `steer` act on the running turn.
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
    """Receives an answer."""

    def on_text(self, piece: str) -> None: ...
    def on_restart(self) -> None:
        """Discard the text so far: the answer starts over."""

    def on_redirect(self) -> None:
        """Keep the text so far; what follows answers the line that redirected it."""


class ChatClient:
    def __init__(self, address: GatewayAddress) -> None:
        self._client = Client(address.url, api_key=address.token or "none")
        self._stream: AnswerStream | None = None
        self._previous: str | None = None

    @property
    def answering(self) -> bool:
        return self._stream is not None

    def reset(self) -> None:
        """Make the next turn send all messages, after a rewind or a change of session."""
        self._previous = None

    async def close(self) -> None:
        await self._client.close()

    async def send_turn(
        self, messages: list[tuple[str, str]], model: str, listener: AnswerListener
    ) -> Response:
        """Answer the last of `messages`. Raises KeystrokeError."""
        try:
            return await self._stream_turn(
                messages if self._previous is None else messages[-1:], model, listener
            )
        except RemoteError as error:
            if error.code != "previous_response_not_found":
                raise
            self._previous = None
            return await self._stream_turn(messages, model, listener)

    async def steer(self, line: str) -> None:
        """Redirect the running answer."""
        if self._stream is not None:
            await self._stream.steer(line)

    async def stop(self) -> None:
        if self._stream is not None:
            await self._stream.cancel()

    async def _stream_turn(
        self, messages: list[tuple[str, str]], model: str, listener: AnswerListener
    ) -> Response:
        items = [Item(role=role, content=content) for role, content in messages]
        self._stream = await self._client.respond(items, model=model, previous_response_id=self._previous)
        try:
            async for event in self._stream:
                if isinstance(event, events.TextDelta):
                    listener.on_text(event.delta)
                elif isinstance(event, Restarted):
                    listener.on_restart()
                elif isinstance(event, events.IncompleteEvent) and _was_steered(event.response):
                    listener.on_redirect()
            response = self._stream.response
            if response is None:
                raise KeystrokeError("No answer arrived; send the message again.")
            if response.status == "failed" and response.error is not None:
                raise KeystrokeError(response.error.message)
            self._previous = response.id
            return response
        except KeystrokeError:
            self._previous = None
            raise
        finally:
            self._stream = None


def _was_steered(response: Response) -> bool:
    return response.incomplete_details is not None and response.incomplete_details.reason == "steered"


def format_speed(receipt: Receipt) -> str:
    """The decoding speed in tokens per second."""
    if receipt.output_tokens < 2 or receipt.decode_ms <= 0:
        return "– tok/s"
    return f"{receipt.output_tokens / receipt.decode_ms * 1e3:,.0f} tok/s"
