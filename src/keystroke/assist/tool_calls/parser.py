"""Splits a model's streamed text into answer, reasoning and tool calls.

A marker split over two chunks is still found. A call that is not valid JSON or names no tool stays text.
Where a grammar constrains the calls (`constrained`), a call starts at the same head as in the grammar and is
streamed; calls in other forms (XML, other orders of members) are emitted when they are complete and
validated. Supported are the forms of Hermes and Qwen, Llama, Mistral, fenced JSON, and calls between tags;
harmony has a parser of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from keystroke.assist.tool_calls.forms import CALL, CALL_END, HARMONY, HERMES, LIST, CallForm, head_pattern
from keystroke.assist.tool_calls.harmony import HarmonyParser
from keystroke.assist.tool_calls.json_scan import ValueScanner, mark_overlap
from keystroke.assist.tool_calls.segments import ReasoningSegment, Segment, TextSegment, ToolCallSegment
from keystroke.assist.tool_calls.streamed_call import JsonCall
from keystroke.assist.tool_calls.tagged import TaggedCall, tagged_call
from keystroke.assist.tool_calls.tools import ShownTool, Toolset
from keystroke.assist.tool_calls.whole_calls import parse_whole_calls

_TAG, _FENCE = "<|python_tag|>", "```"
_MARKS = (CALL, LIST, _TAG, "<function=", '<invoke name="', _FENCE)
_NOTABLE = re.compile(r"[<`\[{]")
_FUNCTION_END = re.compile("</(?:function|invoke)>")
_FENCED = re.compile(r"```[\w-]*[ \t]*\n\s*")
_NAMED = re.compile(r"\s*([\w.\-]{1,200})(?:\[CALL_ID\][^\[]{0,100})?\[ARGS\]")  # a call in Mistral's form
_NAMED_YET = re.compile(r"\s*[\w.\-]{1,200}(?:\[[A-Z_\]]*[^\[]{0,100}(?:\[[A-Z]*)?)?\Z")


def answer_parser(
    form: CallForm,
    toolset: Toolset,
    *,
    constrained: bool = False,
    parallel: bool = True,
    formatted: bool = False,
    thinking: bool = False,
) -> AnswerParser | HarmonyParser:
    """The parser of a model's answers, by the form of its calls. `thinking`: the prompt opened a thought."""
    if form is HARMONY:
        return HarmonyParser(toolset, parallel=parallel)
    return AnswerParser(
        toolset, form, constrained=constrained, parallel=parallel, formatted=formatted, thinking=thinking
    )


