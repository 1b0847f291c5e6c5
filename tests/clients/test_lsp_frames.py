"""Messages of a language client are read whatever came before them."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import pytest

from keystroke.clients.lsp.frames import frame, read_body

GOOD = b'{"jsonrpc":"2.0","id":9,"method":"shutdown"}'


async def bodies(data: bytes, limit: int = 1 << 16) -> list[bytes]:
    reader = asyncio.StreamReader(limit=limit)
    reader.feed_data(data)
    reader.feed_eof()
    found = []
    while (body := await read_body(reader)) is not None:
        found.append(body)
    return found


@pytest.mark.parametrize(
    "broken",
    [
        b"Content-Length: 99999999999999\r\n\r\n{}",
        b"Content-Length: -5\r\n\r\n{}",
        b"Content-Length: five\r\n\r\n{}",
        b"Content-Length: 1" + b"0" * 40 + b"\r\n\r\n{}",
        b"\x00\xff\xfe" * 1000,
        b"x" * 200_000 + b"\n",
        b"\r\n\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        frame(b"{}") + b"left over",
    ],
)
async def test_after_a_broken_message_the_next_one_is_read(broken: bytes) -> None:
    assert (await bodies(broken + frame(GOOD)))[-1] == GOOD


async def test_other_headers_and_any_case_are_read() -> None:
    data = b"Content-Type: x; charset=utf-8\r\ncontent-length:2\r\nX-Other: 1\r\n\r\n{}" + frame(GOOD)
    assert await bodies(data) == [b"{}", GOOD]


async def test_a_cut_message_ends_the_stream() -> None:
    assert await bodies(frame(GOOD)[:-3]) == []


async def test_any_bytes_end_or_are_skipped() -> None:
    choose = random.Random(5)
    parts = [b"Content-Length: ", b"3", b"\r\n", b"\n", b":", b"{}", b"\xff", frame(b"{}"), b" ", b"-1"]
    for _ in range(300):
        data = b"".join(choose.choices(parts, k=choose.randrange(12)))
        await asyncio.wait_for(bodies(data, 64), 10)


def test_input_from_the_null_device_ends_the_server() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "keystroke", "lsp"], stdin=subprocess.DEVNULL, capture_output=True, timeout=120
    )
    assert ended.returncode == 1  # as after any end of input without `shutdown`
    assert b"Traceback" not in ended.stderr
