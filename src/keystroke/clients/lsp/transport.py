"""Messages in and out of the language server: standard streams, or one TCP connection to debug with.

Law: reads one message at a time and lets its handler begin before the next is read, so every request sees
the text it was asked about. Bytes that are no message are logged and skipped. Ends with the stream, or when
the editor says exit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable
from typing import Any, BinaryIO, Protocol

from pygls.exceptions import JsonRpcInvalidParams
from pygls.io_ import StdinAsyncReader, StdoutWriter
from pygls.protocol import JsonRPCProtocol

log = logging.getLogger("keystroke.lsp")


class Reader(Protocol):
    def readline(self) -> Awaitable[bytes]: ...
    def readexactly(self, n: int, /) -> Awaitable[bytes]: ...


async def serve_stdio(protocol: JsonRPCProtocol, over: asyncio.Event) -> None:
    """Until the editor closes its end, or `over` is set."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a stray print must not end up between messages
    protocol.set_writer(StdoutWriter(target))
    await serve(protocol, await _stdin(source, target), over)


async def serve_tcp(protocol: JsonRPCProtocol, over: asyncio.Event, host: str, port: int) -> None:
    """One editor over TCP."""
    first: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
        asyncio.get_running_loop().create_future()
    )

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if first.done():
            writer.close()
        else:
            first.set_result((reader, writer))

    server = await asyncio.start_server(connected, host, port)
    where = server.sockets[0].getsockname()
    log.warning("waiting for an editor at %s:%s", where[0], where[1])
    async with server:
        reader, writer = await first
        protocol.set_writer(writer)
        await serve(protocol, reader, over)
        writer.close()


async def serve(protocol: JsonRPCProtocol, reader: Reader, over: asyncio.Event) -> None:
    ended = asyncio.create_task(over.wait())
    try:
        while not over.is_set():
            reading = asyncio.ensure_future(_body(reader))
            await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                return
            body = reading.result()
            if body is None:
                return
            _handle(protocol, body)
            await asyncio.sleep(0)  # the handler of a request begins before the next message is read
    finally:
        ended.cancel()


def _handle(protocol: JsonRPCProtocol, body: bytes) -> None:
    message: Any = None
    try:
        message = json.loads(body)
        if isinstance(message, dict) and "jsonrpc" in message:
            protocol.handle_message(protocol.structure_message(message))
        else:
            log.warning("a message is no JSON-RPC message and was skipped")
    except BrokenPipeError:
        raise
    except Exception as error:
        log.warning("a message could not be handled and was skipped: %s", error)
        if isinstance(message, dict) and "method" in message and isinstance(message.get("id"), (int, str)):
            # Whoever asked must not wait forever.
            refusal = JsonRpcInvalidParams("the parameters do not fit the method")
            protocol._send_response(message["id"], error=refusal.to_response_error())


async def _body(reader: Reader) -> bytes | None:
    """The next message; None at the end of the stream."""
    length: int | None = None
    try:
        while True:
            line = await reader.readline()
            if not line:
                return None
            name, colon, value = line.partition(b":")
            if colon and name.strip().lower() == b"content-length" and value.strip().isdigit():
                length = int(value)
            elif not line.strip() and length is not None:
                body = await reader.readexactly(length)
                return body if len(body) == length else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    except ValueError:
        log.warning("the input is not a stream of messages")
        return None


async def _stdin(source: BinaryIO, target: BinaryIO) -> Reader:
    """Standard input without a thread in between where the system allows it."""
    loop = asyncio.get_running_loop()
    try:
        # Reading without blocking makes writing so too where both are one socket or terminal.
        if os.fstat(source.fileno())[1:3] != os.fstat(target.fileno())[1:3]:
            reader = asyncio.StreamReader(limit=1 << 20)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
            return reader
    except (OSError, ValueError, NotImplementedError):
        pass
    return StdinAsyncReader(source)