class AnswerParser:
    """`constrained`: a grammar constrains the calls of `toolset`. `parallel` False: text after the first call
    is not parsed. `formatted`: the answer has a required format, so it consists of calls or contains none."""

    def __init__(
        self,
        toolset: Toolset,
        form: CallForm = HERMES,
        /,
        *,
        constrained: bool = False,
        parallel: bool = True,
        formatted: bool = False,
        thinking: bool = False,
    ) -> None:
        self._toolset = toolset
        self._form = form
        self._constrained = constrained
        self._parallel = parallel
        self._formatted = formatted
        as_json = constrained and toolset and form.tags is None
        self._heads = head_pattern(shown.name for shown in toolset.shown) if as_json else None
        self._pending = ""
        self._state: Callable[[list[Segment]], bool] = self._read_thought if thinking else self._read_text
        self._start = True  # only white space so far
        self._gap = False  # right after a call or reasoning: white space is dropped
        # Of the current call, or of what may become one:
        self._mark = ""  # its opening
        self._scanner = ValueScanner()  # finds the end of it or of its arguments
        self._scanned = self._head_searched = 0  # where the search for its end, and for a head, continues
        self._listed = False  # one of several in a JSON list
        self._json: JsonCall | None = None
        self._braced = False  # the closing brace was read
        self._tagged: TaggedCall | None = None

    def feed(self, text: str) -> list[Segment]:
        if self._is_quiet and not (self._toolset and _NOTABLE.search(text)):
            return [TextSegment(text)] if text else []  # the common case costs one search
        self._pending += text
        out: list[Segment] = []
        while self._state(out):
            pass
        return out

    def finish(self) -> list[Segment]:
        """The end of the text: emit what was held back."""
        out: list[Segment] = []
        pending, self._pending = self._pending, ""
        if self._state == self._read_call:
            out += self._parse_whole(pending) or [TextSegment(self._opening + pending)]
            self._state = self._read_text
        elif self._state == self._stream_arguments and self._json is not None:
            out += self._json.as_text()
        elif self._state == self._read_tagged and self._tagged is not None:
            out += self._tagged.read(pending, final=True)[0]
        elif self._state == self._read_thought and pending:
            out.append(ReasoningSegment(pending))
        elif self._state == self._collect_all:
            out += self._parse_calls_alone(pending) or [TextSegment(pending)]
        elif self._state in (self._read_text, self._read_plain_text) and pending:
            calls = self._parse_whole(pending) if self._start and not self._formatted else []
            out += calls or [TextSegment(pending)]
        return out

    @property
    def _is_quiet(self) -> bool:
        return self._state == self._read_text and not (self._pending or self._start or self._gap)

    # States: each consumes part of the pending text and returns whether to continue.

    def _read_text(self, out: list[Segment]) -> bool:
        if self._gap:
            self._pending = self._pending.lstrip()
            if not self._pending:
                return False
            self._gap = False
        if self._start:
            stripped = self._pending.lstrip()
            think = self._form.think[0]
            if not stripped or (think.startswith(stripped) and stripped != think):
                return False  # may become reasoning
            if stripped.startswith(think):
                self._pending, self._state, self._start = stripped[len(think) :], self._read_thought, False
                return True
            if self._formatted:
                return self._read_format_start(stripped)
            if self._toolset and stripped[0] in "{`":
                self._pending = stripped  # drop white space before a call
            else:
                self._start = False
        if not self._toolset:
            return self._emit_text(len(self._pending), out)
        at, mark = self._find_mark()
        if mark is None:
            return self._emit_text(at, out)
        self._emit_text(at, out)
        if mark == _FENCE:
            return self._read_fence(out)
        if mark == "{":
            return starts_bare_call(self._pending) is True and self._begin("")
        if mark[-1] not in '="':  # those that belong to the call itself stay
            self._pending = self._pending[len(mark) :]
        return self._begin(mark)

    def _read_plain_text(self, out: list[Segment]) -> bool:
        """Only text, up to the end."""
        if self._gap:
            self._pending = self._pending.lstrip()
            self._gap = not self._pending
        return self._emit_text(len(self._pending), out)

    def _collect_all(self, out: list[Segment]) -> bool:
        """Possibly only calls: decided in `finish`."""
        del out
        return False

    def _find_mark(self) -> tuple[int, str | None]:
        """Where the next call may begin, and its mark; without one, how much is certainly text."""
        pending = self._pending
        found = [(at, mark) for mark in _MARKS if (at := pending.find(mark)) >= 0]
        first = next(
            (
                m.start()
                for m in re.finditer(r"\{", pending)
                if starts_bare_call(pending[m.start() :]) is not False
            ),
            -1,
        )
        if first >= 0:
            found.append((first, "{"))
        if found:
            return min(found)
        return len(pending) - max(mark_overlap(pending, mark) for mark in _MARKS), None

    def _read_fence(self, out: list[Segment]) -> bool:
        """A fenced block may be a call; a few characters decide."""
        match = _FENCED.match(self._pending)
        if match is None:
            if "\n" in self._pending[3:] or len(self._pending) > 40:
                return self._skip_fence(3, out)
            return False
        inside = self._pending[match.end() :]
        if not inside:
            return False
        begins = starts_bare_call(inside)
        if begins is not True:
            return begins is False and self._skip_fence(match.end(), out)
        opening, self._pending = self._pending[: match.end()], inside
        return self._begin(opening)

    def _skip_fence(self, size: int, out: list[Segment]) -> bool:
        self._start = False
        out.append(TextSegment(self._pending[:size]))
        self._pending = self._pending[size:]
        return bool(self._pending)

    def _read_thought(self, out: list[Segment]) -> bool:
        closing = self._form.think[1]
        at = self._pending.find(closing)
        if at < 0:
            at = len(self._pending) - mark_overlap(self._pending, closing)
            if at > 0:
                out.append(ReasoningSegment(self._pending[:at]))
                self._pending = self._pending[at:]
            return False
        if at:
            out.append(ReasoningSegment(self._pending[:at]))
        self._pending, self._state, self._gap = self._pending[at + len(closing) :], self._read_text, True
        self._start = True  # a bare call may follow
        return True

    def _begin(self, mark: str) -> bool:
        self._mark, self._state, self._start = mark, self._read_call, False
        self._scanner, self._scanned, self._head_searched, self._listed = ValueScanner(), 0, 0, False
        return True

    def _read_call(self, out: list[Segment]) -> bool:
        """Inside what may be a call."""
        if self._form.tags is not None and self._mark in (CALL, "<function="):
            started = tagged_call(self._form.tags, self._toolset, self._pending)
            if started is None:
                return False
            if not isinstance(started, bool):
                self._tagged, size = started
                self._pending, self._state = self._pending[size:], self._read_tagged
                out += self._tagged.begin()
                return True
        if self._mark == LIST and (named := self._begin_named(out)) is not None:
            return named
        start = self._pending.lstrip()
        if start and start[0] not in "{[<," and self._mark in (CALL, LIST, _TAG):
            out.append(TextSegment(self._opening))  # only a mention of the mark
            return self._resume(False)
        end = self._find_end()
        head = self._find_head()
        if head is not None and (end is None or head.start() < end[0]):
            return self._begin_constrained(head, out)
        if end is None:
            return False
        body, after = self._pending[: end[0]], self._pending[end[0] : end[1]]
        self._pending = self._pending[end[1] :]
        calls = self._parse_whole(body)
        out += calls or [TextSegment(self._opening + body + after)]
        return self._resume(bool(calls))

    def _read_tagged(self, out: list[Segment]) -> bool:
        """Read the parameters of a call between tags."""
        assert self._tagged is not None
        segments, self._pending = self._tagged.read(self._pending)
        out += segments
        if not self._tagged.ended:
            return False
        if self._form.tags is not None and self._form.tags.end == CALL_END:
            self._mark = ""  # it was the end of the call
        self._state, self._braced, self._listed = self._read_tail, True, False
        return True

    def _begin_named(self, out: list[Segment]) -> bool | None:
        """Begin a call that is a name and JSON; None: it is none."""
        head = _NAMED.match(self._pending)
        if head is None:
            return False if _NAMED_YET.match(self._pending) else None
        shown = self._toolset.find(head[1])
        if shown is None:
            return None
        self._mark, self._braced, self._listed = "", True, False
        return self._begin_json(shown, head, out)

    def _begin_constrained(self, head: re.Match[str], out: list[Segment]) -> bool:
        """A call begins here, according to the grammar."""
        before = self._pending[: head.start()]
        if before.strip(" \t\r\n[,"):  # not only the brackets of a list
            out.append(TextSegment(self._opening + before))
            self._mark = ""
        self._listed = self._listed or self._mark == LIST or "[" in before
        self._mark = "" if self._mark == LIST else self._mark
        self._braced = False
        shown = self._toolset.find(msgspec.json.decode(head[1]))
        assert shown is not None  # the heads are those of the toolset
        return self._begin_json(shown, head, out)

    def _begin_json(self, shown: ShownTool, head: re.Match[str], out: list[Segment]) -> bool:
        self._pending, self._scanner = self._pending[head.end() :], ValueScanner()
        self._json, self._state = JsonCall(shown, head[0]), self._stream_arguments
        out += self._json.begin()
        return True

    def _stream_arguments(self, out: list[Segment]) -> bool:
        """Stream the arguments; those of an edit are emitted when they are complete."""
        assert self._json is not None
        if not self._scanner.started:
            self._pending = self._pending.lstrip()
        size = self._scanner.feed(self._pending)
        arguments, self._pending = self._pending[:size], self._pending[size:]
        out += self._json.add(arguments)
        if not self._scanner.ended:
            return False
        out += self._json.end()
        if isinstance(out[-1], TextSegment):  # no call after all
            return self._resume(False)
        self._state = self._read_tail
        return True

    def _read_tail(self, out: list[Segment]) -> bool:
        """Read what closes a call after its arguments: a brace, a bracket, the closing mark."""
        rest = self._pending = self._pending.lstrip()
        if not self._braced:
            if not rest:
                return False
            self._braced, rest = True, rest.removeprefix("}").lstrip()
            self._pending = rest
        if self._listed:
            if not rest:
                return False
            if rest[0] == ",":
                self._pending, self._state, self._head_searched = rest[1:], self._read_call, 0
                self._scanner, self._scanned = ValueScanner(), 0
                return True
            self._listed, rest = False, rest.removeprefix("]").lstrip()
            self._pending = rest
        closing = self._closing
        if closing and closing.startswith(rest) and rest != closing:
            return False
        self._pending = rest.removeprefix(closing)
        return self._resume(True)

    def _resume(self, called: bool) -> bool:
        """Back to text."""
        self._state = self._read_text if self._parallel or not called else self._read_plain_text
        self._gap = called
        return bool(self._pending)

    # Whole calls

    def _find_end(self) -> tuple[int, int] | None:
        """Where the current call ends and the text after it begins; None: not yet."""
        before, self._scanned = self._scanned, len(self._pending)
        if self._closing:
            # A closing fence is on its own line; in JSON strings line ends are escaped.
            closing = f"\n{_FENCE}" if self._closing == _FENCE else self._closing
            at = self._pending.find(closing, max(before - len(closing), 0))
            return None if at < 0 else (at, at + len(closing))
        if self._mark.startswith(("<function", "<invoke")):
            match = _FUNCTION_END.search(self._pending, max(before - len("</function>"), 0))
            return None if match is None else (match.end(), match.end())
        size = before + self._scanner.feed(self._pending[before:])  # an object or list ends with itself
        return (size, size) if self._scanner.ended else None

    def _find_head(self) -> re.Match[str] | None:
        """Where the grammar begins a call in the pending text."""
        if self._heads is None:
            return None
        head = self._heads.search(self._pending, self._head_searched)
        if head is None:
            last = self._pending.rfind("{", self._head_searched)
            self._head_searched = len(self._pending) if last < 0 else last
        return head

    @property
    def _closing(self) -> str:
        """The closing mark."""
        return CALL_END if self._mark == CALL else _FENCE if self._mark.startswith(_FENCE) else ""

    @property
    def _opening(self) -> str:
        """The mark, if it was removed from the pending text and not emitted."""
        return "" if self._listed or self._mark[-1:] in ("=", '"') else self._mark

    def _parse_whole(self, body: str) -> list[ToolCallSegment]:
        return parse_whole_calls(self._toolset, body, constrained=self._constrained)

    # Answers with a required format

    def _read_format_start(self, stripped: str) -> bool:
        leads = [CALL, LIST, *(f'{{"name": {json.dumps(s.name)}, "' for s in self._toolset.shown)]
        if self._toolset and stripped.startswith(tuple(leads)):
            self._state = self._collect_all
            return False
        if self._toolset and any(lead.startswith(stripped) for lead in leads):
            return False
        self._state, self._start = self._read_plain_text, False
        return True

    def _parse_calls_alone(self, text: str) -> list[ToolCallSegment]:
        """The calls of an answer that consists only of calls, else an empty list."""
        rest, calls = text.strip(), list[ToolCallSegment]()
        if rest.startswith(LIST):
            rest = rest[len(LIST) :].lstrip()
        while rest:
            rest = rest.removeprefix(CALL).lstrip()
            size = ValueScanner().feed(rest)
            found = parse_whole_calls(self._toolset, rest[:size], constrained=self._constrained, read=True)
            if not found:
                return []
            calls += found
            rest = rest[size:].lstrip().removeprefix(CALL_END).lstrip()
        return calls if self._parallel or len(calls) == 1 else []

    def _emit_text(self, length: int, out: list[Segment]) -> bool:
        if length > 0:
            out.append(TextSegment(self._pending[:length]))
            self._pending = self._pending[length:]
            self._start = False
        return False


def starts_bare_call(text: str) -> bool | None:
    """Whether `text` begins with {"name": as a call without marks does; None: undecided."""
    for part in ("{", '"name"', ":"):
        text = text.lstrip(" \t\r\n")
        if not text.startswith(part):
            return None if part.startswith(text) else False
        text = text[len(part) :]
    return True
