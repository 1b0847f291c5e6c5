"""Models that are loaded on first use.

A load runs on its own thread, once however many requests wait for it, and continues if they are cancelled.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from keystroke.engine.library import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model that can be loaded: its role, and what is known of it before."""

    name: str
    role: str
    converses: bool
    context: int | None = None


class PendingLoad(Generic[T]):
    """One load in progress; `what`, `done` and `total` are its progress."""

    def __init__(self, name: str, work: Callable[[Progress], T]) -> None:
        self.name = name
        self.what, self.done, self.total = f"loading {name}", 0, 0
        self.began = time.perf_counter()
        loop = asyncio.get_running_loop()
        self.result: asyncio.Future[T] = loop.create_future()
        self.result.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # mark as retrieved

        def run() -> None:
            try:
                result = work(self._progress)
            except BaseException as error:
                _resolve(loop, self.result, error)
            else:
                _resolve(loop, self.result, result)

        # A daemon: a server that stops does not wait for the load.
        threading.Thread(target=run, name=f"load-{name}", daemon=True).start()

    def _progress(self, what: str, done: int, total: int) -> None:
        self.what, self.done, self.total = what, done, total


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], outcome: T | BaseException) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is closed: nobody waits
        return
