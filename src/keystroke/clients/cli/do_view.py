"""A task as a terminal shows it: its events above, a line to type on below, its questions in between.

The task runs on a thread of its own, because an engine wants one; this side never waits for it without
watching the keyboard. A line typed while it works steers it; while it asks, the line is the answer. Ctrl-C
stops the task cleanly, a second one ends the program.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from keystroke.agent.chat import Steering
from keystroke.agent.loop import Answer, Ended, Event, Question
from keystroke.agent.loop.events import Began, Changed, Doing, Noted, Printed, Spent, Wrote
from keystroke.clients.cli.console import GREEN, RED
from keystroke.engine.base import Interrupt

if TYPE_CHECKING:
    from keystroke.clients.cli.input_line import InputLine
    from keystroke.clients.cli.invocation import Invocation

_YES = frozenset({"y", "yes"})


class TaskView:
    """`as_json` writes one JSON object an event on standard output and asks nothing."""

    def __init__(self, run: Invocation, *, as_json: bool) -> None:
        self._run, self._as_json = run, as_json
        self._keyboard = not as_json and sys.stdin.isatty() and sys.stderr.isatty()
        self._items: queue.SimpleQueue[Event | Question | None] = queue.SimpleQueue()
        self._waker, self._wake = os.pipe()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._asking = False
        self._typing: InputLine | None = None
        self._error: BaseException | None = None
        self._printed = ""
        self.steering = Steering()

    @property
    def ask(self) -> Callable[[Question], Answer] | None:
        """Puts a question to the user from the task's thread; None where there is nobody."""
        return self._ask if self._keyboard else None

    def sink(self, event: Event) -> None:
        """Called on the task's thread, or one of its own."""
        self._put(event)

    def watch(self, work: Callable[[], Ended], interrupt: Interrupt) -> Ended | None:
        """Run `work` on a thread and show what it tells. Raises what it raised."""
        ended: list[Ended] = []

        def working() -> None:
            try:
                ended.append(work())
            except BaseException as error:
                self._error = error
            self._put(None)

        thread = threading.Thread(target=working, name="task", daemon=True)
        with ExitStack() as stack:
            self._typing = self._input_line(stack)
            interrupt.add_callback(self._refuse)
            thread.start()
            self._until_done()
            self._typing = None
        thread.join()
        if self._error is not None:
            raise self._error
        return ended[0] if ended else None

    # ── the terminal's side ───────────────────────────────────────────────────────────────────

    def _until_done(self) -> None:
        keys = [sys.stdin.fileno()] if self._keyboard else []
        while True:
            ready, _, _ = select.select([self._waker, *keys], [], [])
            if keys and keys[0] in ready and not self._typed():
                keys = []
            if self._waker in ready:
                os.read(self._waker, 4096)
                while not self._items.empty():
                    item = self._items.get()
                    if item is None:
                        return
                    self._show(item)

    def _typed(self) -> bool:
        """Take what was typed. False at the end of input."""
        if self._typing is not None:
            lines = self._typing.read()
        else:
            data = os.read(sys.stdin.fileno(), 65536)
            lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()] if data else None
        for line in lines or ():
            if self._asking:
                self._answer(line.lower() in _YES)
            elif line:
                self.steering.say(line)
                self._say(f"(told: {line})")
        if lines is None and self._asking:
            self._answer(False)
        return lines is not None

    def _show(self, item: Event | Question) -> None:
        if isinstance(item, Question):
            self._asking = True
            for line in item.diff.splitlines():
                self._say(line)
            self._say(f"{item.text} [y/N]")
        elif self._as_json:
            self._run.console.line(msgspec.json.encode(item).decode())
        elif isinstance(item, Began):
            self._say(f"{item.model}, commands in: {item.sandbox}")
        elif isinstance(item, Doing):
            self._say(f"→ {item.line}")
        elif isinstance(item, Noted):
            self._say(f"  {item.line}", RED if item.failed else "")
        elif isinstance(item, Printed):
            *lines, self._printed = (self._printed + item.text).split("\n")
            for line in lines[-20:]:
                self._say(f"  | {line}")
        elif isinstance(item, (Changed, Spent, Wrote)):
            pass  # the whole change and the sum are shown at the end

    def _say(self, line: str, style: str = "") -> None:
        if self._run.quiet:
            return
        if self._typing is not None:
            self._typing.show(self._run.console.plain(line) + "\n")
            sys.stdout.flush()
        else:
            self._run.console.note(self._run.console.plain(line))

    def _input_line(self, stack: ExitStack) -> InputLine | None:
        drawable = os.environ.get("TERM", "dumb") not in ("dumb", "") and sys.platform != "win32"
        if not self._keyboard or not sys.stdout.isatty() or not drawable or self._run.quiet:
            return None
        from keystroke.clients.cli.input_line import InputLine

        return stack.enter_context(InputLine(sys.stdin.fileno(), sys.stdout.write))

    # ── the task's side ───────────────────────────────────────────────────────────────────────

    def _put(self, item: Event | Question | None) -> None:
        self._items.put(item)
        os.write(self._wake, b"!")

    def _ask(self, question: Question) -> Answer:
        self._put(question)
        return self._answers.get()

    def _answer(self, yes: bool) -> None:
        self._asking = False
        self._answers.put(Answer(yes))

    def _refuse(self) -> None:
        """An interrupt answers a question that is open."""
        if self._asking:
            self._answer(False)


def show_diff(run: Invocation, diff: str) -> None:
    for line in diff.splitlines(keepends=True):
        head = line.startswith(("---", "+++"))
        style = "" if head else GREEN if line.startswith("+") else RED if line.startswith("-") else ""
        run.console.write(line, style)
