"""Messages on their way to one client: a bounded buffer with back-pressure.

Messages keep their order and are never dropped while the client is connected. When it falls behind,
consecutive text deltas are joined; when it falls further behind, or a write takes long, its answers are
paused. `full` reports that more bytes wait than a client may be owed. After a disconnect nothing is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import groupby
from typing import Any

from keystroke.protocol.codec import encode
from keystroke.protocol.events import TextDelta

HIGH, LOW = 512, 64  # waiting messages at which answers are paused, and resumed
BLOCKED = 1.0  # seconds of a write after which answers are paused: the client stopped reading long before
BEHIND = 8  # messages that may wait before deltas are joined
FULL = 32 << 20  # bytes that may wait; answers are paused long before, so such a client only sends requests


class Outbox:
    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._messages: deque[tuple[Any, Any]] = deque()  # (answer or None, message)
        self._pause, self._resume = pause, resume
        self._news = asyncio.Event()  # there are messages, or it was closed
        self._busy = False  # a batch is being written
        self._writing_since = 0.0
        self.bytes = 0  # that wait
        self.paused = False
        self.closed = False

    def put(self, owner: Any, messages: list[Any]) -> None:
        """Queue messages of one answer; after `close` they are dropped."""
        if self.closed:
            return
        queue = self._messages
        for message in messages:
            queue.append((owner, message))
            self.bytes += len(message.delta) if type(message) is TextDelta else len(encode(message))
        blocked = self._busy and time.perf_counter() - self._writing_since > BLOCKED
        if not self.paused and (blocked or len(queue) > HIGH):
            self.paused = True
            self._pause()
        self._news.set()

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being written."""
        return not self._messages and not self._busy

    @property
    def full(self) -> bool:
        return self.bytes > FULL

    def close(self, *, gone: bool = False) -> None:
        """Accept nothing more. What waits is still delivered, unless the client is `gone`."""
        self.closed = True
        if gone:
            self._messages.clear()
            self.bytes = 0
        self._news.set()

    async def next_batch(self) -> list[tuple[Any, Any]] | None:
        """Everything that waits, joined where the client is behind; None once closed and empty."""
        while not self._messages:
            if self.closed:
                return None
            self._news.clear()
            await self._news.wait()
        self._busy, self._writing_since = True, time.perf_counter()
        taken = list(self._messages)
        self._messages.clear()
        self.bytes = 0
        return taken if len(taken) <= BEHIND else _join_deltas(taken)

    def mark_written(self) -> None:
        """The last batch was written: resume paused answers."""
        self._busy = False
        if self.paused and len(self._messages) <= LOW:
            self.paused = False
            self._resume()


def _join_deltas(batch: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """The batch with the deltas of one item that follow each other joined."""
    out: list[tuple[Any, Any]] = []
    for item, group in groupby(batch, lambda pair: pair[1].item_id if type(pair[1]) is TextDelta else None):
        run = list(group)
        out += run if item is None else [(run[-1][0], _join_run([delta for _, delta in run]))]
    return out


def _join_run(run: list[TextDelta]) -> TextDelta:
    if len(run) == 1:
        return run[0]
    last = run[-1]
    return TextDelta(
        last.item_id,
        last.output_index,
        last.content_index,
        "".join(d.delta for d in run),
        [c for d in run for c in d.logprobs],
        last.sequence_number,
        last.stream_id,
    )
