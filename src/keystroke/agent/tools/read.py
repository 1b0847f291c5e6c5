"""The tool that reads a file, or part of it.

Through the overlay, so the model sees its own changes; a path outside the workspace, a link out of it
and a secret are refused there.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from keystroke.agent.tools.call import Result, Tool
from keystroke.agent.workspace import Overlay

_LINES = 400  # shown at a time; a model that wants more asks for the next


class ReadArguments(msgspec.Struct, forbid_unknown_fields=True):
    path: Annotated[str, msgspec.Meta(description="file, relative to the workspace")]
    start: Annotated[int, msgspec.Meta(description="first line, from 1", ge=1)] = 1
    end: Annotated[int, msgspec.Meta(description="last line; 0 means as many as fit", ge=0)] = 0


class Read(Tool):
    name = "read"
    description = "Read a file of the workspace."
    arguments = ReadArguments

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def about(self, arguments: ReadArguments) -> str:
        return f"read {arguments.path}"

    def call(self, arguments: ReadArguments) -> Result:
        text = self._overlay.read(arguments.path)
        if text is None:
            return Result(f"{arguments.path} does not exist{self._near(arguments.path)}", failed=True)
        lines = text.splitlines(keepends=True)
        first = arguments.start - 1
        last = min(arguments.end or len(lines), first + _LINES, len(lines))
        if first >= max(len(lines), 1):
            return Result(f"{arguments.path} has {len(lines)} lines, none at {arguments.start}", failed=True)
        head = f"{arguments.path}, lines {first + 1} to {last} of {len(lines)}:\n"
        return Result(head + "".join(lines[first:last]))

    def _near(self, path: str) -> str:
        """Files that may have been meant: of the same name, elsewhere."""
        name = path.rpartition("/")[2]
        found = [known for known in self._overlay.files() if known.rpartition("/")[2] == name][:3]
        return f"; there is {', '.join(found)}" if found else ""
