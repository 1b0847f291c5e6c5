"""A tool as a model sees it, a call as it writes one, and what comes back.

A call is data from a model: its arguments are checked against the tool's own types before anything is
done, and whatever is wrong with it becomes a result that says so in one sentence, never an exception. What a
tool returns is data too: it is shown to the model as text and gives nobody any permission.
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
class Call:
    name: str
    arguments: str  # JSON, as the model wrote it


@dataclass(frozen=True, slots=True)
class Result:
    text: str
    failed: bool = False
    refused: bool = False  # by the user or by a rule, not by circumstances: trying again does not help


class Tool(ABC):
    """`arguments` is the type of what a call holds; its fields describe themselves to the model."""

    name: ClassVar[str]
    description: ClassVar[str]
    arguments: ClassVar[type[msgspec.Struct]]

    @abstractmethod
    def about(self, arguments: Any) -> str:
        """One line: what a call is about to do."""

    @abstractmethod
    def call(self, arguments: Any) -> Result:
        """Do it. Errors of the tree become results that name them."""

    def specification(self) -> dict[str, Any]:
        """The tool in the form that chat templates and servers take."""
        (schema,), components = msgspec.json.schema_components([self.arguments], ref_template="#/{name}")
        own = dict(components[self.arguments.__name__] if "$ref" in schema else schema)
        own.pop("title", None)
        own["additionalProperties"] = False
        function = {"name": self.name, "description": self.description, "parameters": own}
        return {"type": "function", "function": function}


class Toolbox:
    """The tools of one task, called by name."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def specifications(self) -> list[dict[str, Any]]:
        return [tool.specification() for tool in self._tools.values()]

    def about(self, call: Call) -> str:
        """One line: what a call is about to do, or what is wrong with it."""
        found = self._checked(call)
        return found.text if isinstance(found, Result) else found[0].about(found[1])

    def make(self, call: Call) -> Result:
        """Make a call. Raises Interrupted only."""
        found = self._checked(call)
        if isinstance(found, Result):
            return found
        tool, arguments = found
        try:
            result = tool.call(arguments)
        except Interrupted:
            raise
        except KeystrokeError as error:
            return Result(str(error), failed=True, refused=error.status == 403)
        return result if len(result.text) <= LONGEST else _cut(result)

    def _checked(self, call: Call) -> tuple[Tool, msgspec.Struct] | Result:
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return Result(f"there is no tool {call.name!r:.60}; the tools are: {known}", failed=True)
        try:
            return tool, msgspec.json.decode(call.arguments.encode(), type=tool.arguments)
        except (msgspec.MsgspecError, UnicodeEncodeError) as error:
            return Result(f"the call of {call.name} is not well formed: {error}; call it again", failed=True)


def _cut(result: Result) -> Result:
    first, last = LONGEST // 4, LONGEST - LONGEST // 4
    left_out = len(result.text) - first - last
    text = f"{result.text[:first]}\n… {left_out:,} characters left out …\n{result.text[-last:]}"
    return Result(text, result.failed, result.refused)
