"""A gateway's task, followed event by event: python examples/follow_task.py FOLDER INSTRUCTION [URL]

Needs a server with a model that follows instructions. Shows each event and approves nothing: the change is
printed and rejected, so the folder stays as it is.
"""

from __future__ import annotations

import asyncio
import sys

from keystroke.clients.place import Place
from keystroke.clients.tui.task_client import TaskClient
from keystroke.protocol.tasks import TaskAsked, TaskDoing, TaskEnded, TaskNoted


async def main(folder: str, instruction: str, url: str = "http://127.0.0.1:8012") -> None:
    client = TaskClient(Place(url))
    try:
        task = await client.create(folder, instruction)
        async for event in client.events(task.id):
            if isinstance(event, TaskDoing | TaskNoted):
                sys.stdout.write(f"{event.line}\n")
            elif isinstance(event, TaskAsked):
                sys.stdout.write(f"{event.question.diff}\n{event.question.text} no\n")
                await client.act(task.id, "reject", question=event.question.id)
            elif isinstance(event, TaskEnded):
                sys.stdout.write(f"{event.task.status}: {event.task.line}\n")
    finally:
        await client.close()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    asyncio.run(main(*sys.argv[1:4]))
