"""What a model's text is made of: answer, reasoning, calls whole or piece by piece.

Values, no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass

from keystroke.assist.tool_calls.tools import Offered


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is whole: JSON arguments of a function, the input text of a custom tool."""

    tool: Offered
    payload: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    tool: Offered


@dataclass(frozen=True, slots=True)
class CallDelta:
    payload: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    pass


Segment = Text | Thought | Call | CallBegun | CallDelta | CallEnded
