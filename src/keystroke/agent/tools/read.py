"""The tool that reads a file, or part of it.

It reads through the overlay, so the model sees its own changes, and paths outside the workspace and
secrets are refused.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from keystroke.agent.tools.call import AgentTool, ToolResult
from keystroke.agent.workspace import Overlay

_LINES = 400  # shown at a time; the model asks for the next ones


class ReadArguments(msgspec.Struct, forbid_unknown_fields=True):
    path: Annotated[str, msgspec.Meta(description="file, relative to the workspace")]
    start: Annotated[int, msgspec.Meta(description="first line, from 1", ge=1)] = 1
    end: Annotated[int, msgspec.Meta(description="last line; 0 means as many as fit", ge=0)] = 0


class ReadTool(AgentTool):
    name = "read"
    description = "Read a file of the workspace."
    arguments = ReadArguments
    reads_only = True

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def describe(self, arguments: ReadArguments) -> str:
        return f"read {arguments.path}"

    def call(self, arguments: ReadArguments) -> ToolResult:
        text = self._overlay.read(arguments.path)
        if text is None:
            return ToolResult(f"{arguments.path} does not exist{self._suggest(arguments.path)}", failed=True)
        lines = text.splitlines(keepends=True)
        first = arguments.start - 1
        last = min(arguments.end or len(lines), first + _LINES, len(lines))
        if first >= max(len(lines), 1):
            return ToolResult(
                f"{arguments.path} has {len(lines)} lines, none at {arguments.start}", failed=True
            )
        head = f"{arguments.path}, lines {first + 1} to {last} of {len(lines)}:\n"
        return ToolResult(head + "".join(lines[first:last]))

    def _suggest(self, path: str) -> str:
        """Files of the same name in other folders."""
        name = path.rpartition("/")[2]
        found = [known for known in self._overlay.files() if known.rpartition("/")[2] == name][:3]
        return f"; there is {', '.join(found)}" if found else ""
