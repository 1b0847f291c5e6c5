"""Worker processes for CPU-bound work of threads that wait for the network.

Without processes the work runs in the calling thread. Workers ignore interrupts and end with their owner, so
Ctrl-C produces one message.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from threading import Thread
from types import TracebackType
from typing import ParamSpec, TypeVar

Asked = ParamSpec("Asked")
Result = TypeVar("Result")


def _owned() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_owner, daemon=True).start()


def _end_with_owner() -> None:
    owner = parent_process()
    if owner is not None:
        owner.join()
        os._exit(1)


class Processes:
    """`count` worker processes, started when first asked; 0 for none."""

    def __init__(self, count: int) -> None:
        # Not forked: the caller has threads, and a fork would copy their locks as they are.
        self._pool = (
            ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_owned) if count else None
        )

    def do(self, work: Callable[Asked, Result], /, *arguments: Asked.args, **named: Asked.kwargs) -> Result:
        """What `work` returns, done in one of the processes. Waits for it."""
        if self._pool is None:
            return work(*arguments, **named)
        return self._pool.submit(work, *arguments, **named).result()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
