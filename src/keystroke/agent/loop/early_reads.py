"""Calls of reading tools that start while the answer which makes them is still being written.

A call starts as soon as its arguments are complete. Behind a call that may change something nothing starts
early, because what it reads could change.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from keystroke.agent.tools import Toolbox, ToolInvocation, ToolResult


class EarlyReads:
    def __init__(self, box: Toolbox) -> None:
        self._box = box
        self._pool = ThreadPoolExecutor(2, "early-read")  # threads are started when needed
        self._started: dict[ToolInvocation, Future[ToolResult]] = {}
        self._stopped = False

    def next_answer(self) -> None:
        """Forget the calls of the last answer."""
        for future in self._started.values():
            future.cancel()
        self._started.clear()
        self._stopped = False

    def start(self, call: ToolInvocation) -> None:
        """Start a call of the current answer, if it only reads."""
        if self._stopped or not self._box.reads_only(call):
            self._stopped = True
        else:
            self._started[call] = self._pool.submit(self._box.invoke, call)

    def result(self, call: ToolInvocation) -> ToolResult:
        """The result of a call, made now if it was not started. Raises Interrupted only."""
        future = self._started.pop(call, None)
        return self._box.invoke(call) if future is None else future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
