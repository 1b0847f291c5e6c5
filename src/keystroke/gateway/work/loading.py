"""Models that are loaded on first use.

A load runs on its own thread. Requests for the same model share it, and it continues if they are cancelled.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from keystroke.engine.library import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model that can be loaded: its role, and what is known of it until then."""

    name: str
    role: str
    converses: bool
    context: int | None = None


class PendingLoad(Generic[T]):
    """One load in progress; `what`, `done` and `total` are its progress."""

    def __init__(self, name: str, work: Callable[[Progress], T]) -> None:
        self.what, self.done, self.total = f"loading {name}", 0, 0
        loaded: Future[T] = Future()
        loaded.set_running_or_notify_cancel()  # a load goes on when nobody waits for it any more
        self.result = asyncio.wrap_future(loaded)
        self.result.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieved

        def run() -> None:
            try:
                loaded.set_result(work(self._progress))
            except BaseException as error:
                loaded.set_exception(error)

        # A daemon: a server that stops does not wait for the load.
        threading.Thread(target=run, name=f"load-{name}", daemon=True).start()

    def _progress(self, what: str, done: int, total: int) -> None:
        self.what, self.done, self.total = what, done, total
