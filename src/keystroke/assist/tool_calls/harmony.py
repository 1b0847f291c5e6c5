"""Harmony, the format of gpt-oss: messages in channels, each with a header.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

A prompt ends with `<|start|>assistant`, so that an answer begins with the rest of a header. Analysis is
reasoning; commentary without a recipient is text for the user before a call; a call of an unknown tool stays
text. An answer without a header is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from keystroke.assist.tool_calls.json_scan import ValueScanner, mark_overlap
from keystroke.assist.tool_calls.segments import ReasoningSegment, Segment, TextSegment
from keystroke.assist.tool_calls.streamed_call import JsonCall
from keystroke.assist.tool_calls.tools import Toolset
from keystroke.engine.tokenizer import Tokenizer

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<>]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_LONGEST_HEADER = 600  # characters


class HarmonyParser:
    """Splits a streamed answer into text, reasoning and calls. `parallel` False: text after the first call
    is not read."""

    def __init__(self, toolset: Toolset, *, parallel: bool = True) -> None:
        self._toolset = toolset
        self._parallel = parallel
        self._pending = ""
        self._state: Callable[[list[Segment], bool], bool] = self._read_header
        self._is_first = True
        self._called = self._has_text = False
        self._call: JsonCall | None = None
        self._arguments = ValueScanner()  # finds the end of the call's arguments
        self._reasons = False

    def feed(self, text: str) -> list[Segment]:
        return self._run(text, final=False)

    def finish(self) -> list[Segment]:
        return self._run("", final=True)

    def _run(self, text: str, *, final: bool) -> list[Segment]:
        self._pending += text
        out: list[Segment] = []
        while self._state(out, final):
            pass
        return out

    def _read_header(self, out: list[Segment], final: bool) -> bool:
        if self._is_first and not _may_be_header(self._pending):
            return self._begin_body("final", None, self._pending)
        header, mark, body = self._pending.partition(MESSAGE)
        if not mark:
            if final or len(header) > _LONGEST_HEADER:
                self._pending = ""
            return False
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        return self._begin_body(
            channel[1] if channel is not None else "final",
            recipient[1] if recipient is not None else None,
            body,
        )

    def _begin_body(self, channel: str, recipient: str | None, body: str) -> bool:
        shown = None if recipient is None else self._toolset.find(recipient)
        self._call = None if shown is None else JsonCall(shown)
        self._arguments = ValueScanner()
        self._reasons = channel == "analysis" and shown is None
        self._pending, self._state, self._is_first = body, self._start_body, False
        return True

    def _start_body(self, out: list[Segment], final: bool) -> bool:
        if self._called and not self._parallel:
            self._call, self._pending, self._state = None, "", self._ignore_rest
            return False
        if self._call is not None:
            out += self._call.begin()
        elif not self._reasons and self._has_text and self._pending.strip():
            out.append(TextSegment("\n\n"))
        elif not self._pending and not final:
            return False
        self._state = self._read_body
        return True

    def _read_body(self, out: list[Segment], final: bool) -> bool:
        found = [(at, mark) for mark in _ENDS if (at := self._pending.find(mark)) >= 0]
        at, mark = min(found, default=(len(self._pending), ""))
        if not mark and not final:
            at -= max(mark_overlap(self._pending, each) for each in _ENDS)
        text, rest = self._pending[:at], self._pending[at + len(mark) :]
        if text and self._call is not None:
            if not self._arguments.ended:
                self._arguments.feed(text)
            out += self._call.add(text)
        elif text and self._reasons:
            out.append(ReasoningSegment(text))
        elif text:
            self._has_text = True
            out.append(TextSegment(text))
        self._pending = rest
        if not mark and not (final and self._call is not None and self._arguments.ended):
            return False  # a call that was cut off stays open
        if self._call is not None:
            out += self._call.end()
            self._called = True
        self._call, self._state = None, self._read_header
        return True

    def _ignore_rest(self, out: list[Segment], final: bool) -> bool:
        del out, final
        self._pending = ""
        return False


def _may_be_header(text: str) -> bool:
    start = text.lstrip()
    return not start or start.startswith(("<|", "to=")) or "<|".startswith(start) or "to=".startswith(start)


def harmony_rules(
    tokenizer: Tokenizer, names: Sequence[str], *, required: bool, parallel: bool, answer: str = ""
) -> list[str]:
    """The rules of an answer in channels that may call `names`: `arguments_N` is what the Nth takes,
    `answer` the rule of the final text."""

    def mark(text: str) -> str:
        token = tokenizer.special(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def body(name: str, end: str) -> str:
        """Text up to a mark, which is no text where the tokenizer has it as a token."""
        if tokenizer.special(end) is not None:
            return f"TEXT {mark(end)}"
        rules.append(rf"{name}[lazy]: /(?s:.*){re.escape(end)}/")
        return name

    rules: list[str] = []
    again = f'{mark(START)} "assistant"'
    said = body("said", END)
    rules.append(f'aside: {mark(CHANNEL)} ("analysis" | "commentary") {mark(MESSAGE)} {said} {again}')
    json_type = f'(" " {mark(CONSTRAIN)}? "json")?'
    calls = [
        f'({json.dumps(f" to=functions.{name}")} {mark(CHANNEL)} "commentary" {json_type} {mark(MESSAGE)}'
        f" | {mark(CHANNEL)} {json.dumps(f'commentary to=functions.{name}')} {json_type} {mark(MESSAGE)})"
        f" arguments_{number}"
        for number, name in enumerate(names)
    ]
    rules.append(f"call: {' | '.join(calls)}")
    more = f" ({mark(CALL)} {again} call)*" if parallel else ""
    rules.append(f"calls: call{more}")
    rules.append(f'final: {mark(CHANNEL)} "final" {mark(MESSAGE)} {answer or "TEXT"}')
    rules.append("TEXT: /(?s:.*)/")
    rules.append(f"start: aside* {'calls' if required else '(calls | final)'}")
    return rules
