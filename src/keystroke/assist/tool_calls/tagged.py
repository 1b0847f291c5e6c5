"""Calls whose arguments stand between tags: Qwen's XML, and GLM's keys and values.

    <function=NAME> <parameter=KEY> value </parameter> ... </function>
    NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value> ... </tool_call>

Values are plain text and may contain the closing tag itself, as a file about this very format does: it closes
a value only where another parameter or the end of the call follows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from keystroke.assist.tool_calls.json_scan import mark_overlap
from keystroke.assist.tool_calls.segments import Segment
from keystroke.assist.tool_calls.streamed_call import ParameterCall
from keystroke.assist.tool_calls.tools import Toolset

_LONGEST_TAG = 300  # characters; what is longer is no tag


@dataclass(frozen=True, slots=True)
class Tags:
    head: re.Pattern[str]  # from the opening mark to the first parameter; its group is the name
    head_lead: str  # how the head begins
    opening: re.Pattern[str]  # of a value; its group is the parameter's name
    lead: str  # how an opening begins
    closing: str  # of a value
    end: str  # of the call
    on_lines: bool  # whether a value stands between line ends that are not part of it


QWEN_TAGS = Tags(
    re.compile(r"\s*<function=([^<>\s]{1,200})>"),
    "<function=",
    re.compile(r"<parameter=([^<>\s]{1,200})>"),
    "<parameter=",
    "</parameter>",
    "</function>",
    True,
)
GLM_TAGS = Tags(
    re.compile(r"\s*([\w.\-]{1,200})(?=\s*<)"),
    "",
    re.compile(r"<arg_key>([^<>]{1,200})</arg_key>\s*<arg_value>"),
    "<arg_key>",
    "</arg_value>",
    "</tool_call>",
    False,
)


def tagged_call(tags: Tags, toolset: Toolset, text: str) -> tuple[TaggedCall, int] | bool | None:
    """The call that begins with `text`, which follows the opening mark, and the length of its head; False: no
    call begins; None: more text is needed."""
    head = tags.head.match(text)
    if head is None:
        start = text.lstrip()
        if tags.head_lead:
            open_yet = tags.head_lead.startswith(start) or start.startswith(tags.head_lead)
        else:
            open_yet = re.fullmatch(r"[\w.\-]*\s*", start) is not None
        return None if open_yet and len(start) < _LONGEST_TAG else False
    shown = toolset.find(head[1])
    return False if shown is None else (TaggedCall(tags, ParameterCall(shown)), head.end())


class TaggedCall:
    """Reads one call from the end of its head."""

    def __init__(self, tags: Tags, call: ParameterCall) -> None:
        self._tags = tags
        self._call = call
        self._in_value = self._value_begun = False
        self._searched = 0  # where the search for the closing tag continues
        self.ended = False

    def begin(self) -> list[Segment]:
        return self._call.begin()

    def read(self, text: str, *, final: bool = False) -> tuple[list[Segment], str]:
        """The segments that `text` completes, and what is left of it. `final`: the text has ended."""
        out: list[Segment] = []
        more = True
        while more and not self.ended:
            more, text = (self._read_value if self._in_value else self._read_between)(text, final, out)
        return out, text

    def _read_between(self, text: str, final: bool, out: list[Segment]) -> tuple[bool, str]:
        rest = text.lstrip()
        continues = self._continues_call(rest, final)
        if continues is None:
            return False, text
        opening = self._tags.opening.match(rest)
        if opening is not None:
            out += self._call.open_value(opening[1])
            self._in_value, self._value_begun, self._searched = True, False, 0
            return True, rest[opening.end() :]
        self.ended = True  # also where something else follows: a call ends with its last parameter
        out += self._call.end()
        return False, rest.removeprefix(self._tags.end)

    def _read_value(self, text: str, final: bool, out: list[Segment]) -> tuple[bool, str]:
        tags = self._tags
        if not self._value_begun:
            if not text and not final:
                return False, text
            self._value_begun = True
            if tags.on_lines:
                text = text.removeprefix("\n")
        while (at := text.find(tags.closing, self._searched)) >= 0:
            continues = self._continues_call(text[at + len(tags.closing) :].lstrip(), final)
            if continues is None:
                return self._emit(text, at, out)
            if continues:
                value = text[:at]
                out += self._call.add(value.removesuffix("\n") if tags.on_lines else value)
                out += self._call.close_value()
                self._in_value = False
                return True, text[at + len(tags.closing) :]
            self._searched = at + len(tags.closing)
        return self._emit(text, len(text) - mark_overlap(text, tags.closing), out)

    def _emit(self, text: str, end: int, out: list[Segment]) -> tuple[bool, str]:
        """Emit what is certainly part of the value. A line end may belong to the closing tag."""
        if self._tags.on_lines and text[:end].endswith("\n"):
            end -= 1
        out += self._call.add(text[:end])
        self._searched = max(self._searched - end, 0)
        return False, text[end:]

    def _continues_call(self, rest: str, final: bool) -> bool | None:
        """Whether `rest` continues the call after a value, with a parameter or its end; None: undecided."""
        tags = self._tags
        if rest.startswith(tags.end):
            return True
        opening = tags.opening.match(rest)
        if opening is not None:
            return not self._call.names or opening[1] in self._call.names
        if final:
            return tags.end.startswith(rest)
        possible = tags.end.startswith(rest) or tags.lead.startswith(rest) or rest.startswith(tags.lead)
        return None if possible and len(rest) < _LONGEST_TAG else False
