"""Translates task events into ACP session updates.

A step of the task becomes a tool call, the model's text a message, and a change a diff of whole files, which
editors can preview. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from acp import helpers
from acp.schema import PermissionOption, ToolCallLocation, ToolCallUpdate

from keystroke.protocol import tasks as wire

ALLOW, REJECT = "allow", "reject"
OPTIONS = (
    PermissionOption(option_id=ALLOW, name="Allow", kind="allow_once"),
    PermissionOption(option_id=REJECT, name="Reject", kind="reject_once"),
)
ReadFile = Callable[[str], str]  # the text of a workspace file; empty if there is none


class Updates:
    """The updates of one task. `absolute` turns a workspace path into an absolute one."""

    def __init__(self, absolute: Callable[[str], str]) -> None:
        self._absolute = absolute
        self._calls = 0
        self._open: str | None = None
        self._printed = ""

    def from_event(self, event: wire.TaskEvent) -> list[Any]:
        """The updates of an event; empty for events that editors do not show."""
        if isinstance(event, wire.TaskDoing):
            return [*self._end_call("completed"), self._start_call(event.line)]
        if isinstance(event, wire.TaskNoted):
            return self._note(event)
        if isinstance(event, wire.TaskText):
            return [helpers.update_agent_thought_text(event.delta)]
        if isinstance(event, wire.TaskOutput):
            return self._append_output(event.delta)
        if isinstance(event, wire.TaskQueued) and event.position:
            return [helpers.update_agent_thought_text(f"waiting, position {event.position} in the queue\n")]
        if isinstance(event, wire.TaskEnded):
            failed = event.task.status in ("failed", "interrupted")
            line = helpers.update_agent_message_text(f"{event.task.line}\n")
            return [*self._end_call("failed" if failed else "completed"), line]
        return []

    def permission_request(self, question: wire.TaskQuestion, read: ReadFile) -> ToolCallUpdate:
        """The tool call that the editor asks the user to allow."""
        self._calls += 1
        paths = list(dict.fromkeys(hunk.path for hunk in question.hunks))
        content = [
            helpers.tool_diff_content(self._absolute(path), *_after_and_before(question, path, read))
            for path in paths
        ]
        return ToolCallUpdate(
            tool_call_id=f"{question.id}-{self._calls}",
            title=question.text,
            kind="edit" if question.kind == "change" else "execute",
            status="pending",
            content=content or None,  # type: ignore[arg-type]
            locations=[
                ToolCallLocation(path=self._absolute(hunk.path), line=hunk.first) for hunk in question.hunks
            ]
            or None,
            raw_input={"command": question.command} if question.command else {"diff": question.diff},
        )

    def _start_call(self, line: str) -> Any:
        self._calls += 1
        self._open, self._printed = f"step-{self._calls}", ""
        word = line.split(" ", 1)[0]
        kinds = {"read": "read", "search": "search", "look": "search", "run": "execute"}
        kind: Any = kinds.get(word, "edit" if word in ("change", "write", "rewrite") else "other")
        return helpers.start_tool_call(self._open, line, kind=kind, status="in_progress")

    def _note(self, event: wire.TaskNoted) -> list[Any]:
        if self._open is None:
            return [helpers.update_agent_message_text(f"{event.line}\n")]
        if event.failed:
            return self._end_call("failed", event.line)
        return [self._update(event.line)]

    def _append_output(self, delta: str) -> list[Any]:
        self._printed = (self._printed + delta)[-4000:]
        return [self._update(self._printed)] if self._open is not None else []

    def _update(self, text: str) -> Any:
        assert self._open is not None
        content = [helpers.tool_content(helpers.text_block(text))]
        return helpers.update_tool_call(self._open, status="in_progress", content=content)

    def _end_call(self, status: Any, text: str = "") -> list[Any]:
        if self._open is None:
            return []
        content = [helpers.tool_content(helpers.text_block(text))] if text else None
        ended, self._open = helpers.update_tool_call(self._open, status=status, content=content), None
        return [ended]


def _after_and_before(question: wire.TaskQuestion, path: str, read: ReadFile) -> tuple[str, str | None]:
    """The text of a file after and before the change (None: it does not exist)."""
    hunks = [hunk for hunk in question.hunks if hunk.path == path]
    if hunks[0].whole:
        return hunks[0].after, hunks[0].before if hunks[0].whole == "removed" else None
    before = read(path)
    lines = before.split("\n")
    starts = [0]
    for line in lines[:-1]:
        starts.append(starts[-1] + len(line) + 1)
    after, reached = "", 0
    for hunk in hunks:
        at = starts[hunk.first - 1] if hunk.first - 1 < len(starts) else len(before)
        after += before[reached:at] + hunk.after
        reached = at + len(hunk.before)
    return after + before[reached:], before
