"""The tool that replaces lines of a file.

Everything around the lines stays byte for byte. A change that does not apply, or that would leave the file
worse than before, is refused with its reason.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from keystroke.agent.tools.call import AgentTool, ToolResult
from keystroke.agent.workspace import Overlay
from keystroke.analysis.rules import project_rules
from keystroke.assist.edit.operations import Addition, EditFailure, Operation, Replacement, SearchReplace
from keystroke.assist.edit.validation import validate_change
from keystroke.text import unified_diff


class EditArguments(msgspec.Struct, forbid_unknown_fields=True):
    path: Annotated[str, msgspec.Meta(description="file, relative to the workspace")]
    old: Annotated[
        str, msgspec.Meta(description="whole lines to replace, exactly as they are; empty makes a file")
    ]
    new: Annotated[str, msgspec.Meta(description="the lines that take their place")]


class EditTool(AgentTool):
    name = "edit"
    description = "Replace some lines of a file by others. Change as little as possible."
    arguments = EditArguments

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def describe(self, arguments: EditArguments) -> str:
        return f"{'change' if arguments.old.strip() else 'write'} {arguments.path}"

    def call(self, arguments: EditArguments) -> ToolResult:
        path = arguments.path
        before = self._overlay.read(path)
        trial = self._overlay.fork()
        found = trial.resolve([_operation(arguments, before)])
        if found.failures:
            first = found.failures[0]
            return ToolResult(f"nothing was changed: {first.message} ({first.reason})", failed=True)
        after = validate_change(before or "", trial.read(path) or "", path, "", complete=False)
        if isinstance(after, EditFailure):
            return ToolResult(f"nothing was changed: {after.message} ({after.reason})", failed=True)
        self._overlay.write(path, after)
        return ToolResult(
            unified_diff(before or "", after, f"a/{path}", f"b/{path}") or "the file is as it was"
        )


def _operation(arguments: EditArguments, before: str | None) -> Operation:
    old, new = arguments.old, arguments.new
    if not old.strip() and not (before or "").strip():
        rules = project_rules(arguments.path)
        return Addition(
            arguments.path,
            rules.with_final_newline(new if new.endswith("\n") else new + "\n"),
            overwrite=True,
        )
    after = tuple(new.strip("\n").split("\n")) if new else ()
    split = SearchReplace(tuple(old.strip("\n").split("\n")), after)
    return Replacement(arguments.path, (split,))
