"""LSP framing: reads and writes message bodies delimited by `Content-Length` headers.

Imports nothing heavy, because the first message is answered before the server is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable
from typing import BinaryIO, Protocol

log = logging.getLogger("keystroke.lsp")


class Reader(Protocol):
    def readline(self) -> Awaitable[bytes]: ...
    def readexactly(self, n: int, /) -> Awaitable[bytes]: ...


async def standard_streams() -> tuple[Reader, BinaryIO]:
    """A reader of standard input, and standard output."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a stray print must not corrupt the message stream
    return await _stdin(source, target), target


def frame(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


async def read_body(reader: Reader) -> bytes | None:
    """The body of the next message; None at the end of the stream."""
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
    """Standard input, without a thread where the system allows it."""
    loop = asyncio.get_running_loop()
    try:
        # If both are one socket or terminal, non-blocking reads would make writes non-blocking too.
        if os.fstat(source.fileno())[1:3] != os.fstat(target.fileno())[1:3]:
            reader = asyncio.StreamReader(limit=1 << 20)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
            return reader
    except (OSError, ValueError, NotImplementedError):
        pass
    from pygls.io_ import StdinAsyncReader

    return StdinAsyncReader(source)
