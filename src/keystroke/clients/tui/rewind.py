"""Conversation and files, taken back together.

Files first, newest first, each task's change whole or not at all. Where one is refused (somebody changed
the file since) nothing older is touched, and the conversation is kept up to and with that task.
"""

from __future__ import annotations

from keystroke.clients.task_client import TaskClient
from keystroke.clients.tui.session import SessionEntry, TuiSession
from keystroke.errors import KeystrokeError


async def rewind(
    session: TuiSession, point: int, tasks: TaskClient
) -> tuple[SessionEntry | None, KeystrokeError | None]:
    """Bring the session back to before entry `point`. Returns what stood there, to be said anew, and why it
    went no further, where it did not. Changes the session; the caller saves it."""
    refused: KeystrokeError | None = None
    for task in session.tasks_after(point):
        try:
            if (await tasks.get(task)).status == "done":
                await tasks.act(task, "undo")
        except KeystrokeError as error:
            refused = error
            point = 1 + next(n for n, entry in enumerate(session.entries) if entry.task == task)
            break
    again = session.rewind(point) if point < len(session.entries) else None
    return (again if refused is None else None), refused
