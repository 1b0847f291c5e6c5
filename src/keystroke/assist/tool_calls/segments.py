"""The segments of a model's text: answer, reasoning, and calls, complete or streamed in parts."""

from __future__ import annotations

from dataclasses import dataclass

from keystroke.assist.tool_calls.tools import OfferedTool


@dataclass(frozen=True, slots=True)
class TextSegment:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningSegment:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallSegment:
    """A complete call: the JSON arguments of a function, or the input of a custom tool."""

    tool: OfferedTool
    payload: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    tool: OfferedTool


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    payload: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    pass


Segment = TextSegment | ReasoningSegment | ToolCallSegment | ToolCallStart | ToolArgumentsDelta | ToolCallEnd
