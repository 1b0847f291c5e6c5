"""Shows the events of a task as log entries, a diff, a question and status fields."""

from __future__ import annotations

from typing import Protocol

from textual.widget import Widget

from keystroke.clients.tui.widgets import DiffView, LogEntry, StatusBar
from keystroke.protocol import tasks


class TaskScreen(Protocol):
    """The parts of the application that show a task."""

    @property
    def bar(self) -> StatusBar: ...
    async def add_entry(self, widget: Widget) -> None:
        """Append a widget to the log."""

    async def show_question(self, question: tasks.TaskQuestion | None) -> None:
        """Show a question; None removes it."""

    def scroll_to_end(self) -> None:
        """Scroll to the end."""


class TaskPresenter:
    def __init__(self, screen: TaskScreen) -> None:
        self._screen = screen
        self._diff: DiffView | None = None
        self._writing: LogEntry | None = None  # receives the output of the model or a command

    async def show(self, event: tasks.TaskEvent) -> None:
        screen = self._screen
        if isinstance(event, tasks.TaskText | tasks.TaskOutput):
            await self._write(event.delta)
            return
        self._writing = None
        match event:
            case tasks.TaskBegan():
                screen.bar.set_fields(model=event.model, state=f"working ({event.sandbox})")
            case tasks.TaskQueued():
                screen.bar.set_fields(
                    state=f"waiting, place {event.position}" if event.position else "working"
                )
            case tasks.TaskDoing():
                await screen.add_entry(LogEntry("note", event.line))
            case tasks.TaskNoted():
                await screen.add_entry(LogEntry("problem" if event.failed else "note", event.line))
            case tasks.TaskChanged():
                await self._change(event.diff)
            case tasks.TaskSpent(receipt=spent) if spent.tokens > 1 and spent.seconds > 0:
                screen.bar.set_fields(speed=f"{spent.tokens / spent.seconds:,.0f} tok/s")
            case tasks.TaskAsked():
                screen.bar.set_fields(state="asking")
                await screen.show_question(event.question)
            case tasks.TaskAnswered():
                screen.bar.set_fields(state="working")
                await screen.show_question(None)
            case tasks.TaskSteered():
                await screen.add_entry(LogEntry("user", event.line))
            case tasks.TaskEnded():
                await screen.add_entry(LogEntry("note", f"{event.task.status}: {event.task.line}"))
            case _:
                pass

    async def _write(self, delta: str) -> None:
        if self._writing is None:
            self._writing = LogEntry("note")
            await self._screen.add_entry(self._writing)
        self._writing.append_text(delta)
        self._screen.scroll_to_end()

    async def _change(self, diff: str) -> None:
        if self._diff is None:
            self._diff = DiffView()
            await self._screen.add_entry(self._diff)
        self._diff.show(diff)
        self._screen.scroll_to_end()
