"""A gateway's task, followed event by event: python examples/follow_task.py FOLDER INSTRUCTION [URL]

Needs a server with a model that follows instructions, and nothing of Keystroke here: a task is plain HTTP
(docs/tasks.md). Shows each event and approves nothing: the change is printed and rejected, so the folder
stays as it is.
"""

from __future__ import annotations

import json
import sys

import httpx


def main(folder: str, instruction: str, url: str = "http://127.0.0.1:8012") -> None:
    body = {"workspace": folder, "instruction": instruction, "stream": True}
    with (
        httpx.Client(base_url=url, timeout=None) as server,
        server.stream("POST", "/v1/tasks", json=body) as answer,
    ):
        if answer.is_error:
            sys.exit(json.loads(answer.read())["error"]["message"])
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] in ("task.doing", "task.noted"):
                sys.stdout.write(f"{event['line']}\n")
            elif event["type"] == "task.asked":
                question = event["question"]
                sys.stdout.write(f"{question['diff']}\n{question['text']} no\n")
                server.post(f"/v1/tasks/{event['task_id']}/reject", json={"question": question["id"]})
            elif event["type"] == "task.ended":
                sys.stdout.write(f"{event['task']['status']}: {event['task']['line']}\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:4])
