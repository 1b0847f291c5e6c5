"""Rewinds a session: reverts its conversation and the files its tasks changed.

Tasks are undone newest first, each completely or not at all. If one cannot be undone, because its file was
changed since, older ones are left alone and the conversation is kept up to and including that task.
"""

from __future__ import annotations

from keystroke.clients.task_client import TaskClient
from keystroke.clients.tui.session import SessionEntry, TuiSession
from keystroke.errors import KeystrokeError


async def rewind(
    session: TuiSession, point: int, tasks: TaskClient
) -> tuple[SessionEntry | None, KeystrokeError | None]:
    """Rewind the session to before entry `point`. Returns the entry at that point, and the error that stopped
    the rewind early, if one did. Changes the session; the caller saves it."""
    refused: KeystrokeError | None = None
    for task in session.tasks_after(point):
        try:
            if (await tasks.get(task)).status == "done":
                await tasks.act(task, "undo")
        except KeystrokeError as error:
            refused = error
            point = 1 + next(n for n, entry in enumerate(session.entries) if entry.task == task)
            break
    first = session.rewind(point) if point < len(session.entries) else None
    return (first if refused is None else None), refused
