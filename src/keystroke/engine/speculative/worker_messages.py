"""What a model and the worker that drafts for it say to each other.

Values and their frames, nothing else: MessagePack behind four bytes of length, so that nothing that
comes back is unpickled. An answer is counted in units from its first: tokens where both models share a
vocabulary, bytes of text where they do not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from keystroke.engine.base import Sampling

LARGEST = 1 << 28  # bytes of a message; beyond this the other side has lost its place


class Address(msgspec.Struct, frozen=True, array_like=True):
    """A model behind an OpenAI-compatible server; the key stays in the environment."""

    base_url: str
    model: str
    api_key_env: str | None = None


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message: the model that drafts, and the settings it is run with, or where it runs."""

    model: str
    flags: dict[str, Any] = {}
    address: Address | None = None


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A sequence begins: with the prompt's tokens, or with the text before the answer and, where it fills a
    gap, behind it."""

    sequence: int
    room: int
    sampling: Sampling
    tokens: list[int] | None = None
    before: str = ""
    after: str | None = None


class Told(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The target has said more. `room`: pieces that may be drafted beyond it."""

    sequence: int
    room: int
    tokens: list[int] = []
    text: bytes = b""


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    sequence: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The model is loaded. `probe`: how it cuts a text, by which a shared vocabulary is recognised; None
    where only text is known of it."""

    name: str
    vocabulary: int
    probe: list[int] | None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    reason: str


class Piece(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The next piece of a guess. What another `branch` guessed before is void. `at`: where it stands in the
    answer; `chance`: the drafting model's own; `seconds`: what it took; `last`: nothing follows."""

    sequence: int
    branch: int
    at: int
    token: int | None
    text: bytes
    chance: float
    seconds: float
    last: bool


ToWorker = Load | Begin | Told | Forget
FromWorker = Ready | Failed | Piece
_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def framed(message: ToWorker | FromWorker) -> bytes:
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "big") + payload


class Frames:
    """Bytes in, payloads out, however they were cut. Raises ValueError for a length that cannot be."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._held += data
        while len(self._held) >= 4:
            size = int.from_bytes(self._held[:4], "big")
            if size > LARGEST:
                raise ValueError("a message beyond all use")
            if len(self._held) < 4 + size:
                return
            payload = bytes(self._held[4 : 4 + size])
            del self._held[: 4 + size]
            yield payload


def write_all(descriptor: int, data: bytes) -> None:
    """Blocks until all is written."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
