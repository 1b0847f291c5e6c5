"""Our sockets keep RFC 6455, by a client that writes its frames byte by byte: the cases of the Autobahn test
suite (`bench/autobahn.py` runs the suite itself) in short."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from bench.autobahn import EchoServer

TEXT, BINARY, CLOSE, PING, PONG, CONT = 1, 2, 8, 9, 10, 0


class Wire:
    """One connection; frames in and out as they are."""

    def __init__(self, port: int, path: str = "/") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.socket.sendall(
            b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            % path.encode()
        )
        head = b""
        while b"\r\n\r\n" not in head:
            head += self.socket.recv(1)
        assert head.startswith(b"HTTP/1.1 101")
        assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head

    def send(
        self,
        opcode: int,
        data: bytes = b"",
        *,
        fin: bool = True,
        rsv: int = 0,
        mask: bool = True,
        chop: int = 0,
        key: bytes | None = None,
    ) -> None:
        key = (os.urandom(4) if key is None else key) if mask else b""
        size = len(data)
        short = size if size < 126 else 126 if size < 65_536 else 127
        head = bytes([(fin << 7) | (rsv << 4) | opcode, (mask << 7) | short])
        head += struct.pack("!H", size) if short == 126 else struct.pack("!Q", size) if short == 127 else b""
        masked = bytes(b ^ key[i % 4] for i, b in enumerate(data)) if any(key) else data
        whole = head + key + masked
        for at in range(0, len(whole), chop or len(whole)):
            self.socket.sendall(whole[at : at + (chop or len(whole))])

    def receive(self) -> tuple[int, bytes]:
        first, second = self._exactly(2)
        assert first & 0x80, "the server does not split its messages"
        assert not first & 0x70
        assert not second & 0x80, "a server does not mask"
        size = short = second & 0x7F
        if short >= 126:
            size = int.from_bytes(self._exactly(2 if short == 126 else 8), "big")
        return first & 0x0F, self._exactly(size)

    def closed(self) -> int | None:
        """The code the server closes with; None where it sent none."""
        opcode, data = self.receive()
        assert opcode == CLOSE
        return struct.unpack("!H", data[:2])[0] if data else None

    def _exactly(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = self.socket.recv(size - len(parts))
            assert part, "the connection ended"
            parts += part
        return parts


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with EchoServer() as listening:
        yield listening


@pytest.fixture
def wire(port: int) -> Iterator[Wire]:
    made = Wire(port)
    yield made
    made.socket.close()


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 128, 65_535, 65_536, 300_000])
@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_messages_of_every_length_come_back(wire: Wire, opcode: int, size: int) -> None:
    data = b"*" * size if opcode == TEXT else bytes(range(256)) * (size // 256) + b"\xfe" * (size % 256)
    wire.send(opcode, data)
    assert wire.receive() == (opcode, data)


@pytest.mark.parametrize("chop", [1, 997])
def test_frames_may_come_in_any_pieces(wire: Wire, chop: int) -> None:
    wire.send(TEXT, b"x" * 2000, chop=chop)
    assert wire.receive() == (TEXT, b"x" * 2000)


@pytest.mark.parametrize("payload", [b"", b"hello", b"\x00\xff\xfe", b"\xfe" * 125])
def test_a_ping_is_answered_with_what_it_holds(wire: Wire, payload: bytes) -> None:
    wire.send(PONG, b"unsolicited")
    for _ in range(3):
        wire.send(PING, payload)
        assert wire.receive() == (PONG, payload)


def test_a_flood_of_pings_beside_messages_is_answered_in_order(wire: Wire) -> None:
    for number in range(200):
        wire.send(PING, b"%d" % number)
    wire.send(TEXT, b"after")
    heard = [wire.receive() for _ in range(201)]
    assert heard == [*((PONG, b"%d" % n) for n in range(200)), (TEXT, b"after")]


def test_fragments_with_a_ping_between_them_are_one_message(wire: Wire) -> None:
    wire.send(TEXT, b"frag", fin=False)
    wire.send(PING, b"p")
    wire.send(CONT, b"", fin=False)
    wire.send(CONT, b"ment")
    assert wire.receive() == (PONG, b"p")
    assert wire.receive() == (TEXT, b"fragment")


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
def test_a_message_in_thousands_of_tiny_fragments_comes_back_whole(wire: Wire, opcode: int) -> None:
    data = b"0123456789abcdef" * 1024
    wire.send(opcode, data[:4], fin=False)
    for at in range(4, len(data) - 4, 4):
        wire.send(CONT, data[at : at + 4], fin=False)
    wire.send(CONT, data[-4:])
    assert wire.receive() == (opcode, data)


def test_a_character_may_be_cut_by_fragments(wire: Wire) -> None:
    text = "κόσμε 🎉".encode()
    wire.send(TEXT, text[:1], fin=False)
    for at in range(1, len(text) - 1):
        wire.send(CONT, text[at : at + 1], fin=False)
    wire.send(CONT, text[-1:])
    assert wire.receive() == (TEXT, text)


@dataclass(frozen=True)
class Sent:
    opcode: int
    data: bytes
    fin: bool = True
    rsv: int = 0
    mask: bool = True


BROKEN = {
    "reserved bit": (Sent(TEXT, b"x", rsv=4),),
    "reserved bit of a ping": (Sent(PING, b"x", rsv=1),),
    **{f"opcode {code}": (Sent(code, b""),) for code in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    "long ping": (Sent(PING, b"x" * 126),),
    "split ping": (Sent(PING, b"x", fin=False),),
    "continuation of nothing": (Sent(CONT, b"x"),),
    "a message inside another": (Sent(TEXT, b"a", fin=False), Sent(TEXT, b"b")),
    "no mask": (Sent(TEXT, b"x", mask=False),),
    "close of one byte": (Sent(CLOSE, b"x"),),
    "long close": (Sent(CLOSE, struct.pack("!H", 1000) + b"x" * 124),),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_breaks_the_protocol_is_closed_with_1002(wire: Wire, case: str) -> None:
    for frame in BROKEN[case]:
        wire.send(frame.opcode, frame.data, fin=frame.fin, rsv=frame.rsv, mask=frame.mask)
    assert wire.closed() == 1002


@pytest.mark.parametrize(
    "text", [b"\xce\xba\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x80", b"a\xc3", b"\xf4\x90\x80\x80"]
)
def test_text_that_is_none_is_closed_with_1007(wire: Wire, text: bytes) -> None:
    wire.send(TEXT, text)
    assert wire.closed() == 1007


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1011, 3000, 3999, 4000, 4999])
def test_a_close_is_answered_with_its_own_code(wire: Wire, code: int) -> None:
    wire.send(CLOSE, struct.pack("!H", code) + "gründe".encode())
    assert wire.closed() == code
    assert wire.socket.recv(1) == b""


def test_a_close_in_the_middle_of_a_message_is_a_close(wire: Wire) -> None:
    wire.send(TEXT, b"half", fin=False)
    wire.send(CLOSE, struct.pack("!H", 1000))
    wire.send(CONT, b"never read")
    assert wire.closed() == 1000


def test_a_close_without_a_code_is_answered(wire: Wire) -> None:
    wire.send(CLOSE)
    assert wire.closed() in (None, 1000)


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999])
def test_a_code_that_nobody_may_send_is_closed_with_1002(wire: Wire, code: int) -> None:
    wire.send(CLOSE, struct.pack("!H", code))
    assert wire.closed() == 1002


def test_a_reason_that_is_no_text_is_closed_with_1007(wire: Wire) -> None:
    wire.send(CLOSE, struct.pack("!H", 1000) + b"\xce\xba\xed\xa0\x80")
    assert wire.closed() == 1007


def test_what_comes_after_a_close_is_not_answered(wire: Wire) -> None:
    wire.send(CLOSE, struct.pack("!H", 1000))
    assert wire.closed() == 1000
    assert wire.socket.recv(1) == b""
