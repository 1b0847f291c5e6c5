"""LSP framing: reads and writes message bodies delimited by `Content-Length` headers.

Imports nothing heavy, because the first message is answered before the server is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import sys
from collections.abc import Awaitable
from typing import BinaryIO, Protocol

log = logging.getLogger("keystroke.lsp")
_LARGEST = 256 << 20  # bytes of a message
# Also after what a broken message left on the same line.
_LENGTH = re.compile(rb"content-length:[ \t]*(\d{1,18})[ \t]*\r?\n?$", re.IGNORECASE)


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
    """The body of the next message; None at the end of the stream. Whatever is not a message is skipped up to
    the next header, so that one broken message does not silence those after it."""
    length: int | None = None
    while True:
        try:
            line = await reader.readline()
            if not line:
                return None
            if found := _LENGTH.search(line):
                length = int(found[1])
                if length > _LARGEST:
                    log.warning("a message of %d bytes was skipped; the largest has %d", length, _LARGEST)
                    length = None
            elif line.strip():
                length = length if b":" in line else None  # another header, or no header at all
            elif length is not None:
                body = await reader.readexactly(length)
                return body if len(body) == length else None
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except ValueError:  # a line without end; the reader has dropped it
            log.warning("the input is not a stream of messages; the next header is looked for")
            length = None


async def _stdin(source: BinaryIO, target: BinaryIO) -> Reader:
    """Standard input, without a thread where the system allows it."""
    loop = asyncio.get_running_loop()
    try:
        # If both are one socket or terminal, non-blocking reads would make writes non-blocking too. Devices
        # such as /dev/null cannot be watched.
        about = os.fstat(source.fileno())
        watchable = not stat.S_ISCHR(about.st_mode) or source.isatty()
        if watchable and about[1:3] != os.fstat(target.fileno())[1:3]:
            reader = asyncio.StreamReader(limit=1 << 20)
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
            return reader
    except (OSError, ValueError, NotImplementedError):
        pass
    from pygls.io_ import StdinAsyncReader

    return StdinAsyncReader(source)
