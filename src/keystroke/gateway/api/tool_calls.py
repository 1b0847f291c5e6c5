"""What a model's text means: answer, reasoning, or a call of a tool it was offered.

Law: text in, segments out, incrementally; a marker split over two chunks is still found. A call that is not
valid JSON or names no offered tool stays text: model output is data, nothing here runs it.
Knows the `<tool_call>` and `<think>` marks (Qwen, Hermes) and a bare JSON call (Llama 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

CALL, CALL_END = "<tool_call>", "</tool_call>"
_BARE = '{"name":'
THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool the client offered. A custom tool takes free text, which a model writes as `input`."""

    name: str
    custom: bool = False
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Call:
    tool: Offered
    payload: str  # JSON arguments of a function, the input text of a custom tool


Segment = Text | Thought | Call


class AnswerParser:
    """`offered` by name. `prefix` is text that was put into the model's mouth (a forced call)."""

    def __init__(self, offered: Mapping[str, Offered], prefix: str = "") -> None:
        self._offered = offered
        self._pending = ""
        self._mode: type[Text] | type[Thought] | type[Call] | None = Text
        self._start = True  # nothing but white space came so far
        self._gap = False  # right after a call or a thought: white space there means nothing
        if prefix:
            self.feed(prefix)

    def feed(self, text: str) -> list[Segment]:
        if self._mode is Text and not (self._pending or self._start or self._gap) and "<" not in text:
            return [Text(text)] if text else []  # the common case costs one search
        self._pending += text
        out: list[Segment] = []
        while self._advance(out):
            pass
        return out

    def finish(self) -> list[Segment]:
        """The end of the text: what was held back is given as what it is."""
        out: list[Segment] = []
        rest, self._pending = self._pending, ""
        if self._start and (call := self._call(rest)) is not None:
            return [call]
        if self._mode is Call:
            call = self._call(rest)
            out.append(call if call else Text(CALL + rest))
        elif rest:
            out.append(Thought(rest) if self._mode is Thought else Text(rest))
        return out

    def _advance(self, out: list[Segment]) -> bool:
        """Consume one piece of what is pending; False when nothing more can be said yet."""
        if self._mode is Call:
            return self._inside_call(out)
        if self._mode is Thought:
            return self._until(THINK_END, Thought, out)
        if self._gap:
            self._pending = self._pending.lstrip()
            if not self._pending:
                return False
            self._gap = False
        if self._start:
            stripped = self._pending.lstrip()
            if not stripped:
                return False
            if self._offered and _may_be_bare_call(stripped):
                return False  # held back until it is known what it is
            if THINK.startswith(stripped) and stripped != THINK:
                return False  # may yet become a thought
            self._start = False
            if stripped.startswith(THINK):
                self._pending, self._mode = stripped[len(THINK) :], Thought
                return True
        if not self._offered:
            return self._say(len(self._pending), Text, out)
        return self._until(CALL, Text, out)

    def _until(self, mark: str, kind: type[Text] | type[Thought], out: list[Segment]) -> bool:
        at = self._pending.find(mark)
        if at < 0:
            return self._say(len(self._pending) - _overlap(self._pending, mark), kind, out)
        self._say(at, kind, out)
        self._pending = self._pending[len(mark) :]
        if mark == CALL:
            self._mode = Call
        else:
            self._mode, self._gap = Text, True
        return True

    def _inside_call(self, out: list[Segment]) -> bool:
        at = self._pending.find(CALL_END)
        if at < 0:
            return False
        body, self._pending = self._pending[:at], self._pending[at + len(CALL_END) :]
        call = self._call(body)
        out.append(call if call else Text(CALL + body + CALL_END))
        self._mode, self._gap = Text, True
        return bool(self._pending)

    def _say(self, length: int, kind: type[Text] | type[Thought], out: list[Segment]) -> bool:
        if length > 0:
            out.append(kind(self._pending[:length]))
            self._pending = self._pending[length:]
        return False

    def _call(self, body: str) -> Call | None:
        try:
            said: Any = msgspec.json.decode(body.strip())
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            return None
        tool = self._offered.get(said["name"])
        if tool is None:
            return None
        arguments = said.get("arguments", said.get("parameters", {}))
        if tool.custom:
            text = arguments.get("input") if isinstance(arguments, dict) else arguments
            return Call(tool, text) if isinstance(text, str) else None
        if isinstance(arguments, str):
            return Call(tool, arguments)
        return Call(tool, msgspec.json.encode(arguments).decode())


def _may_be_bare_call(text: str) -> bool:
    """Whether an answer that begins like this may be a call without marks: {"name": ..."""
    beginning = "".join(text[:64].split())[: len(_BARE)]
    return _BARE.startswith(beginning)


def _overlap(text: str, mark: str) -> int:
    """How many last characters of `text` could be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
