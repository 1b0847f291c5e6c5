"""Calls are found in whatever common form they are written, and do not depend on how the text was cut."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.assist.tool_calls import whole_calls
from keystroke.assist.tool_calls.json_scan import StringReader, ValueScanner
from keystroke.assist.tool_calls.parser import AnswerParser
from keystroke.assist.tool_calls.segments import (
    ReasoningSegment,
    Segment,
    TextSegment,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallSegment,
    ToolCallStart,
)
from keystroke.assist.tool_calls.tools import OfferedTool, Toolset, short_toolset, whole_toolset

F = OfferedTool("f", parameters={"type": "object", "properties": {"x": {"type": "integer"}, "s": {}}})
PATCH = OfferedTool("apply_patch", custom=True, grammar=("lark", 'start: "*** Begin Patch"'))
TOOLS = whole_toolset([F, PATCH])
ANSWERS: list[tuple[str, list[Segment]]] = [
    ("plain text", [TextSegment("plain text")]),
    ("a < b and c > d, x[0] = {1: `2`}", [TextSegment("a < b and c > d, x[0] = {1: `2`}")]),
    ('<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>', [ToolCallSegment(F, '{"x":1}')]),
    (
        'hi <tool_call>\n{"name":"f","arguments":{}}\n</tool_call>\n',
        [TextSegment("hi "), ToolCallSegment(F, "{}")],
    ),
    (
        '<tool_call>{"name":"apply_patch","arguments":{"input":"*** Begin"}}</tool_call>',
        [ToolCallSegment(PATCH, "*** Begin")],
    ),
    ('{"name": "f", "parameters": {"x": 2}}', [ToolCallSegment(F, '{"x":2}')]),
    ('{"not": "a call"}', [TextSegment('{"not": "a call"}')]),
    ("<tool_call>{broken</tool_call>", [TextSegment("<tool_call>{broken</tool_call>")]),
    ('<tool_call>{"name":"rm"}</tool_call>', [TextSegment('<tool_call>{"name":"rm"}</tool_call>')]),
    ("<think>hm</think>\n\nyes", [ReasoningSegment("hm"), TextSegment("yes")]),
    ("<think>never closed", [ReasoningSegment("never closed")]),
    ("<tool_call>never closed", [TextSegment("<tool_call>never closed")]),
    (
        '<think>hm</think>\n{"name": "f", "arguments": {"x": 3}}',
        [ReasoningSegment("hm"), ToolCallSegment(F, '{"x":3}')],
    ),
    ('```json\n{"name": "f", "arguments": {"x": 1}}\n```', [ToolCallSegment(F, '{"x":1}')]),
    (
        '```json\n{\n  "name": "f",\n  "arguments": {\n    "x": 1\n  }\n}\n```\n',
        [ToolCallSegment(F, '{"x":1}')],
    ),
    (
        'See:\n```\n{"name": "f", "arguments": {}}\n```\nDone.',
        [TextSegment("See:\n"), ToolCallSegment(F, "{}"), TextSegment("Done.")],
    ),
    ('```json\n{"name": "x", "age": 3}\n```', [TextSegment('```json\n{"name": "x", "age": 3}\n```')]),
    ("```python\nprint({})\n```\n", [TextSegment("```python\nprint({})\n```\n")]),
    ("`{x}` and ```{y}``` stay", [TextSegment("`{x}` and ```{y}``` stay")]),
    (
        'So {"name": "f", "arguments": {"s": "}{"}} now',
        [TextSegment("So "), ToolCallSegment(F, '{"s":"}{"}'), TextSegment("now")],
    ),
    (
        '{"name": "f", "arguments": {}}\n{"name": "f", "arguments": {"x": 1}}',
        [ToolCallSegment(F, "{}"), ToolCallSegment(F, '{"x":1}')],
    ),
    (
        '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {}}]',
        [ToolCallSegment(F, '{"x":1}'), ToolCallSegment(F, "{}")],
    ),
    ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', [ToolCallSegment(F, '{"x":1}')]),
    ('<function=f>{"x": 4}</function>', [ToolCallSegment(F, '{"x":4}')]),
    (
        "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n<parameter=s>\na\nb\n"
        "</parameter>\n</function>\n</tool_call>",
        [ToolCallSegment(F, '{"x":5,"s":"a\\nb"}')],
    ),
    (
        '<invoke name="f"><parameter name="x">6</parameter></invoke> ok',
        [ToolCallSegment(F, '{"x":6}'), TextSegment("ok")],
    ),
    ("<function=rm>{}</function>", [TextSegment("<function=rm>{}</function>")]),
    ('{"name": "f", "arguments": "{\\"x\\": 1}"}', [ToolCallSegment(F, '{"x": 1}')]),
]  # fmt: skip


def merged(segments: list[Segment]) -> list[Segment]:
    out: list[Segment] = []
    for s in segments:
        last = out[-1] if out else None
        if isinstance(s, TextSegment) and isinstance(last, TextSegment):
            out[-1] = TextSegment(last.text + s.text)
        elif isinstance(s, ReasoningSegment) and isinstance(last, ReasoningSegment):
            out[-1] = ReasoningSegment(last.text + s.text)
        elif isinstance(s, ToolArgumentsDelta) and isinstance(last, ToolArgumentsDelta):
            out[-1] = ToolArgumentsDelta(last.payload + s.payload)
        else:
            out.append(s)
    return out


def read(toolset: Toolset, answer: str, seed: int, **kind: bool) -> list[Segment]:
    rng = random.Random(seed)
    parser = AnswerParser(toolset, **kind)
    said: list[Segment] = []
    at = 0
    while at < len(answer):
        size = len(answer) if seed == 0 else rng.randint(1, 6)
        said += parser.feed(answer[at : at + size])
        at += size
    return merged(said + parser.finish())


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
@pytest.mark.parametrize("seed", range(5))
def test_segments_do_not_depend_on_how_the_text_was_cut(
    answer: str, expected: list[Segment], seed: int
) -> None:
    assert read(TOOLS, answer, seed) == expected


HELD: list[tuple[str, list[Segment]]] = [
    (
        'Now.\n<tool_call>\n{"name": "f", "arguments": {"s": "}\\""}}\n</tool_call>\nend',
        [
            TextSegment("Now.\n"),
            ToolCallStart(F),
            ToolArgumentsDelta('{"s": "}\\""}'),
            ToolCallEnd(),
            TextSegment("end"),
        ],
    ),
    (
        '{"name": "apply_patch", "arguments": {"input": "\\n\\u00e9\\ud83d\\ude00\\"\\\\"}}',
        [ToolCallStart(PATCH), ToolArgumentsDelta('\né😀"\\'), ToolCallEnd()],
    ),
    (
        '```json\n{\n  "name": "f",\n  "arguments": {"x": 1}\n}\n```',
        [ToolCallStart(F), ToolArgumentsDelta('{"x": 1}'), ToolCallEnd()],
    ),
    ('{"name": "f", "parameters": {}}', [ToolCallStart(F), ToolArgumentsDelta("{}"), ToolCallEnd()]),
    (
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"x": 2}}]',
        [
            ToolCallStart(F),
            ToolArgumentsDelta("{}"),
            ToolCallEnd(),
            ToolCallStart(F),
            ToolArgumentsDelta('{"x": 2}'),
            ToolCallEnd(),
        ],
    ),
    (
        '<tool_call>\n{"name": "f", "arguments": {"s": "cut o',
        [ToolCallStart(F), ToolArgumentsDelta('{"s": "cut o')],
    ),
    # Where a head stands a call begins for the grammar, whatever stands around it.
    (
        '<tool_call>hm {"name": "f", "arguments": {}}</tool_call>',
        [
            TextSegment("<tool_call>hm "),
            ToolCallStart(F),
            ToolArgumentsDelta("{}"),
            ToolCallEnd(),
            TextSegment("</tool_call>"),
        ],
    ),
    (
        '<tool_call>\n[{"name": "f", "arguments": {}},\n{"name": "f", "arguments": {}}]\n</tool_call> ok',
        [
            ToolCallStart(F),
            ToolArgumentsDelta("{}"),
            ToolCallEnd(),
            ToolCallStart(F),
            ToolArgumentsDelta("{}"),
            ToolCallEnd(),
            TextSegment("ok"),
        ],
    ),
    (
        '{"name": "x", "steps": {"name": "f", "arguments": {}}}',
        [
            TextSegment('{"name": "x", "steps": '),
            ToolCallStart(F),
            ToolArgumentsDelta("{}"),
            ToolCallEnd(),
            TextSegment("}"),
        ],
    ),
    ("Say <tool_call> and go on", [TextSegment("Say <tool_call> and go on")]),
    # In forms that the grammar leaves free: proved, or text.
    ('<function=f>{"x": 4}</function>', [ToolCallSegment(F, '{"x":4}')]),
    ('<function=f>{"x": "4"}</function>', [TextSegment('<function=f>{"x": "4"}</function>')]),
    ('{"name": "f"}', [ToolCallSegment(F, "{}")]),
    ('{"arguments": {"x": 1}, "name": "f"}', [TextSegment('{"arguments": {"x": 1}, "name": "f"}')]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', [ToolCallSegment(F, '{"x":1}')]),
    (
        '<tool_call>{"arguments": {"x": "1"}, "name": "f"}</tool_call>',
        [TextSegment('<tool_call>{"arguments": {"x": "1"}, "name": "f"}</tool_call>')],
    ),
    (
        "<function=apply_patch><parameter=input>*** Begin Patch</parameter></function>",
        [ToolCallSegment(PATCH, "*** Begin Patch")],
    ),
    (
        "<function=apply_patch><parameter=input>*** Begin</parameter></function>",
        [TextSegment("<function=apply_patch><parameter=input>*** Begin</parameter></function>")],
    ),
]


@pytest.mark.parametrize(("answer", "expected"), HELD)
@pytest.mark.parametrize("seed", range(5))
def test_calls_that_a_grammar_holds_come_out_as_they_are_written(
    answer: str, expected: list[Segment], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_calls, "_PATIENCE", 60.0)  # a loaded machine is slow, not wrong
    assert read(TOOLS, answer, seed, constrained=True) == expected


@pytest.mark.parametrize("constrained", [False, True])
def test_an_edit_becomes_a_patch_when_it_is_whole(constrained: bool) -> None:
    shown = short_toolset([PATCH])
    call = {"name": "replace_lines", "arguments": {"path": "a.py", "old": "x = 1\n", "new": "x = 2\n"}}
    patch = "*** Begin Patch\n*** Update File: a.py\n@@\n-x = 1\n+x = 2\n*** End Patch\n"
    assert read(shown, f"<tool_call>\n{json.dumps(call)}\n</tool_call>", 3, constrained=constrained) == [
        ToolCallSegment(PATCH, patch)
    ]


FORMATTED = [
    ('{"x": [{"name": "f", "arguments": {"x": "no"}}]}', None),
    ('{"name": "f", "arguments": {"x": "no"}}', None),
    ('{"name": "fred", "age": 3}', None),
    ("[1, 2]", None),
    (
        '<tool_call>\n{"name": "f", "arguments": {"s": "</tool_call>"}}\n</tool_call>',
        [ToolCallSegment(F, '{"s":"</tool_call>"}')],
    ),
    ('{"name": "f", "arguments": {"x": 1}}', [ToolCallSegment(F, '{"x":1}')]),
    (
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"x": 2}}]',
        [ToolCallSegment(F, "{}"), ToolCallSegment(F, '{"x":2}')],
    ),
]


@pytest.mark.parametrize(("answer", "expected"), FORMATTED)
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_has_a_form_is_calls_from_end_to_end_or_text(
    answer: str, expected: list[Segment] | None, seed: int
) -> None:
    assert read(TOOLS, answer, seed, constrained=True, formatted=True) == (expected or [TextSegment(answer)])


def test_where_one_call_is_wanted_what_follows_it_is_text() -> None:
    call = '{"name": "f", "arguments": {}}'
    said = read(TOOLS, f"{call}\n{call}", 1, constrained=True, parallel=False)
    assert said == [ToolCallStart(F), ToolArgumentsDelta("{}"), ToolCallEnd(), TextSegment(call)]


@given(st.text(alphabet='<>/tool_calhink{}"\n x`[', max_size=60), st.integers(1, 5))
def test_without_tools_or_thoughts_text_passes_unchanged(text: str, size: int) -> None:
    parser = AnswerParser(Toolset())
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    said = [s for p in pieces for s in parser.feed(p)] + parser.finish()
    if not text.lstrip().startswith("<think>"):
        assert "".join(s.text for s in said if isinstance(s, TextSegment)) == text


@given(st.text(alphabet='<>{}":,\n `[]name=fx', max_size=80), st.integers(1, 7), st.booleans())
def test_text_that_is_no_call_loses_nothing_but_white_space(text: str, size: int, constrained: bool) -> None:
    parser = AnswerParser(TOOLS, constrained=constrained)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    said = [s for p in pieces for s in parser.feed(p)] + parser.finish()
    if all(isinstance(s, TextSegment) for s in said):
        assert "".join(s.text for s in said if isinstance(s, TextSegment)).split() == text.split()


def test_without_tools_a_call_is_only_text() -> None:
    text = '<tool_call>{"name":"f"}</tool_call>'
    assert read(Toolset(), text, 1) == [TextSegment(text)]


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=4), values, max_size=3), st.integers(1, 5), st.booleans())
def test_a_scanner_finds_the_end_of_a_value(value: dict[str, object], size: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    scanner, taken = ValueScanner(), 0
    whole = text + " } and more ]"
    for at in range(0, len(whole), size):
        if not scanner.ended:
            taken += scanner.feed(whole[at : at + size])
    assert scanner.ended
    assert taken == len(text)


@given(st.text(max_size=30), st.integers(1, 7), st.booleans())
def test_a_string_reader_gives_the_text_piece_by_piece(text: str, size: int, ascii_only: bool) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii_only)
    reader = StringReader("input")
    said = "".join(reader.feed(written[at : at + size]) for at in range(0, len(written), size))
    assert said == text
