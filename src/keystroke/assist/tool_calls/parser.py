"""What a model's text means: answer, reasoning, or a call of a tool it was shown.

Law: text in, segments out, incrementally; a marker split over two chunks is still found. A call that is not
valid JSON or names no tool stays text: model output is data, nothing here runs it. Where a grammar holds the
model to its calls (`held`), they are given out as they are written; one in a form that the grammar does not
hold is a call only where its arguments meet the tool's schema.
Knows the forms of Hermes and Qwen, Llama, Mistral, fenced JSON, and XML-like ones.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from keystroke.assist.tool_calls.forms import CALL, CALL_END
from keystroke.assist.tool_calls.json_scan import StringReader, ValueScanner
from keystroke.assist.tool_calls.tools import Offered, Shown, Toolset
from keystroke.engine.grammar.validate import unmet, unmet_text

THINK, THINK_END = "<think>", "</think>"
_LIST, _TAG, _FENCE = "[TOOL_CALLS]", "<|python_tag|>", "```"
_MARKS = (CALL, _LIST, _TAG, "<function=", '<invoke name="', _FENCE)
# As the grammar of calls has it: white space of JSON, and a name that is written as it was shown.
_HEAD = re.compile(
    r'\{[ \t\r\n]*"name"[ \t\r\n]*:[ \t\r\n]*("(?:[^"\\]|\\.)*")'
    r'[ \t\r\n]*,[ \t\r\n]*"(?:arguments|parameters)"[ \t\r\n]*:[ \t\r\n]*'
)
_NOTABLE = re.compile(r"[<`\[{]")
_BARE = '{"name":'
_FENCED = re.compile(r"```[\w-]*[ \t]*\n\s*")
_FUNCTION = re.compile(
    r'<(?:function=([^>\s]+)|invoke name="([^"]+)")\s*>(.*?)</(?:function|invoke)>', re.DOTALL
)
_PARAMETER = re.compile(r'<parameter(?:=([^>]+)| name="([^"]+)")\s*>(.*?)</parameter>', re.DOTALL)


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


class AnswerParser:
    def __init__(self, toolset: Toolset, *, held: bool = False) -> None:
        self._toolset = toolset
        self._held = held
        self._pending = ""
        self._state: Callable[[list[Segment]], bool] = self._text
        self._start = True  # nothing but white space came so far
        self._gap = False  # right after a call or a thought: white space there means nothing
        self._mark = ""  # what the call under way began with
        self._arguments: ValueScanner | None = None
        self._input: StringReader | None = None
        self._braced = False  # the brace that closes the call has come

    def feed(self, text: str) -> list[Segment]:
        if self._quiet and not (self._toolset and _NOTABLE.search(text)):
            return [Text(text)] if text else []  # the common case costs one search
        self._pending += text
        out: list[Segment] = []
        while self._state(out):
            pass
        return out

    def finish(self) -> list[Segment]:
        """The end of the text: what was held back is given as what it is."""
        out: list[Segment] = []
        if self._state == self._call:
            body = self._pending
            self._pending = ""
            calls = self._whole(body)
            out += calls or [Text(self._opening + body)]
            self._state = self._text
        elif self._state == self._thought and self._pending:
            out.append(Thought(self._pending))
        elif self._state == self._text and self._pending:
            calls = self._whole(self._pending) if self._start else []
            out += calls or [Text(self._pending)]
        self._pending = ""
        return out

    @property
    def _quiet(self) -> bool:
        return self._state == self._text and not (self._pending or self._start or self._gap)

    # States: each consumes a piece of what is pending; False when nothing more can be said yet.

    def _text(self, out: list[Segment]) -> bool:
        if self._gap:
            self._pending = self._pending.lstrip()
            if not self._pending:
                return False
            self._gap = False
        if self._start:
            stripped = self._pending.lstrip()
            if not stripped or (THINK.startswith(stripped) and stripped != THINK):
                return False  # may yet become a thought
            if stripped.startswith(THINK):
                self._pending, self._state, self._start = stripped[len(THINK) :], self._thought, False
                return True
            if self._toolset and stripped[0] in "{`":
                self._pending = stripped  # white space before a call means nothing
            else:
                self._start = False
        if not self._toolset:
            return self._say(len(self._pending), out)
        at, mark = self._next_mark()
        if mark is None:
            return self._say(at, out)
        if mark == _FENCE:
            return self._fence(at, out)
        self._say(at, out)
        if mark == "{":
            return _settled(self._pending) and self._begin("")
        if mark[-1] not in '="':  # those that belong to the call itself stay
            self._pending = self._pending[len(mark) :]
        return self._begin(mark)

    def _next_mark(self) -> tuple[int, str | None]:
        """Where the next call may begin, and with what; without one, how much is text for certain."""
        pending = self._pending
        found = [(at, mark) for mark in _MARKS if (at := pending.find(mark)) >= 0]
        bare = next(
            (m.start() for m in re.finditer(r"\{", pending) if _may_be_bare(pending[m.start() :])), -1
        )
        if bare >= 0:
            found.append((bare, "{"))
        if found:
            return min(found)
        return len(pending) - max(_overlap(pending, mark) for mark in _MARKS), None

    def _fence(self, at: int, out: list[Segment]) -> bool:
        """A fenced block may be a call: held until that is known, which takes a few characters."""
        self._say(at, out)
        match = _FENCED.match(self._pending)
        if match is None:
            if "\n" in self._pending[3:] or len(self._pending) > 40:
                return self._past_fence(3, out)
            return False
        inside = self._pending[match.end() :]
        if not inside:
            return False
        if not _may_be_bare(inside):
            return self._past_fence(match.end(), out)
        if not _settled(inside):
            return False
        opening, self._pending = self._pending[: match.end()], inside
        return self._begin(opening)

    def _past_fence(self, size: int, out: list[Segment]) -> bool:
        self._start = False
        out.append(Text(self._pending[:size]))
        self._pending = self._pending[size:]
        return bool(self._pending)

    def _thought(self, out: list[Segment]) -> bool:
        at = self._pending.find(THINK_END)
        if at < 0:
            at = len(self._pending) - _overlap(self._pending, THINK_END)
            if at > 0:
                out.append(Thought(self._pending[:at]))
                self._pending = self._pending[at:]
            return False
        if at:
            out.append(Thought(self._pending[:at]))
        self._pending, self._state, self._gap = self._pending[at + len(THINK_END) :], self._text, True
        self._start = True  # a bare call may follow a thought
        return True

    def _begin(self, mark: str) -> bool:
        self._mark, self._state, self._start = mark, self._call, False
        return True

    def _call(self, out: list[Segment]) -> bool:
        """Inside what may be a call."""
        begun = self._pending.lstrip("[, \n" if self._mark == _LIST else None)
        if self._held and (match := _HEAD.match(begun)) is not None:
            shown = next((s for s in self._toolset.shown if json.dumps(s.name) == match[1]), None)
            if shown is not None and not shown.is_edit:
                self._pending, self._braced = begun[match.end() :], False
                out.append(CallBegun(shown.tool))
                self._arguments, self._state = ValueScanner(), self._stream
                self._input = StringReader("input") if shown.tool.custom else None
                return True
        end = self._end()
        if end is None:
            return False
        body, after = self._pending[: end[0]], self._pending[end[0] : end[1]]
        self._pending = self._pending[end[1] :]
        calls = self._whole(body)
        out += calls or [Text(self._opening + body + after)]
        self._state, self._gap = self._text, bool(calls)
        return bool(self._pending)

    def _stream(self, out: list[Segment]) -> bool:
        """Arguments as they are written."""
        assert self._arguments is not None
        if not self._arguments.begun:
            self._pending = self._pending.lstrip()
        size = self._arguments.feed(self._pending)
        said, self._pending = self._pending[:size], self._pending[size:]
        if self._input is not None:
            said = self._input.feed(said)
        if said:
            out.append(CallDelta(said))
        if not self._arguments.ended:
            return False
        out.append(CallEnded())
        self._state = self._tail
        return True

    def _tail(self, out: list[Segment]) -> bool:
        """What closes a call after its arguments: a brace, and the counterpart of its mark."""
        stripped = self._pending.lstrip()
        if not self._braced:
            if not stripped:
                return False
            self._braced, stripped = True, stripped.removeprefix("}").lstrip()
        if self._mark == _LIST and stripped.startswith(","):
            self._pending, self._state = stripped[1:], self._call
            return True
        closing = "]" if self._mark == _LIST else self._closing
        if closing and closing.startswith(stripped) and stripped != closing:
            self._pending = stripped
            return False
        self._pending, self._state, self._gap = stripped.removeprefix(closing), self._text, True
        return bool(self._pending)

    # Whole calls

    def _end(self) -> tuple[int, int] | None:
        """Where the call under way ends, and where the text after it begins; None: that is yet to come."""
        if self._closing:
            # A fence ends on a line of its own: within JSON a line's end is escaped.
            closing = f"\n{_FENCE}" if self._closing == _FENCE else self._closing
            at = self._pending.find(closing)
            return None if at < 0 else (at, at + len(closing))
        if self._mark.startswith(("<function", "<invoke")):
            match = re.search(r"</(?:function|invoke)>", self._pending)
            return None if match is None else (match.end(), match.end())
        scanner = ValueScanner()  # a bare object or list ends with itself
        size = scanner.feed(self._pending)
        return (size, size) if scanner.ended else None

    @property
    def _closing(self) -> str:
        """The counterpart of the mark."""
        return CALL_END if self._mark == CALL else _FENCE if self._mark.startswith(_FENCE) else ""

    @property
    def _opening(self) -> str:
        """The mark, where it was taken off what is pending."""
        return "" if self._mark[-1:] in ("=", '"') else self._mark

    def _whole(self, body: str) -> list[Segment]:
        """The calls that `body` is, all of them valid; none where it is something else."""
        calls = [self._function(match) for match in _FUNCTION.finditer(body)]
        if not calls:
            try:
                said: Any = msgspec.json.decode(body.strip())
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                return []
            calls = [self._object(one) for one in (said if isinstance(said, list) else [said])]
        return [call for call in calls if call is not None] if calls and all(calls) else []

    def _object(self, said: Any) -> Call | None:
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            return None
        arguments = said.get("arguments", said.get("parameters", {}))
        shown = self._toolset.find(said["name"])
        if isinstance(arguments, str) and shown is not None and not shown.tool.custom:
            if shown.is_edit or (self._held and unmet_text(shown.parameters, arguments)):
                return None
            return Call(shown.tool, arguments)
        return self._made(shown, arguments)

    def _function(self, match: re.Match[str]) -> Call | None:
        shown = self._toolset.find(match[1] or match[2])
        body = match[3].strip()
        if body.startswith("{"):
            try:
                return self._made(shown, msgspec.json.decode(body))
            except (msgspec.DecodeError, RecursionError):
                return None
        arguments = {p[1] or p[2]: p[3].strip("\n") for p in _PARAMETER.finditer(body)}
        return self._made(shown, _typed(arguments, shown) if shown is not None else {})

    def _made(self, shown: Shown | None, arguments: Any) -> Call | None:
        if shown is None or (self._held and not _proved(shown, arguments)):
            return None
        payload = shown.payload(arguments)
        return None if payload is None else Call(shown.tool, payload)

    def _say(self, length: int, out: list[Segment]) -> bool:
        if length > 0:
            out.append(Text(self._pending[:length]))
            self._pending = self._pending[length:]
            self._start = False
        return False


def _proved(shown: Shown, arguments: Any) -> bool:
    """Whether a call that no grammar held is one that the grammar would have allowed, as far as that can be
    said of a value: text of a tool's own grammar cannot."""
    if shown.tool.custom and not shown.is_edit:
        return shown.tool.grammar is None
    return unmet(shown.parameters, arguments) is None


def _typed(arguments: dict[str, str], shown: Shown) -> dict[str, Any]:
    """Values of an XML call by the types of the schema: all come as text."""
    properties = shown.parameters.get("properties", {})
    typed: dict[str, Any] = {}
    for name, text in arguments.items():
        schema = properties.get(name)
        typed[name] = text
        if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                typed[name] = msgspec.json.decode(text)
    return typed


def _may_be_bare(text: str) -> bool:
    """Whether text that begins like this may be a call without marks: {"name": ..."""
    beginning = "".join(text[:64].split())[: len(_BARE)]
    return _BARE.startswith(beginning)


def _settled(text: str) -> bool:
    """Whether enough of it came to know that it is one."""
    return len("".join(text[:64].split())) >= len(_BARE)


def _overlap(text: str, mark: str) -> int:
    """How many last characters of `text` could be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
