"""Adds up the time in which at least one activity is running."""

from __future__ import annotations

import threading
import time


class BusyClock:
    """A context manager for any number of threads: time counts while at least one is inside."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside, self._since, self._lock = 0, 0.0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = time.perf_counter()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self.seconds += time.perf_counter() - self._since
