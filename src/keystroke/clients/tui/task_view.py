"""A task's events as they appear on the screen.

One event, one change of what is seen. It knows no gateway: events come in, entries, diff and question go
to whoever owns the screen.
"""

from __future__ import annotations

from typing import Protocol

from textual.widget import Widget

from keystroke.clients.tui.widgets import Diff, Said, StatusBar
from keystroke.protocol import tasks


class Stage(Protocol):
    """The screen, as far as a task uses it."""

    @property
    def bar(self) -> StatusBar: ...
    async def put(self, widget: Widget) -> None:
        """Append to the log."""

    async def ask(self, question: tasks.TaskQuestion | None) -> None:
        """Show the question; None takes it away."""

    def follow(self) -> None:
        """Scroll to the end."""


class TaskView:
    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._diff: Diff | None = None
        self._writing: Said | None = None  # what the model or a command writes now

    async def show(self, event: tasks.TaskEvent) -> None:
        stage = self._stage
        if isinstance(event, tasks.TaskText | tasks.TaskOutput):
            await self._write(event.delta)
            return
        self._writing = None
        match event:
            case tasks.TaskBegan():
                stage.bar.say(model=event.model, state=f"working ({event.sandbox})")
            case tasks.TaskQueued():
                stage.bar.say(state=f"waiting, place {event.position}" if event.position else "working")
            case tasks.TaskDoing():
                await stage.put(Said("note", event.line))
            case tasks.TaskNoted():
                await stage.put(Said("problem" if event.failed else "note", event.line))
            case tasks.TaskChanged():
                await self._change(event.diff)
            case tasks.TaskSpent(receipt=spent) if spent.tokens > 1 and spent.seconds > 0:
                stage.bar.say(speed=f"{spent.tokens / spent.seconds:,.0f} tok/s")
            case tasks.TaskAsked():
                stage.bar.say(state="asking")
                await stage.ask(event.question)
            case tasks.TaskAnswered():
                stage.bar.say(state="working")
                await stage.ask(None)
            case tasks.TaskSteered():
                await stage.put(Said("user", event.line))
            case tasks.TaskEnded():
                await stage.put(Said("note", f"{event.task.status}: {event.task.line}"))
            case _:
                pass

    async def _write(self, delta: str) -> None:
        if self._writing is None:
            self._writing = Said("note")
            await self._stage.put(self._writing)
        self._writing.add(delta)
        self._stage.follow()

    async def _change(self, diff: str) -> None:
        if self._diff is None:
            self._diff = Diff()
            await self._stage.put(self._diff)
        self._diff.show(diff)
        self._stage.follow()
