"""Ctrl-C as an engine's interrupt.

While an answer is being made the first Ctrl-C stops it cleanly at the next step; a second one, for
an engine that does not listen, ends the program the usual way.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from keystroke.engine.base import Interrupt


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """An interrupt that Ctrl-C throws inside the block."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def thrown(_signal: int, _frame: FrameType | None) -> None:
        if interrupt.is_set:
            raise KeyboardInterrupt
        # On a thread of its own: callbacks take locks that this very thread may hold.
        threading.Thread(target=interrupt.set, daemon=True).start()

    before = signal.signal(signal.SIGINT, thrown)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
