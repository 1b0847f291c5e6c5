"""One call as it is written: its parts become segments as soon as they are certain.

The calls of an edit tool, which become patches, are emitted when they are complete. A parameter that a model
writes twice counts once.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec

from keystroke.assist.tool_calls.json_scan import StringReader
from keystroke.assist.tool_calls.segments import (
    Segment,
    TextSegment,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallSegment,
    ToolCallStart,
)
from keystroke.assist.tool_calls.tools import ShownTool


class ParameterCall:
    """A call whose parameters follow one another, each value as plain text."""

    def __init__(self, shown: ShownTool) -> None:
        self._shown = shown
        self._values: dict[str, Any] = {}
        self._key = ""
        self._text: list[str] = []  # of a value that is emitted when it is complete
        self._streams = False  # whether the value is emitted while it is written

    @property
    def names(self) -> frozenset[str]:
        """The declared parameters; empty where the schema does not list them."""
        return frozenset(self._shown.properties)

    def begin(self) -> list[Segment]:
        return [] if self._shown.is_edit else [ToolCallStart(self._shown.tool)]

    def open_value(self, name: str) -> list[Segment]:
        self._key, self._text = name, []
        is_first = name not in self._values
        if self._shown.is_edit:
            self._streams = False
        elif self._shown.tool.custom:
            self._streams = is_first and name == "input"
        else:
            self._streams = is_first and self._is_text(name)
            if self._streams:
                return [ToolArgumentsDelta(f'{self._key_prefix(name)}"')]
        return []

    def add(self, text: str) -> list[Segment]:
        if not self._streams:
            self._text.append(text)
            return []
        written = text if self._shown.tool.custom else json.dumps(text, ensure_ascii=False)[1:-1]
        return [ToolArgumentsDelta(written)] if written else []

    def close_value(self) -> list[Segment]:
        name, is_first = self._key, self._key not in self._values
        if self._streams:
            self._values[name] = None
            return [] if self._shown.tool.custom else [ToolArgumentsDelta('"')]
        value = self._parse_value(name, "".join(self._text))
        lead = self._key_prefix(name)
        if is_first:
            self._values[name] = value
        if self._shown.is_edit or self._shown.tool.custom or not is_first:
            return []
        return [ToolArgumentsDelta(lead + json.dumps(value, ensure_ascii=False))]

    def end(self) -> list[Segment]:
        tool = self._shown.tool
        if self._shown.is_edit:
            payload = self._shown.payload(self._values)
            if payload is None:
                return [TextSegment(json.dumps({"name": self._shown.name, "arguments": self._values}))]
            return [ToolCallSegment(tool, payload)]
        if tool.custom:
            return [ToolCallEnd()]
        return [ToolArgumentsDelta("}" if self._values else "{}"), ToolCallEnd()]

    def _key_prefix(self, name: str) -> str:
        return ("{" if not self._values else ", ") + json.dumps(name, ensure_ascii=False) + ": "

    def _is_text(self, name: str) -> bool:
        schema = self._shown.properties.get(name)
        return not isinstance(schema, dict) or schema.get("type") == "string" or not _schema_types(schema)

    def _parse_value(self, name: str, text: str) -> Any:
        """The value of a parameter's text: JSON where the schema asks for something else than text."""
        if self._is_text(name):
            return text
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeError):
            value = msgspec.json.decode(text.strip())
            if not (isinstance(value, str) and "string" in _schema_types(self._shown.properties.get(name))):
                return value
        return text


def _schema_types(schema: Any) -> frozenset[str]:
    """The types that a schema allows; empty where it states none."""
    if not isinstance(schema, dict):
        return frozenset()
    found: set[str] = set()
    named = schema.get("type")
    found.update([named] if isinstance(named, str) else named if isinstance(named, list) else [])
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            found |= _schema_types(option)
    if not found and isinstance(schema.get("enum"), list):
        found = {"string" if isinstance(value, str) else "other" for value in schema["enum"]}
    return frozenset(found)


class JsonCall:
    """A call whose arguments are written as one JSON value. `head` is the text before them, which is emitted
    with them where an edit turns out to be none."""

    def __init__(self, shown: ShownTool, head: str = "") -> None:
        self._shown = shown
        self._input = StringReader("input") if shown.tool.custom and not shown.is_edit else None
        self._head = head
        self._text: list[str] = []  # the arguments of an edit

    def begin(self) -> list[Segment]:
        return [] if self._shown.is_edit else [ToolCallStart(self._shown.tool)]

    def add(self, text: str) -> list[Segment]:
        if self._shown.is_edit:
            self._text.append(text)
            return []
        written = text if self._input is None else self._input.feed(text)
        return [ToolArgumentsDelta(written)] if written else []

    def end(self) -> list[Segment]:
        if not self._shown.is_edit:
            return [ToolCallEnd()]
        try:
            payload = self._shown.payload(msgspec.json.decode("".join(self._text)))
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            payload = None
        return self.as_text() if payload is None else [ToolCallSegment(self._shown.tool, payload)]

    def as_text(self) -> list[Segment]:
        """The buffered text of an edit that turned out to be no call."""
        return [TextSegment(self._head + "".join(self._text))] if self._shown.is_edit else []
