"""Calls in every format, cut into pieces of every size: parser, grammar, and what goes wrong."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest

from keystroke.assist.tool_calls.forms import (
    GLM,
    HARMONY,
    HERMES,
    NAMED,
    QWEN,
    CallForm,
    call_form,
    opens_thought,
)
from keystroke.assist.tool_calls.grammar import calls_constraint
from keystroke.assist.tool_calls.parser import answer_parser
from keystroke.assist.tool_calls.segments import (
    ReasoningSegment,
    TextSegment,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallSegment,
    ToolCallStart,
)
from keystroke.assist.tool_calls.tools import OfferedTool, Toolset, whole_toolset
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.grammar.compiler import matcher_for
from keystroke.engine.grammar.constraint import Constraint
from keystroke.engine.tokenizer import ByteTokenizer, StreamDecoder

WRITE = OfferedTool(
    "write_file",
    parameters={
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "when": {"enum": ["now", "later"]},
        },
        "required": ["path", "content"],
        "additionalProperties": False,
    },
)
RUN = OfferedTool("run", custom=True)
TOOLS = whole_toolset([WRITE, RUN])
FORMS = (QWEN, GLM, NAMED, HARMONY, HERMES)
CONTROL = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
)
PLAIN = ByteTokenizer(SPECIAL, eos=EOS, vocab_size=320)
MARKED = ByteTokenizer({**SPECIAL, **{m: 270 + i for i, m in enumerate(CONTROL)}}, eos=EOS, vocab_size=320)


def written(form: CallForm, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model of this form writes it."""

    def plain(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    if form is QWEN:
        inner = "".join(f"<parameter={k}>\n{plain(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"
    if form is GLM:
        inner = "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n" for k, v in arguments.items()
        )
        return f"<tool_call>{name}\n{inner}</tool_call>"
    if form is NAMED:
        return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"
    if form is HARMONY:
        body = json.dumps(arguments)
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}<|call|>"
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(form: CallForm, text: str) -> str:
    """A text as a model of this form says it to the user."""
    return f"<|channel|>final<|message|>{text}<|return|>" if form is HARMONY else text


def thought(form: CallForm, text: str) -> str:
    if form is HARMONY:
        return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"
    return f"{form.think[0]}{text}{form.think[1]}\n\n"


@dataclass
class Parsed:
    """An answer: its texts, its reasoning, and its calls with whether each is complete."""

    text: str
    reasoning: str
    calls: list[tuple[str, str, bool]]

    @property
    def arguments(self) -> list[Any]:
        return [json.loads(payload) for _, payload, _ in self.calls]


def parsed(form: CallForm, text: str, size: int, toolset: Toolset = TOOLS, **how: bool) -> Parsed:
    parser = answer_parser(form, toolset, **how)
    segments = [s for at in range(0, len(text), size) for s in parser.feed(text[at : at + size])]
    segments += parser.finish()
    found = Parsed("", "", [])
    for segment in segments:
        if isinstance(segment, TextSegment):
            found.text += segment.text
        elif isinstance(segment, ReasoningSegment):
            found.reasoning += segment.text
        elif isinstance(segment, ToolCallStart):
            found.calls.append((segment.tool.name, "", False))
        elif isinstance(segment, ToolArgumentsDelta):
            name, payload, _ = found.calls[-1]
            found.calls[-1] = (name, payload + segment.payload, False)
        elif isinstance(segment, ToolCallEnd):
            found.calls[-1] = (*found.calls[-1][:2], True)
        elif isinstance(segment, ToolCallSegment):
            found.calls.append((segment.tool.name, segment.payload, True))
    return found


LONG_FILE = "".join(f"    value_{n} = table[{n}]  # {'<' * (n % 3)}x\n" for n in range(2000))
CONTENTS = {
    "short": "x = 1\n",
    "empty": "",
    "blank lines": "\n\na\n\n",
    "quotes": 'print("a\\n", \'b\')  # "c"',
    "unicode": "é ✓ 𝄞 \u2028 e\u0301",
    "json": '{"name": "write_file", "arguments": {"path": "b"}}',
    "closing parameter in a line": 'end = "</parameter>"',
    "closing parameter on a line": "a\n</parameter>\nb",
    "closing function": "a </function> b",
    "closing call": 'a = "</tool_call>"\nb',
    "closing value": "a</arg_value>b",
    "key tag": "<arg_key>k</arg_key> alone",
    "opening parameter": "<parameter=path> alone",
    "think": "<think>no</think>",
    "list mark": "say [TOOL_CALLS] and [ARGS]",
    "channel": "a <channel> b | c <| d",
    "tabs and returns": "a\tb\r\nc",
    "fence": "```python\nx\n```",
    "html": "<div class='a'>&lt;</div>",
    "windows path": "C:\\new\\table",
}
SIZES = (1, 7, 100_000)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_file_arrives_as_it_was_written(form: CallForm, name: str, size: int) -> None:
    if form is HERMES and name == "closing call":
        pytest.skip("JSON between marks cannot hold the closing mark; the grammar escapes it")
    arguments = {"path": "src/a.py", "content": CONTENTS[name]}
    found = parsed(form, written(form, "write_file", arguments), size)
    assert [(call[0], call[2]) for call in found.calls] == [("write_file", True)]
    assert found.arguments == [arguments]
    assert found.text.strip() == found.reasoning == ""


