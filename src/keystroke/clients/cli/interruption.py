"""Handles signals for a while, and turns Ctrl-C into an engine's interrupt.

The first Ctrl-C stops an answer at its next step; a second one raises KeyboardInterrupt.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from keystroke.engine.base import Interrupt


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """An interrupt that Ctrl-C sets inside the block."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def on_sigint(_signal: int, _frame: FrameType | None) -> None:
        if interrupt.is_set:
            raise KeyboardInterrupt
        # On another thread: callbacks take locks that this thread may hold.
        threading.Thread(target=interrupt.set, daemon=True).start()

    with signal_handlers({signal.SIGINT: on_sigint}):
        yield interrupt


@contextmanager
def signal_handlers(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """These handlers inside the block, those from before after it."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
