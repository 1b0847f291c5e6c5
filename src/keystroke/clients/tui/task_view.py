"""A task's events as they appear on the screen.

One event, one change of what is seen. It knows no gateway: events come in, entries, diff and question go
to whoever owns the screen.
"""

from __future__ import annotations

from typing import Protocol

from textual.widget import Widget

from keystroke.clients.tui.widgets import DiffView, LogEntry, StatusBar
from keystroke.protocol import tasks


class TaskScreen(Protocol):
    """The screen, as far as a task uses it."""

    @property
    def bar(self) -> StatusBar: ...
    async def add_entry(self, widget: Widget) -> None:
        """Append to the log."""

    async def show_question(self, question: tasks.TaskQuestion | None) -> None:
        """Show the question; None takes it away."""

    def scroll_to_end(self) -> None:
        """Scroll to the end."""


class TaskPresenter:
    def __init__(self, stage: TaskScreen) -> None:
        self._stage = stage
        self._diff: DiffView | None = None
        self._writing: LogEntry | None = None  # what the model or a command writes now

    async def show(self, event: tasks.TaskEvent) -> None:
        stage = self._stage
        if isinstance(event, tasks.TaskText | tasks.TaskOutput):
            await self._write(event.delta)
            return
        self._writing = None
        match event:
            case tasks.TaskBegan():
                stage.bar.set_fields(model=event.model, state=f"working ({event.sandbox})")
            case tasks.TaskQueued():
                stage.bar.set_fields(
                    state=f"waiting, place {event.position}" if event.position else "working"
                )
            case tasks.TaskDoing():
                await stage.add_entry(LogEntry("note", event.line))
            case tasks.TaskNoted():
                await stage.add_entry(LogEntry("problem" if event.failed else "note", event.line))
            case tasks.TaskChanged():
                await self._change(event.diff)
            case tasks.TaskSpent(receipt=spent) if spent.tokens > 1 and spent.seconds > 0:
                stage.bar.set_fields(speed=f"{spent.tokens / spent.seconds:,.0f} tok/s")
            case tasks.TaskAsked():
                stage.bar.set_fields(state="asking")
                await stage.show_question(event.question)
            case tasks.TaskAnswered():
                stage.bar.set_fields(state="working")
                await stage.show_question(None)
            case tasks.TaskSteered():
                await stage.add_entry(LogEntry("user", event.line))
            case tasks.TaskEnded():
                await stage.add_entry(LogEntry("note", f"{event.task.status}: {event.task.line}"))
            case _:
                pass

    async def _write(self, delta: str) -> None:
        if self._writing is None:
            self._writing = LogEntry("note")
            await self._stage.add_entry(self._writing)
        self._writing.append_text(delta)
        self._stage.scroll_to_end()

    async def _change(self, diff: str) -> None:
        if self._diff is None:
            self._diff = DiffView()
            await self._stage.add_entry(self._diff)
        self._diff.show(diff)
        self._stage.scroll_to_end()
