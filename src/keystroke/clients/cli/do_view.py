"""Shows a task on the terminal: its events, its questions, and an input line below.

The task runs on a thread of its own, so the keyboard is always read. A line typed while the task works
steers it; a line typed after a question answers it. Ctrl-C stops the task cleanly, a second one ends the
program.
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

from keystroke.agent.chat.steering import Steering
from keystroke.agent.loop import ApprovalDecision, ApprovalRequest, EndedEvent, Event, events
from keystroke.clients.cli.console import RED
from keystroke.clients.cli.input_line import InputLine, can_draw, read_lines
from keystroke.engine.base import Interrupt

if TYPE_CHECKING:
    from keystroke.clients.cli.options import Invocation

_YES = frozenset({"y", "yes"})
_SHOWN = 2000  # characters of a line of a command's output


class TerminalTaskView:
    """With --json one JSON object per event goes to standard output, and nothing is asked."""

    def __init__(self, run: Invocation) -> None:
        self._run = run
        self._keyboard = not run.json and sys.stdin.isatty() and sys.stderr.isatty()
        self._items: queue.SimpleQueue[Event | ApprovalRequest | None] = queue.SimpleQueue()
        self._waker, self._wake = os.pipe()
        self._answers: queue.SimpleQueue[ApprovalDecision] = queue.SimpleQueue()
        self._asking = False
        self._typing: InputLine | None = None
        self._error: BaseException | None = None
        self._printed = ""
        self.steering = Steering()

    @property
    def ask(self) -> Callable[[ApprovalRequest], ApprovalDecision] | None:
        """Asks the user from the task's thread; None where there is no keyboard."""
        return self._ask if self._keyboard else None

    def handle_event(self, event: Event) -> None:
        """Called on the task's threads."""
        self._put(event)

    def watch(self, work: Callable[[], EndedEvent], interrupt: Interrupt) -> EndedEvent | None:
        """Run `work` on a thread and show its events. Raises what it raises."""
        ended: list[EndedEvent] = []

        def run_work() -> None:
            try:
                ended.append(work())
            except BaseException as error:
                self._error = error
            self._put(None)

        thread = threading.Thread(target=run_work, name="task", daemon=True)
        with ExitStack() as stack:
            self._typing = self._open_input_line(stack)
            interrupt.add_callback(self._refuse)
            thread.start()
            self._show_until_done()
            self._typing = None
        thread.join()
        if self._error is not None:
            raise self._error
        return ended[0] if ended else None

    def _show_until_done(self) -> None:
        keys = [sys.stdin.fileno()] if self._keyboard else []
        while True:
            ready, _, _ = select.select([self._waker, *keys], [], [])
            if keys and keys[0] in ready and not self._read_keyboard():
                keys = []
            if self._waker in ready:
                os.read(self._waker, 4096)
                while not self._items.empty():
                    item = self._items.get()
                    if item is None:
                        return
                    self._show(item)

    def _read_keyboard(self) -> bool:
        """Handle typed lines. False at the end of input."""
        lines = read_lines(self._typing)
        for line in lines or ():
            if self._asking:
                self._answer(line.lower() in _YES)
            elif line:
                self.steering.add_line(line)
                self._print(f"(sent: {line})")
        if lines is None and self._asking:
            self._answer(False)
        return lines is not None

    def _show(self, item: Event | ApprovalRequest) -> None:
        if isinstance(item, ApprovalRequest):
            self._asking = True
            for line in item.diff.splitlines():
                self._print(line)
            self._print(f"{item.text} [y/N]")
        elif self._run.json:
            self._run.console.json(item)
        elif isinstance(item, events.StartedEvent):
            self._print(f"{item.model}, commands in: {item.sandbox}")
        elif isinstance(item, events.StepEvent):
            self._print(f"→ {item.line}")
        elif isinstance(item, events.NoteEvent):
            self._print(f"  {item.line}", RED if item.failed else "")
        elif isinstance(item, events.OutputEvent):
            *lines, rest = (self._printed + item.text).split("\n")
            self._printed = rest[:_SHOWN]  # a line without end does not grow in memory
            for line in lines[-20:]:
                self._print(f"  | {line[:_SHOWN]}")
        # The whole change and the sum are shown at the end.

    def _print(self, line: str, style: str = "") -> None:
        if self._run.quiet:
            return
        if self._typing is not None:
            self._typing.show(self._run.console.plain(line) + "\n")
            sys.stdout.flush()
        else:
            self._run.console.note(self._run.console.plain(line))

    def _open_input_line(self, stack: ExitStack) -> InputLine | None:
        if not self._keyboard or not can_draw() or self._run.quiet:
            return None
        return stack.enter_context(InputLine(sys.stdin.fileno(), sys.stdout.write))

    def _put(self, item: Event | ApprovalRequest | None) -> None:
        self._items.put(item)
        os.write(self._wake, b"!")

    def _ask(self, question: ApprovalRequest) -> ApprovalDecision:
        self._put(question)
        return self._answers.get()

    def _answer(self, yes: bool) -> None:
        self._asking = False
        self._answers.put(ApprovalDecision(yes))

    def _refuse(self) -> None:
        """Refuse an open question on an interrupt."""
        if self._asking:
            self._answer(False)
