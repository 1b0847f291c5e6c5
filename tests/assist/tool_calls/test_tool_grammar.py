"""An answer that may call tools: any text, and no call but a valid one."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keystroke.assist.tool_calls.forms import HERMES, LLAMA, MISTRAL, CallForm, call_form
from keystroke.assist.tool_calls.grammar import calls_constraint
from keystroke.assist.tool_calls.parser import AnswerParser
from keystroke.assist.tool_calls.segments import (
    TextSegment,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallSegment,
    ToolCallStart,
)
from keystroke.assist.tool_calls.tools import OfferedTool, Toolset, short_toolset, whole_toolset
from keystroke.assist.tool_calls.usable import ToolConstraints, usable_tools
from keystroke.engine.base import Sampling
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.grammar.compiler import matcher_for
from keystroke.engine.grammar.constraint import Constraint, choice, regex
from keystroke.engine.grammar.validate import schema_violation
from keystroke.engine.model import Model
from keystroke.engine.speculative import SuffixDrafter
from keystroke.engine.tokenizer import ByteTokenizer

MARKS = {"<tool_call>": 270, "</tool_call>": 271, "[TOOL_CALLS]": 272}
PLAIN = ByteTokenizer(SPECIAL, eos=EOS, vocab_size=320)
MARKED = ByteTokenizer({**SPECIAL, **MARKS}, eos=EOS, vocab_size=320)
F = OfferedTool(
    "f",
    parameters={
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    },
)
G = OfferedTool("g", parameters={"type": "object", "properties": {}, "additionalProperties": False})
PATCH = OfferedTool(
    "apply_patch",
    custom=True,
    grammar=("lark", 'start: "*** Begin Patch" LF ("+" /.+/ LF){1,2} "*** End"\n%import common.LF'),
)
TOOLS = whole_toolset([F, G, PATCH])


def accepts(constraint: Constraint, text: str, tokenizer: ByteTokenizer = PLAIN) -> bool:
    """Whether `text` is a whole answer."""
    held = matcher_for(constraint, tokenizer, EchoEngine().info)
    tokens = tokenizer.encode(text, special=True)
    return held.advance(tokens) == len(tokens) and held.is_accepting


CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>'
WRONG = CALL.replace('"n": 3', '"n": 30')
FENCED = '```json\n{\n  "name": "f",\n  "arguments": {"n": 3}\n}\n```'
INPUT = json.dumps({"input": '*** Begin Patch\n+"x\n*** End'})
PATCHED = f'<tool_call>\n{{"name": "apply_patch", "arguments": {INPUT}}}\n</tool_call>'


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["marks are text", "marks are tokens"])
def test_text_is_free_until_a_call_begins(tokenizer: ByteTokenizer) -> None:
    free = calls_constraint(TOOLS, HERMES, tokenizer)
    for text in (
        "",
        "Hello.",
        'x = {"name": "y"}',
        "```python\nprint(1)\n```",
        CALL,
        f"I look.\n{CALL}",
        PATCHED,
    ):
        assert accepts(free, text, tokenizer), text
    assert accepts(free, f"{CALL}\n{CALL} and so on.", tokenizer)
    for text in (WRONG, f"I look.\n{WRONG}", CALL.replace("f", "h"), CALL[:-5], PATCHED.replace("+", "-")):
        assert not accepts(free, text, tokenizer), text


def test_a_call_in_another_form_is_held_to_its_arguments_too() -> None:
    free = calls_constraint(TOOLS, HERMES, PLAIN)
    assert accepts(free, FENCED)
    assert accepts(free, f"I will:\n{FENCED}\nDone.")
    assert accepts(free, '{"name": "g", "parameters": {}}')
    assert not accepts(free, FENCED.replace("3", "30"))
    assert not accepts(free, f"I will:\n{FENCED}".replace("3", "30"))
    assert not accepts(free, FENCED.replace('"f"', '"cat"'))
    assert accepts(free, f"Like this:\n{FENCED}".replace('"f"', '"cat"'))  # an example of something else


def test_where_a_call_is_required_nothing_else_is_allowed() -> None:
    only = calls_constraint(TOOLS, HERMES, PLAIN, required=True)
    assert accepts(only, CALL)
    assert accepts(only, f"{CALL}\n{CALL}")
    assert not accepts(only, "Hello.")
    assert not accepts(only, f"Hello. {CALL}")
    single = calls_constraint(TOOLS, HERMES, PLAIN, required=True, parallel=False)
    assert accepts(single, CALL)
    assert not accepts(single, f"{CALL}\n{CALL}")
    named = calls_constraint(TOOLS, HERMES, PLAIN, ToolConstraints({"g"}), required=True)
    assert not accepts(named, CALL)
    assert accepts(named, '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>')


def test_one_call_at_a_time_where_several_are_not_wanted() -> None:
    single = calls_constraint(TOOLS, HERMES, PLAIN, parallel=False)
    assert accepts(single, "Hello.")
    assert accepts(single, f"First. {CALL}\n")
    assert accepts(single, FENCED)
    assert not accepts(single, f"{CALL}\n{CALL}")
    assert not accepts(single, f"{CALL}\nThen.")


@pytest.mark.parametrize(
    "parameters",
    [
        {"description": "anything"},
        {"properties": {"n": {"type": "integer"}}},
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"n": {"type": "integer"}}}}},
        {"anyOf": [{"type": "object", "properties": {"n": {"type": "integer"}}}, {"type": "integer"}]},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_forgets(parameters: dict[str, Any]) -> None:
    only = calls_constraint(
        whole_toolset([OfferedTool("f", parameters=parameters)]), HERMES, PLAIN, required=True
    )
    assert accepts(only, CALL)
    for other in ("3", "null", "[3]", '"n"'):
        assert not accepts(only, CALL.replace('{"n": 3}', other))


def test_every_template_has_its_own_form() -> None:
    assert call_form("... <tool_call> ...") == HERMES
    assert call_form("[TOOL_CALLS] [") == MISTRAL
    assert call_form("ipython parameters") == LLAMA
    assert call_form("{{ messages }}") == HERMES
    llama = calls_constraint(TOOLS, LLAMA, PLAIN, required=True)
    assert accepts(llama, '{"name": "f", "parameters": {"n": 3}}')
    assert not accepts(llama, CALL)
    for tokenizer in (PLAIN, MARKED):
        mistral = calls_constraint(TOOLS, MISTRAL, tokenizer, required=True)
        both = '[TOOL_CALLS][{"name": "f", "arguments": {"n": 3}}, {"name": "g", "arguments": {}}]'
        assert accepts(mistral, both, tokenizer)
        assert accepts(calls_constraint(TOOLS, MISTRAL, tokenizer), f"Well. {both}", tokenizer)


def test_an_answer_is_a_call_or_of_the_language_asked_for() -> None:
    either = calls_constraint(TOOLS, HERMES, PLAIN, answer=choice(["yes", "no"]))
    assert accepts(either, "yes")
    assert accepts(either, CALL)
    assert not accepts(either, "maybe")
    assert not accepts(calls_constraint(TOOLS, HERMES, PLAIN, required=True, answer=choice(["yes"])), "yes")


def test_small_models_replace_only_what_they_have_read_and_delete_only_when_asked() -> None:
    patch = OfferedTool("apply_patch", custom=True, grammar=("lark", 'start: "*** Begin Patch"'))
    shown = short_toolset([F, patch])

    def call(name: str, **arguments: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    seen = ["def f():\n", "    return '\\n\"'\n", "\n"]
    read = calls_constraint(shown, HERMES, PLAIN, ToolConstraints(seen_lines=seen, request="fix it"))
    for old in (seen[0], "".join(seen[:2]), seen[1], seen[1][:-1]):
        assert accepts(read, call("replace_lines", path="a.py", old=old, new="pass\n"))
    assert not accepts(read, call("replace_lines", path="a.py", old="old line\n", new="x\n"))
    assert not accepts(read, call("replace_lines", path="a.py", old=seen[1] + seen[0], new="x\n"))
    for blank in ("", "\n"):
        assert not accepts(read, call("replace_lines", path="a.py", old=blank, new="x\n"))
    assert not accepts(read, call("delete_file", path="a.py"))
    asked = calls_constraint(
        shown, HERMES, PLAIN, ToolConstraints(seen_lines=seen, request="Delete a.py please")
    )
    assert accepts(asked, call("delete_file", path="a.py"))
    unread = calls_constraint(shown, HERMES, PLAIN)
    assert not accepts(unread, call("replace_lines", path="a.py", old="def f():\n", new="x\n"))
    assert accepts(unread, call("write_file", path="a.py", content="x\n"))


@pytest.mark.parametrize(
    ("written", "same", "others"),
    [
        ("/w/k/a.py", ("/w/k/a.py", "k/a.py", "a.py", "./a.py"), ("b.py", "/w/k/b.py", "/w/a.py")),
        ("k/a.py", ("k/a.py", "./k/a.py", "/w/k/a.py"), ("a.py", "b/a.py", "k/a.pyi")),
    ],
)
def test_a_file_written_this_turn_is_not_created_again(
    written: str, same: tuple[str, ...], others: tuple[str, ...]
) -> None:
    patch = OfferedTool("apply_patch", custom=True, grammar=("lark", 'start: "*** Begin Patch"'))
    shown = short_toolset([F, patch])
    held = calls_constraint(shown, HERMES, PLAIN, ToolConstraints(request="Create files.", written=[written]))

    def accepted(path: str) -> bool:
        call = {"name": "write_file", "arguments": {"path": path, "content": "x\n"}}
        return accepts(held, f"<tool_call>\n{json.dumps(call)}\n</tool_call>")

    assert [accepted(path) for path in same] == [False] * len(same)
    assert [accepted(path) for path in others] == [True] * len(others)


# With models that say anything


def calls_of(toolset: Toolset, text: str, **kind: bool) -> list[tuple[OfferedTool, str]]:
    parser = AnswerParser(toolset, constrained=True, **kind)
    calls: list[tuple[OfferedTool, str]] = []
    for segment in parser.feed(text) + parser.finish():
        if isinstance(segment, ToolCallSegment):
            calls.append((segment.tool, segment.payload))
        elif isinstance(segment, ToolCallStart):
            calls.append((segment.tool, ""))
        elif isinstance(segment, ToolArgumentsDelta):
            calls[-1] = (calls[-1][0], calls[-1][1] + segment.payload)
        else:
            assert isinstance(segment, TextSegment | ToolCallEnd)
    return calls


def valid(tool: OfferedTool, payload: str) -> bool:
    if tool.custom:
        return payload.startswith("*** Begin Patch\n+") and payload.endswith("\n*** End")
    value: Any = json.loads(payload)
    return schema_violation(tool.parameters, value) is None


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.booleans(),
    st.sampled_from([PLAIN, MARKED]),
    st.sampled_from([0.0, 1.0]),
)
# A mark spelled in letters, then an object with a tool's name and no arguments: free text to the grammar.
@example(1102, HERMES, False, MARKED, 1.0)
def test_every_call_of_a_model_that_says_anything_is_a_valid_one(
    seed: int, form: CallForm, required: bool, tokenizer: ByteTokenizer, temperature: float
) -> None:
    dice = random.Random(seed)
    said = "".join(
        dice.choice(
            ["hm ", "<tool_call>", '{"name": "f", "arguments": ', "```json\n", "[TOOL_CALLS]", CALL, "}"]
        )
        for _ in range(5)
    )
    model = Model("echo", EchoEngine(lambda _: said), tokenizer)
    constraint = calls_constraint(TOOLS, form, tokenizer, required=required)
    params = GenerationParams(250, Sampling(temperature, seed=seed), constraint=constraint)
    generation = Generation(model, model.engine.session(), [65], params)
    text = "".join(chunk.text for chunk in generation)
    if generation.finish is Finish.STOP:
        calls = calls_of(TOOLS, text)
        assert all(valid(tool, payload) for tool, payload in calls)
        assert calls or not required


ANY = OfferedTool("any", parameters={"type": "object"})  # whose arguments may look like a call
LINES = OfferedTool(
    "lines", parameters={"type": "object", "properties": {"old": {"type": "string"}}, "required": ["old"]}
)
HOSTILE = [
    "hm ",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": ',
    '{"name": "any", "arguments": {"x": ',
    '{"name": "f", "arguments": 30}',
    '{"name": "g", "arguments": {}}',
    '{"name": "lines", "arguments": {"old": "unread"}}',
    '{"name": "\\u0066", "arguments": {"n": 30}}',
    '{"name": "f"}',
    '{"arguments": {"n": 30}, "name": "f"}',
    '{\x1c"name": "f", "arguments": {"n": 30}}',
    '<function=f>{"n": 30}</function>',
    '<invoke name="f"><parameter name="n">3</parameter></invoke>',
    "<function=apply_patch><parameter=input>-</parameter></function>",
    "```json\n",
    "\n```",
    "[TOOL_CALLS]",
    "[",
    "]",
    '"',
    "}",
    CALL,
    CALL.replace("\n", " " * 70),
]


PIECES = [
    *HOSTILE,
    " ",
    "{",
    "{ ",
    '"na',
    'me"',
    "<",
    "<tool",
    "`",
    "``",
    "json",
    "{'x': 1}",
    "word",
    "\n",
    "[TOOL",
]


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from(PIECES), max_size=8),
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.booleans(),
    st.sampled_from([PLAIN, MARKED]),
    st.integers(0, 30),
)
def test_a_mask_that_is_remembered_is_the_one_that_would_be_computed(
    said: list[str], form: CallForm, parallel: bool, tokenizer: ByteTokenizer, back: int
) -> None:
    remembering = calls_constraint(TOOLS, form, tokenizer, parallel=parallel)
    assert remembering.free is not None
    info = EchoEngine().info
    held = matcher_for(remembering, tokenizer, info)
    plain = matcher_for(dataclasses.replace(remembering, free=None), tokenizer, info)
    tokens = tokenizer.encode("".join(said), special=True)
    for place, token in enumerate(tokens):
        assert (held.row(0) == plain.row(0)).all()
        assert (held.advance([token]), held.has_failed) == (plain.advance([token]), plain.has_failed)
        if held.has_failed or held.is_finished:
            break
        if place == back:
            held.rollback(min(back, 7))
            plain.rollback(min(back, 7))
            assert (held.row(0) == plain.row(0)).all()


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([*PIECES, "[TOOL_CALLS]", "</tool_call>"]), min_size=1, max_size=8),
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.booleans(),
    st.sampled_from([PLAIN, MARKED]),
    st.sampled_from([Sampling(), Sampling(0.7, seed=3), Sampling(0.7, top_k=5, seed=3)]),
    st.booleans(),
)
def test_free_text_without_masks_is_the_text_with_them(
    said: list[str],
    form: CallForm,
    parallel: bool,
    tokenizer: ByteTokenizer,
    sampling: Sampling,
    drafts: bool,
) -> None:
    trusting = calls_constraint(TOOLS, form, tokenizer, parallel=parallel)
    texts = []
    for constraint in (trusting, dataclasses.replace(trusting, free=None)):
        model = Model("echo", EchoEngine(lambda _: "".join(said)), tokenizer)
        params = GenerationParams(120, sampling, constraint=constraint)
        drafter = SuffixDrafter() if drafts else None
        generation = Generation(model, model.engine.session(), [65], params, drafter=drafter)
        text = "".join(chunk.text for chunk in generation)
        texts.append((text, generation.tokens, generation.finish, list(generation.session.tokens)))
    assert texts[0] == texts[1]


@settings(max_examples=80)
@given(
    st.lists(st.sampled_from(HOSTILE), max_size=6),
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([PLAIN, MARKED]),
    st.integers(0, 10**6),
)
def test_no_text_becomes_a_call_that_the_constraint_would_not_have_allowed(
    said: list[str], form: CallForm, parallel: bool, formatted: bool, tokenizer: ByteTokenizer, seed: int
) -> None:
    shown = short_toolset([F, ANY, LINES])
    shown = Toolset((*shown.shown, *whole_toolset([G, PATCH]).shown), short=True)
    bounds = ToolConstraints({"f", "any", "lines", "apply_patch"}, seen_lines=["read\n"])
    answer = regex("(?s:.*)") if formatted else None
    constraint = calls_constraint(shown, form, tokenizer, bounds, parallel=parallel, answer=answer)
    model = Model("echo", EchoEngine(lambda _: "".join(said)), tokenizer)
    params = GenerationParams(300, Sampling(0.7 if seed % 2 else 0.0, seed=seed), constraint=constraint)
    generation = Generation(model, model.engine.session(), [65], params)
    text = "".join(chunk.text for chunk in generation)
    calls = calls_of(usable_tools(shown, bounds), text, parallel=parallel, formatted=formatted)
    if generation.finish is Finish.STOP:
        assert parallel or len(calls) <= 1
        for tool, payload in calls:
            assert tool.name in (bounds.only or ())
            assert valid(tool, payload)
            assert tool is not LINES or formatted or json.loads(payload)["old"] in ("read", "read\n")
