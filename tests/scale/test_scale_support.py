"""The conversations that load a cluster ask again for what was lost, and for nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from scale_support import Load

ASKED = "0-1 word"


def event(**fields: object) -> bytes:
    data = f"data: {json.dumps(fields)}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


SAID = event(type="response.output_text.delta", delta=f"You said: {ASKED}")
END = event(type="response.completed", response={"id": "resp_1"})


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def conversed(*broken: bytes) -> AsyncIterator[tuple[Load, list[bytes]]]:
    """A load with a server that breaks the connection behind each of these answers and ends every later one
    as it should, and what that server is asked. The turn under way at the last of them is the last turn."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        asked.append(await reader.readexactly(length))  # all of it: closing on unread bytes resets
        load.stop = len(asked) >= len(broken)
        whole = len(asked) > len(broken)
        writer.write(HEAD + (SAID + END + b"0\r\n\r\n" if whole else broken[len(asked) - 1]))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()[:2]
        load = Load(f"http://{host}:{port}", ["key"])
        yield load, asked


@pytest.mark.parametrize(
    ("broken", "times"),
    [((SAID + END,), 1), ((b"",), 2), ((SAID, SAID), 3)],
    ids=["behind its end", "before its first word", "twice in the middle"],
)
async def test_a_turn_is_asked_for_again_only_where_its_connection_broke_before_its_end(
    broken: tuple[bytes, ...], times: int
) -> None:
    async with conversed(*broken) as (load, asked):
        await load.converse(0, words=1)
    assert len(asked) == times
    assert (load.again, load.terminal, load.failures) == (times - 1, {ASKED: 1}, [])
