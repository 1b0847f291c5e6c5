"""Runs the language server over standard streams, or over one TCP connection for debugging.

A message's handler starts before the next message is read, so every request sees the text it was made for.
Invalid messages are logged and skipped. Serving ends with the stream or the `exit` notification.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, BinaryIO

from pygls.exceptions import JsonRpcInvalidParams
from pygls.io_ import StdoutWriter
from pygls.protocol import JsonRPCProtocol

from keystroke.clients.lsp.early_initialize import FirstMessage
from keystroke.clients.lsp.frames import Reader, read_body

log = logging.getLogger("keystroke.lsp")


async def serve_stdio(
    protocol: JsonRPCProtocol, reader: Reader, target: BinaryIO, exited: asyncio.Event, first: FirstMessage
) -> None:
    """Serve until the editor closes its end or `exited` is set. `first` is the message already read."""
    writer = StdoutWriter(target)
    protocol.set_writer(writer if first.answered_id is None else _DropReply(writer, first.answered_id))
    _handle(protocol, first.body)
    await serve(protocol, reader, exited)


class _DropReply:
    """A writer that drops the reply to one request, which was answered already."""

    def __init__(self, writer: StdoutWriter, request: int | str) -> None:
        self._writer, self._request = writer, request
        self._pending = True

    def write(self, data: bytes) -> Any:
        if self._pending:
            message = json.loads(data.partition(b"\r\n\r\n")[2])
            if message.get("id") == self._request and "method" not in message:
                self._pending = False
                return None
        return self._writer.write(data)

    def close(self) -> Any:
        return self._writer.close()  # type: ignore[no-untyped-call]


async def serve_tcp(protocol: JsonRPCProtocol, exited: asyncio.Event, host: str, port: int) -> None:
    """One editor over TCP."""
    first: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
        asyncio.get_running_loop().create_future()
    )

    def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if first.done():
            writer.close()
        else:
            first.set_result((reader, writer))

    server = await asyncio.start_server(on_connect, host, port)
    where = server.sockets[0].getsockname()
    log.warning("waiting for an editor at %s:%s", where[0], where[1])
    async with server:
        reader, writer = await first
        protocol.set_writer(writer)
        await serve(protocol, reader, exited)
        writer.close()


async def serve(protocol: JsonRPCProtocol, reader: Reader, exited: asyncio.Event) -> None:
    ended = asyncio.create_task(exited.wait())
    try:
        while not exited.is_set():
            reading = asyncio.ensure_future(read_body(reader))
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return
            body = reading.result()
            if body is None:
                return
            _handle(protocol, body)
            await asyncio.sleep(0)  # let the handler start before the next message is read
    finally:
        ended.cancel()


def _handle(protocol: JsonRPCProtocol, body: bytes) -> None:
    message: Any = None
    try:
        message = json.loads(body)
        if isinstance(message, dict) and "jsonrpc" in message:
            protocol.handle_message(protocol.structure_message(message))
        else:
            log.warning("skipped a message that is not JSON-RPC")
    except BrokenPipeError:
        raise
    except Exception as error:
        log.warning("skipped a message that could not be handled: %s", error)
        if isinstance(message, dict) and "method" in message and isinstance(message.get("id"), (int, str)):
            # A request must get a response.
            refusal = JsonRpcInvalidParams("the parameters do not fit the method")
            protocol._send_response(message["id"], error=refusal.to_response_error())
