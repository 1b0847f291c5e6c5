"""Models that are loaded when somebody first asks for them.

Knows which names may be asked for, what is being loaded and how far that has come. A load runs on a
thread of its own, once however many wait for it, and goes on if those who asked leave: the next one finds it
done.
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
class Offer:
    """A model that could be served: its role, and what is known of it before it is loaded."""

    name: str
    role: str
    converses: bool
    context: int | None = None


class Load(Generic[T]):
    """One load under way. `what`, `done` and `total` say how far it has come."""

    def __init__(self, name: str, work: Callable[[Progress], T]) -> None:
        self.name = name
        self.what, self.done, self.total = f"loading {name}", 0, 0
        self.began = time.perf_counter()
        loop = asyncio.get_running_loop()
        self.result: asyncio.Future[T] = loop.create_future()
        self.result.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # told or not

        def run() -> None:
            try:
                made = work(self._progress)
            except BaseException as error:
                _tell(loop, self.result, error)
            else:
                _tell(loop, self.result, made)

        # A daemon: a server that is told to stop does not wait for weights nobody will use.
        threading.Thread(target=run, name=f"load-{name}", daemon=True).start()

    def _progress(self, what: str, done: int, total: int) -> None:
        self.what, self.done, self.total = what, done, total


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], outcome: T | BaseException) -> None:
    def settle() -> None:
        if future.done():
            return
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:  # the loop is gone, and with it whoever waited
        return
