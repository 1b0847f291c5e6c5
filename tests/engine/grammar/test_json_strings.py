"""Inside a JSON string a grammar has the same language, escaped; a value that meets no schema is named."""

from __future__ import annotations

import json
import re

import jsonschema_rs
import pytest
from grammar_languages import Language, described, described_languages, regular_languages
from grammar_models import answered, matcher, noise, params
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keystroke.engine.base import Sampling
from keystroke.engine.generation import Finish
from keystroke.engine.grammar.constraint import lark, regex_as_lark
from keystroke.engine.grammar.json_strings import escape_grammar
from keystroke.engine.grammar.validate import schema_violation, text_violation
from keystroke.engine.tokenizer import StreamDecoder
from keystroke.errors import GrammarError

CODEX = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""


def takes(grammar: str, text: str) -> bool:
    from grammar_models import bpe_tokenizer

    held = matcher(lark(grammar))
    tokens = bpe_tokenizer().encode(text)
    return held.advance(tokens) == len(tokens) and held.is_accepting


def test_a_patch_is_held_to_its_grammar_inside_a_string() -> None:
    grammar = escape_grammar(CODEX)
    patch = '*** Begin Patch\n*** Update File: a "b"\\c.py\n@@ é\n-x = "1"\n+\ty = 2 / 3\n*** End Patch\n'
    assert takes(grammar, json.dumps(patch, ensure_ascii=False)[1:-1])
    assert not takes(grammar, patch)
    assert not takes(grammar, json.dumps(patch.replace("-x", "?x"))[1:-1])


@settings(max_examples=80)
@given(regular_languages, st.integers(0, 10**6))
def test_what_is_written_inside_a_string_is_of_the_language_once_read(language: Language, seed: int) -> None:
    pattern = language.source[1:-1]
    written = escape_grammar(regex_as_lark(pattern))
    generation, _ = answered(noise(seed), params(lark(written), sampling=Sampling(1.0, seed=seed)))
    if generation.finish is Finish.STOP:
        text = json.loads(f'"{generation.text}"')
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (r"[\d\x22\\\-]+", '4"\\-', "a"),
        (r"\s\.", "\n.", "\n,"),
        (r"a(?s:.)b.", "a\nbc", "a\nb\n"),
        (r"(?s).", "\n", "ab"),
        (r"(?P<n>\u00e9)|(?<m>\x{1f600}{2})", "😀😀", "😀"),
        (r"[^\n\]]{2}", '"\\', "\n]"),
        (r"[]a]+\/", "]a/", "b/"),
        (r"^\tx$", "\tx", "x"),
        (r"a{2", "a{2", "aa"),
    ],
)
def test_a_pattern_means_the_same_inside_a_string(pattern: str, inside: str, outside: str) -> None:
    grammar = escape_grammar(f"start: /{pattern}/")
    assert takes(grammar, json.dumps(inside, ensure_ascii=False)[1:-1])
    assert not takes(grammar, json.dumps(outside, ensure_ascii=False)[1:-1])


REFUSED = {
    "a call": "start: <call>",
    "another grammar": "start: @other",
    "a schema": "start: %json {}",
    "white space to ignore": "start: A\n%ignore /x/",
    "letters of either case": 'start: "a"i',
    "flags": "start: /a/i",
    "a look ahead": "start: /a(?=b)/",
    "an unknown import": "start: X\n%import common.NOPE -> X",
    "a broken pattern": "start: /(a/",
    "a group closed twice": "start: /(a))/",
    "the edge of a word": r"start: /a\bb/",
    "a reference back": r"start: /(a)\1/",
    "letters of any case within": "start: /(?i:a)/",
    "a property of characters": r"start: /\p{L}/",
    "a set of sets": "start: /[a-z&&[b]]/",
    "as few as can be": "start: /a*?/",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_counterpart_is_refused(case: str) -> None:
    with pytest.raises(GrammarError):
        matcher(lark(escape_grammar(REFUSED[case])))


def test_a_grammar_that_is_not_regular_is_refused() -> None:
    with pytest.raises(GrammarError):
        matcher(lark(escape_grammar('start: "(" start ")" | "x"')))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-20, 120)
    | st.sampled_from([0.5, 1.0, -3.75, "", "ab", "abc", "b", "a\nb"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "value", "count", "a b"]), inner, max_size=3)
    ),
    max_leaves=4,
)
INTEGER, NAMED = {"type": "integer"}, {"required": ["name"]}
KEYWORDS: list[dict[str, object]] = [
    {"not": INTEGER},
    {"if": NAMED, "then": {"required": ["value"]}, "else": {"maxProperties": 1}},
    {"oneOf": [INTEGER, {"type": "number"}, NAMED]},
    {"enum": [1, [True], {"a": 0}, "ab"]},
    {"const": [1.0, False]},
    {"uniqueItems": True},
    {"prefixItems": [INTEGER, {"type": "string"}], "items": False},
    {"contains": INTEGER, "maxContains": 1},
    {"minProperties": 1, "maxProperties": 2},
    {"propertyNames": {"pattern": "a"}},
    {"patternProperties": {"a": INTEGER, "^v": {"type": "string"}}, "additionalProperties": False},
    {"patternProperties": {"a": INTEGER}, "properties": {"name": {"type": "null"}}},
    {"dependentRequired": {"name": ["value"]}, "dependentSchemas": {"value": {"maxProperties": 2}}},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.25},
    {"$ref": "#/$defs/a~1b/anyOf/0", "$defs": {"a/b": {"anyOf": [{"type": ["integer", "array"]}]}}},
    {"items": {"$ref": "#"}, "maxItems": 2, "type": ["array", "null"]},
]


@settings(max_examples=150)
@given(described_languages, VALUES)
@example(described({"enum": [1]}), True)
def test_a_value_is_met_or_refused_as_another_validator_says(language: Language, value: object) -> None:
    schema = json.loads(language.source)
    assert (schema_violation(schema, value) is None) == jsonschema_rs.is_valid(schema, value)


@settings(max_examples=40)
@given(VALUES)
def test_every_keyword_is_judged_as_another_validator_does(value: object) -> None:
    for schema in KEYWORDS:
        assert (schema_violation(schema, value) is None) == jsonschema_rs.is_valid(schema, value), schema


def test_text_that_is_no_json_meets_nothing() -> None:
    assert text_violation({}, "{") == "it is not JSON"
    assert text_violation({"type": "object", "required": ["a"]}, "{}") == "/ lacks a"
    nested = {"type": "object", "properties": {"a": {"items": {"type": "null"}}}}
    assert text_violation(nested, '{"a": [null, 1]}') == "/a/1 must be null"
    assert schema_violation({"$ref": "#/$defs/x", "$defs": {"x": {"const": 1}}}, 2) == "/ must be 1"


def test_marks_of_calls_are_text_and_other_control_tokens_are_none() -> None:
    from keystroke.engine.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer({"<end>": 256, "<tool_call>": 257, "</tool_call>": 258})
    decoder = StreamDecoder(tokenizer)
    assert decoder.feed([97, 257, 256, 98, 258]) == "a<tool_call>b</tool_call>"
    assert tokenizer.decode([97, 257, 98]) == "ab"
