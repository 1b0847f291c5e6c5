"""Tools, their invocations and their results.

An invocation is untrusted data: its arguments are validated against the tool's types first, and a faulty
one becomes a result that says what is wrong, never an exception. A result is data, too: it is shown to the
model as text and grants no permission.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from keystroke.errors import Interrupted, KeystrokeError

LONGEST = 16_000  # characters of a result; more would push the task itself out of a small context


@dataclass(frozen=True, slots=True)
class ToolInvocation:
    name: str
    arguments: str  # JSON, as the model wrote it


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str
    failed: bool = False
    refused: bool = False  # by the user or by a rule: trying again does not help


class AgentTool(ABC):
    """`arguments` is the type of a call's arguments; its field descriptions are shown to the model."""

    name: ClassVar[str]
    description: ClassVar[str]
    arguments: ClassVar[type[msgspec.Struct]]
    reads_only: ClassVar[bool] = False  # changes nothing and needs no approval, so it may start early

    @abstractmethod
    def describe(self, arguments: Any) -> str:
        """One line: what a call will do."""

    @abstractmethod
    def call(self, arguments: Any) -> ToolResult:
        """Do it. A KeystrokeError becomes a failed result."""

    def specification(self) -> dict[str, Any]:
        """The tool as chat templates and servers expect it."""
        (schema,), components = msgspec.json.schema_components([self.arguments], ref_template="#/{name}")
        own = dict(components[self.arguments.__name__] if "$ref" in schema else schema)
        own.pop("title", None)
        own["additionalProperties"] = False
        function = {"name": self.name, "description": self.description, "parameters": own}
        return {"type": "function", "function": function}


class Toolbox:
    """The tools of one task, called by name."""

    def __init__(self, tools: Sequence[AgentTool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def specifications(self) -> list[dict[str, Any]]:
        return [tool.specification() for tool in self._tools.values()]

    def reads_only(self, call: ToolInvocation) -> bool:
        tool = self._tools.get(call.name)
        return tool is not None and tool.reads_only

    def describe(self, call: ToolInvocation) -> str:
        """One line: what a call will do, or what is wrong with it."""
        found = self._validate(call)
        return found.text if isinstance(found, ToolResult) else found[0].describe(found[1])

    def invoke(self, call: ToolInvocation) -> ToolResult:
        """Make a call. Raises Interrupted only."""
        found = self._validate(call)
        if isinstance(found, ToolResult):
            return found
        tool, arguments = found
        try:
            result = tool.call(arguments)
        except Interrupted:
            raise
        except KeystrokeError as error:
            return ToolResult(str(error), failed=True, refused=error.status == 403)
        return result if len(result.text) <= LONGEST else _shorten(result)

    def _validate(self, call: ToolInvocation) -> tuple[AgentTool, msgspec.Struct] | ToolResult:
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return ToolResult(f"there is no tool {call.name!r:.60}; the tools are: {known}", failed=True)
        try:
            return tool, msgspec.json.decode(call.arguments.encode(), type=tool.arguments)
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            return ToolResult(
                f"the call of {call.name} is not well formed: {error}; call it again", failed=True
            )


def _shorten(result: ToolResult) -> ToolResult:
    first, last = LONGEST // 4, LONGEST - LONGEST // 4
    left_out = len(result.text) - first - last
    text = f"{result.text[:first]}\n… {left_out:,} characters left out …\n{result.text[-last:]}"
    return ToolResult(text, result.failed, result.refused)