@pytest.mark.parametrize("size", [13, 100_000])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_file_of_two_thousand_lines(form: CallForm, size: int) -> None:
    arguments = {"path": "big.py", "content": LONG_FILE}
    found = parsed(form, written(form, "write_file", arguments), size)
    assert found.arguments == [arguments]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_numbers_and_lists_have_the_types_of_the_schema(form: CallForm, size: int) -> None:
    arguments = {"path": "3", "content": "[1]", "mode": 420, "tags": ["a", "b"], "when": "now"}
    assert parsed(form, written(form, "write_file", arguments), size).arguments == [arguments]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [QWEN, GLM, NAMED, HERMES], ids=lambda form: form.name)
def test_words_before_and_after_calls_and_several_at_once(form: CallForm, size: int) -> None:
    first, second = {"path": "a", "content": "1"}, {"path": "b", "content": "2"}
    calls = written(form, "write_file", first) + "\n" + written(form, "write_file", second)
    found = parsed(form, f"I write two.\n\n{calls}\nDone.", size)
    assert found.arguments == [first, second]
    assert found.text.split() == ["I", "write", "two.", "Done."]


@pytest.mark.parametrize("size", SIZES)
def test_channels_before_and_between_calls(size: int) -> None:
    first, second = {"path": "a", "content": "1"}, {"path": "b", "content": "2"}
    again = "<|start|>assistant"
    text = (
        thought(HARMONY, "Two files.")
        + f"<|channel|>commentary<|message|>I write two.<|end|>{again}"
        + written(HARMONY, "write_file", first)
        + again
        + written(HARMONY, "write_file", second)
    )
    found = parsed(HARMONY, text, size)
    assert (found.reasoning, found.text) == ("Two files.", "I write two.")
    assert found.arguments == [first, second]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_reasoning_is_not_part_of_the_answer(form: CallForm, size: int) -> None:
    found = parsed(form, thought(form, "Is 2 < 3? Yes.") + said(form, "Yes, it is."), size)
    assert (found.reasoning, found.text.strip()) == ("Is 2 < 3? Yes.", "Yes, it is.")
    assert found.calls == []


@pytest.mark.parametrize("form", [QWEN, GLM, NAMED, HERMES], ids=lambda form: form.name)
def test_a_thought_that_the_prompt_opened(form: CallForm) -> None:
    found = parsed(form, f"hm{form.think[1]}\n\nyes", 2, thinking=True)
    assert (found.reasoning, found.text) == ("hm", "yes")
    think = MARKED.encode(form.think[0], special=True)
    assert opens_thought(form, MARKED, [65, 66, *think, 10])
    assert not opens_thought(form, MARKED, [*think, *MARKED.encode(form.think[1], special=True)])
    assert not opens_thought(form, PLAIN, [65, 66, 67])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_custom_tool_takes_its_text(form: CallForm, size: int) -> None:
    found = parsed(form, written(form, "run", {"input": 'echo "a\\b"\nls'}), size)
    assert found.calls == [("run", 'echo "a\\b"\nls', True)]


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("form", [QWEN, GLM, NAMED, HARMONY], ids=lambda form: form.name)
def test_a_call_that_is_cut_off_stays_open(form: CallForm, cut: float) -> None:
    arguments = {"path": "a.py", "content": "x = 1\n" * 40}
    text = written(form, "write_file", arguments)
    found = parsed(form, text[: int(len(text) * cut)], 5)
    assert [(name, done) for name, _, done in found.calls] == [("write_file", False)]
    assert '"path": "a.py"' in found.calls[0][1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", [QWEN, GLM, NAMED, HARMONY], ids=lambda form: form.name)
def test_a_tool_that_is_not_offered_is_no_call(form: CallForm, size: int) -> None:
    found = parsed(form, written(form, "delete_everything", {"path": "/"}), size)
    assert found.calls == []
    assert "/" in found.text


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> to call a tool.",
        "The mark [TOOL_CALLS] begins a list.",
        "In XML, <function=x> names it.",
        "a < b and b > c",
        "{ not json }",
        "<tool_call",
        "[TOOL_",
    ],
)
@pytest.mark.parametrize("form", [QWEN, GLM, NAMED], ids=lambda form: form.name)
def test_marks_that_are_only_mentioned_stay_text(form: CallForm, text: str, size: int) -> None:
    found = parsed(form, text, size)
    assert (found.text, found.calls) == (text, [])


