"""A client of the live channel: mirrors open buffers to a gateway and requests suggestions for them.

Notifications (open, change, close, feedback, cancel) never wait and never raise because the gateway is
missing: after a reconnect every open buffer is sent again. `complete` always returns, with a suggestion or
with `not_shown` and a reason. A lost gateway is reported once, its return once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keystroke.clients.gateway_socket import GatewayConnection
from keystroke.errors import InputError, KeystrokeError, ProtocolError, Unavailable, UsageError
from keystroke.protocol import live_messages as live
from keystroke.protocol.codec import decode_live_event, encode
from keystroke.text import Edit, apply_edits

_BACKOFF = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between attempts; the last one repeats
CompletionResult = live.Suggestion | live.NotShown
OnEvent = Callable[[live.LiveEvent], None]
OnNotice = Callable[[str], None]
OnPartial = Callable[[live.Suggestion], None]


@dataclass(slots=True)
class _PendingCompletion:
    buffer: str
    version: int
    answer: asyncio.Future[CompletionResult]
    on_partial: OnPartial | None


class LiveClient(GatewayConnection):
    """`on_event` receives every event except resyncs, which are answered here; `on_notice` receives one
    sentence when the gateway is lost and one when it is back. Use as an async context manager, or call
    `start` and `stop`."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8012",
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        on_event: OnEvent | None = None,
        on_notice: OnNotice | None = None,
    ) -> None:
        super().__init__(url, "/v1/live", api_key, tls)
        self._on_event = on_event or (lambda _event: None)
        self._on_notice = on_notice or (lambda _sentence: None)
        self._buffers: dict[str, live.BufferOpen] = {}  # what opens each on a new connection
        self._pending: dict[str, _PendingCompletion] = {}
        self._count = 0
        self._loss_reported = False

    async def start(self) -> bool:
        """Connect, or keep trying in the background if no gateway answers. Returns whether it connected.
        Raises what a retry cannot fix: a refused key, or a server that does not speak WebSocket."""
        try:
            await self._connect()
        except Unavailable as error:
            self._on_lost(error)
            return False
        return True

    async def stop(self) -> None:
        self._disconnect()
        self._fail_pending("disconnected")

    async def __aenter__(self) -> LiveClient:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def connected(self) -> bool:
        return self._socket is not None

    # Buffers

    def open(
        self,
        buffer: str,
        text: str,
        version: int = 0,
        *,
        path: str | None = None,
        root: str | None = None,
        language: str | None = None,
        cursor: int | None = None,
    ) -> None:
        """Open a buffer, or replace its whole text. `cursor`: the user's position, if known."""
        self._buffers[buffer] = live.BufferOpen(
            buffer=buffer, text=text, version=version, path=path, root=root, language=language, cursor=cursor
        )
        self._send(self._buffers[buffer])

    def change(
        self,
        buffer: str,
        version: int,
        edits: Sequence[Edit],
        cursor: int | None = None,
        *,
        text: str | None = None,
    ) -> None:
        """Apply edits one after another, as an editor reports them. `text` is the result, from a caller that
        already has it. Raises InputError (nothing changed) for a buffer that is not open, a version that does
        not increase, or an edit outside the text."""
        opened = self._buffer(buffer)
        if version <= opened.version:
            raise InputError(f"version {version} of {buffer:.200} is not newer than {opened.version}")
        if text is None:
            text = opened.text
            for edit in edits:
                text = apply_edits(text, (edit,))
        base, opened.text, opened.version = opened.version, text, version
        opened.cursor = cursor
        if len(edits) > live.MAX_DELTAS:
            self._send(opened)
            return
        deltas = [live.BufferEdit(e.start, e.end, e.text) for e in edits]
        self._send(live.BufferChange(buffer=buffer, base=base, version=version, edits=deltas, cursor=cursor))

    def move_cursor(self, buffer: str, cursor: int) -> None:
        """Report that the cursor moved without an edit."""
        opened = self._buffer(buffer)
        if 0 <= cursor <= len(opened.text) and cursor != opened.cursor:
            opened.cursor = cursor
            self._send(live.BufferCursor(buffer=buffer, version=opened.version, cursor=cursor))

    def close(self, buffer: str) -> None:
        if self._buffers.pop(buffer, None) is not None:
            self._send(live.BufferClose(buffer=buffer))

    def text(self, buffer: str) -> str:
        return self._buffer(buffer).text

    # Suggestions

    async def complete(
        self,
        buffer: str,
        cursor: int,
        *,
        invoked: bool = False,
        extent: live.Extent = "auto",
        selected: Edit | None = None,
        on_partial: OnPartial | None = None,
    ) -> CompletionResult:
        """Request a suggestion at `cursor` in the current text. `on_partial` receives the first lines of a
        block while the rest is generated. `selected`: the edit selected in the editor's own completion list.
        Cancelling the awaiting task cancels the request."""
        opened = self._buffer(buffer)
        self._count += 1
        name = f"c{self._count}"
        version = opened.version
        ask = live.Complete(
            id=name, buffer=buffer, version=version, cursor=cursor, invoked=invoked, extent=extent
        )
        if selected is not None:
            ask.selected = live.BufferEdit(selected.start, selected.end, selected.text)
        if not self._send(ask):
            return live.NotShown(id=name, buffer=buffer, version=version, reason="disconnected")
        answer: asyncio.Future[CompletionResult] = asyncio.get_running_loop().create_future()
        self._pending[name] = _PendingCompletion(buffer, version, answer, on_partial)
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(live.CancelRequest(id=name))
            raise
        finally:
            self._pending.pop(name, None)

    def feedback(self, suggestion: str, buffer: str, outcome: live.Outcome, length: int = 0) -> None:
        """Report the outcome of a suggestion, by its id."""
        self._send(live.Feedback(id=suggestion, buffer=buffer, outcome=outcome, length=length))

    # The socket

    def _buffer(self, buffer: str) -> live.BufferOpen:
        opened = self._buffers.get(buffer)
        if opened is None:
            raise InputError(f"the buffer {buffer:.200} is not open; open it first")
        return opened

    def _send(self, message: live.LiveRequest) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(encode(message))
        except Unavailable:
            return False  # `on_lost` reports it; a new connection sends all buffers again
        return True

    async def _connect(self) -> None:
        await self._open_socket()
        for opened in tuple(self._buffers.values()):
            self._send(opened)

    def _on_frame(self, frame: bytes) -> None:
        try:
            event = decode_live_event(frame)
        except (ProtocolError, UsageError):
            return  # an event that only newer clients know
        if isinstance(event, live.Resync):
            if event.buffer in self._buffers:
                self._send(self._buffers[event.buffer])
            return
        pending = None
        if isinstance(event, (live.Suggestion, live.NotShown, live.LiveError)) and event.id is not None:
            pending = self._pending.get(event.id)
        if pending is not None and not pending.answer.done():
            self._resolve(pending, event)
        self._on_event(event)

    def _resolve(self, pending: _PendingCompletion, event: live.LiveEvent) -> None:
        if isinstance(event, live.Suggestion) and not event.done:
            if pending.on_partial is not None:
                pending.on_partial(event)
        elif isinstance(event, (live.Suggestion, live.NotShown)):
            pending.answer.set_result(event)
        elif isinstance(event, live.LiveError):
            refused = live.NotShown(
                id=event.id or "", buffer=pending.buffer, version=pending.version, reason=event.error.code
            )
            pending.answer.set_result(refused)

    def _on_lost(self, error: KeystrokeError) -> None:
        self._socket = None
        self._fail_pending("disconnected")
        if self._closed:
            return
        if not self._loss_reported:
            self._loss_reported = True
            self._on_notice(f"{error.message.rstrip('.')}; suggestions pause until it is back.")
        if self._reconnecting is None or self._reconnecting.done():
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect())

    def _fail_pending(self, reason: str) -> None:
        for name, pending in tuple(self._pending.items()):
            if not pending.answer.done():
                pending.answer.set_result(
                    live.NotShown(id=name, buffer=pending.buffer, version=pending.version, reason=reason)
                )

    async def _reconnect(self) -> None:
        attempt = 0
        while not self._closed:
            await asyncio.sleep(_BACKOFF[min(attempt, len(_BACKOFF) - 1)])
            attempt += 1
            try:
                await self._connect()
            except Unavailable:
                continue
            except KeystrokeError as error:
                self._on_notice(error.message)  # a retry would not help: a refused key stays refused
                return
            self._loss_reported = False
            self._on_notice("The gateway is back; suggestions resume.")
            return
