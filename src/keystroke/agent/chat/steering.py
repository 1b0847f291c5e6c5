"""The user's input while a model works: lines to add to the conversation, or a request for the deep model.

Any thread may write to a `Steering`; the thread that generates the answer reads it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]


class HandoverRequested(Exception):
    """The user asks the deep model to continue. Control flow, not an error: the task catches it."""


class Steering:
    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._lock = threading.Lock()
        self._handover = False

    def request_handover(self) -> None:
        """Make the deep model take over at the next token, with the lines added until then."""
        self._handover = True

    def add_line(self, line: str) -> None:
        with self._lock:
            self._lines.append(line)

    def next_line(self) -> str | None:
        """The oldest unread line, or None. Raises HandoverRequested once per request. Cheap while empty."""
        if self._handover:
            self._handover = False
            raise HandoverRequested
        if not self._lines:
            return None
        with self._lock:
            return self._lines.popleft() if self._lines else None

    def drain(self) -> list[str]:
        """All unread lines."""
        with self._lock:
            lines = list(self._lines)
            self._lines.clear()
        return lines
