"""The numbered events of a task, for clients that listen now or reconnect later.

Used on the event loop only. Text of models and commands is kept up to a size, the oldest dropped first;
every other event is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from keystroke.protocol.tasks import TaskEvent, TaskOutput, TaskText

_TEXT = 1 << 20  # characters of kept deltas
_DELTA = 1 << 14  # characters at which a delta is full
_KEEP_ALIVE = 15.0  # seconds without events before an empty batch is sent


class EventLog:
    def __init__(self, task: str) -> None:
        self._task = task
        self._events: list[TaskEvent] = []
        self._size = 0
        self._sent = 0  # the last number that may have been read
        self._news = asyncio.Event()
        self.last = 0
        self.closed = False  # the run has ended: no more events

    def append(self, make: Callable[..., TaskEvent], **fields: Any) -> None:
        """Add an event. Text is joined to unread text of the same kind."""
        latest = self._events[-1] if self._events else None
        joins = type(latest) is make and self.last > self._sent
        if joins and isinstance(latest, (TaskText, TaskOutput)) and len(latest.delta) < _DELTA:
            latest.delta += fields["delta"]
            self._trim(len(fields["delta"]))
            return
        self.last += 1
        event = make(task_id=self._task, sequence_number=self.last, **fields)
        self._events.append(event)
        if isinstance(event, (TaskText, TaskOutput)):
            self._trim(len(event.delta))
        self._news.set()

    def _trim(self, size: int) -> None:
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

    async def events_after(self, number: int) -> AsyncIterator[list[TaskEvent]]:
        """Events after a number, until the run has ended. An empty list keeps the connection alive."""
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
                await asyncio.wait_for(self._news.wait(), _KEEP_ALIVE)
            except TimeoutError:
                yield []
