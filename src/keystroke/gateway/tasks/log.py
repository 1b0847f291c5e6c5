"""What a task told, numbered, for whoever listens now or comes back later.

Belongs to the event loop. Numbers only grow; nothing is told twice. Text that models and commands
write is kept up to a size and the oldest forgotten first; every other event stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from keystroke.protocol.tasks import TaskEvent, TaskOutput, TaskText

_TEXT = 1 << 20  # characters of deltas that are kept
_DELTA = 1 << 14  # characters from which a delta takes no more
_SIGN = 15.0  # seconds of silence after which a listener is told that there is nothing to tell


class EventLog:
    def __init__(self, task: str) -> None:
        self._task = task
        self._events: list[TaskEvent] = []
        self._size = 0
        self._sent = 0  # the number up to which somebody may have read
        self._news = asyncio.Event()
        self.last = 0
        self.closed = False  # the run has ended: listeners leave when they have everything

    def tell(self, make: Callable[..., TaskEvent], **fields: Any) -> None:
        """Add an event. Text that follows text of its kind joins it while nobody has read that yet."""
        latest = self._events[-1] if self._events else None
        joins = type(latest) is make and self.last > self._sent
        if joins and isinstance(latest, (TaskText, TaskOutput)) and len(latest.delta) < _DELTA:
            latest.delta += fields["delta"]
            self._kept(len(fields["delta"]))
            return
        self.last += 1
        event = make(task_id=self._task, sequence_number=self.last, **fields)
        self._events.append(event)
        if isinstance(event, (TaskText, TaskOutput)):
            self._kept(len(event.delta))
        self._news.set()

    def _kept(self, size: int) -> None:
        self._size += size
        if self._size <= _TEXT:
            return
        for event in [e for e in self._events[:-1] if isinstance(e, (TaskText, TaskOutput))]:
            self._events.remove(event)
            self._size -= len(event.delta)
            if self._size <= _TEXT // 2:
                return

    def wake(self) -> None:
        self._news.set()

    async def after(self, number: int) -> AsyncIterator[list[TaskEvent]]:
        """Events after a number, as they come, until the run has ended. An empty list is a sign of life."""
        while True:
            batch = [event for event in self._events if event.sequence_number > number]
            if batch:
                number = batch[-1].sequence_number
                self._sent = max(self._sent, number)
                yield batch
                continue
            if self.closed:
                return
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), _SIGN)
            except TimeoutError:
                yield []