@pytest.mark.parametrize("form", [QWEN, GLM, NAMED, HARMONY], ids=lambda form: form.name)
def test_only_the_first_call_counts_where_one_is_asked_for(form: CallForm) -> None:
    one = written(form, "write_file", {"path": "a", "content": "b"})
    both = one + ("<|start|>assistant" if form is HARMONY else "\n") + one
    assert len(parsed(form, both, 3, parallel=False).calls) == 1


def test_a_parameter_that_comes_twice_counts_once() -> None:
    text = written(QWEN, "write_file", {"path": "a"})
    again = "<parameter=path>\nb\n</parameter>\n"
    text = text.replace("</function>", f"{again}</function>")
    assert parsed(QWEN, text, 4).arguments == [{"path": "a"}]


@pytest.mark.parametrize("seed", range(40))
def test_any_text_in_any_pieces_neither_fails_nor_loses_a_character(seed: int) -> None:
    dice = random.Random(seed)
    form = dice.choice(FORMS)
    words = [
        *CONTROL,
        "<function=write_file>",
        "<parameter=path>",
        "</parameter>",
        "</function>",
        "write_file",
    ]
    words += [
        "\n",
        " ",
        "{",
        "}",
        '"',
        "a",
        "```",
        '{"name": "write_file", "arguments": {}}',
        "to=functions.run",
    ]
    text = "".join(dice.choice(words) for _ in range(dice.randrange(1, 30)))
    results = []
    for size in (1, 2, 5, len(text)):
        found = parsed(form, text, max(size, 1))
        results.append((found.text.split(), found.reasoning.split(), found.calls))
    assert all(result == results[0] for result in results[1:]), text


# Templates and grammars


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{{ '<tool_call>\n<function=' }}{{ '<parameter=' }}", QWEN),
        ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>", GLM),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", NAMED),
        ("<|start|>assistant<|channel|>final<|message|>", HARMONY),
        ("<tool_call>\n{{ tool_call }}\n</tool_call>", HERMES),
    ],
)
def test_the_form_is_that_of_the_template(source: str, form: CallForm) -> None:
    assert call_form(source) is form


def accepts(constraint: Constraint, text: str, tokenizer: ByteTokenizer) -> bool:
    """Whether `text` is a whole answer."""
    held = matcher_for(constraint, tokenizer, EchoEngine().info)
    tokens = tokenizer.encode(text, special=True)
    return held.advance(tokens) == len(tokens) and held.is_accepting


TOKENIZERS = pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["marks are text", "marks are tokens"])
NEW = (QWEN, GLM, NAMED, HARMONY)


def for_grammar(form: CallForm, arguments: dict[str, Any]) -> str:
    """A call up to the token that ends the answer, which a grammar does not contain."""
    return written(form, "write_file", arguments).removesuffix("<|call|>")


@TOKENIZERS
@pytest.mark.parametrize("form", NEW, ids=lambda form: form.name)
def test_a_grammar_allows_words_and_valid_calls(form: CallForm, tokenizer: ByteTokenizer) -> None:
    free = calls_constraint(TOOLS, form, tokenizer)
    whole = {"path": "a.py", "content": 'x = "</parameter>" # </b>\n', "mode": 3, "when": "later"}
    good = for_grammar(form, whole)
    assert accepts(free, good, tokenizer)
    assert accepts(free, said(form, "Only words.").removesuffix("<|return|>"), tokenizer)
    for bad in (
        good.replace("write_file", "write_files"),
        for_grammar(form, {"content": "x"}),
        for_grammar(form, {**whole, "mode": "three"}),
        for_grammar(form, {**whole, "when": "never"}),
        good[: len(good) // 2],
    ):
        assert not accepts(free, bad, tokenizer), bad


@TOKENIZERS
@pytest.mark.parametrize("form", NEW, ids=lambda form: form.name)
def test_a_required_call_leaves_no_other_answer(form: CallForm, tokenizer: ByteTokenizer) -> None:
    must = calls_constraint(TOOLS, form, tokenizer, required=True)
    assert accepts(must, for_grammar(form, {"path": "a", "content": "b"}), tokenizer)
    assert not accepts(must, said(form, "No.").removesuffix("<|return|>"), tokenizer)


@pytest.mark.parametrize("form", NEW, ids=lambda form: form.name)
def test_a_grammar_lets_a_model_think_first(form: CallForm) -> None:
    free = calls_constraint(TOOLS, form, MARKED)
    call = for_grammar(form, {"path": "a", "content": "b"})
    assert accepts(free, thought(form, "Which file? <b>") + call, MARKED)


@pytest.mark.parametrize("form", NEW, ids=lambda form: form.name)
def test_marks_that_are_tokens_reach_the_parser(form: CallForm) -> None:
    arguments = {"path": "a.py", "content": "x <|y|> z"}
    tokens = MARKED.encode(written(form, "write_file", arguments), special=True)
    decoder = StreamDecoder(MARKED)
    text = "".join(decoder.feed([token]) for token in tokens) + decoder.flush()
    assert parsed(form, text, 3).arguments == [arguments]
