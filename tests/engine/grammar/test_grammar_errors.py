"""A grammar that cannot be used is refused in a sentence that names the place, in bounded time and space."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from grammar_models import matcher, noise

from keystroke.engine.grammar import compiler
from keystroke.engine.grammar.compiler import matcher_for, prepare
from keystroke.engine.grammar.constraint import Constraint, any_json, choice, gbnf, json_schema, lark, regex
from keystroke.errors import GrammarError, UnsupportedModel

_SELF = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD: dict[str, tuple[Callable[[], Constraint], str]] = {
    "false": (lambda: json_schema(False), "nothing can meet"),
    "a list": (lambda: json_schema([]), "JSON Schema object"),  # type: ignore[arg-type]
    "an unknown type": (lambda: json_schema({"type": "objet"}), "Invalid type"),
    "a contradiction": (lambda: json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "two types at once": (
        lambda: json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}),
        "incompatible",
    ),
    "no choice": (lambda: json_schema({"enum": []}), "Unsatisfiable"),
    "itself": (lambda: json_schema({"$ref": "#"}), "nothing can meet it"),
    "itself without end": (lambda: json_schema({"$ref": "#/$defs/a", "$defs": {"a": _SELF}}), "/$defs/a"),
    "an endless list": (
        lambda: json_schema({"type": "array", "minItems": 1, "items": {"$ref": "#"}}),
        "without end",
    ),
    "a remote reference": (lambda: json_schema({"$ref": "https://example.org/x"}), "example.org"),
    "a place deep inside": (
        lambda: json_schema({"type": "object", "properties": {"a/b": {"items": {"not": {"type": "null"}}}}}),
        "/properties/a~1b/items",
    ),
    "a bad pattern": (
        lambda: json_schema({"properties": {"p": {"type": "string", "pattern": "(a"}}}),
        "/properties/p",
    ),
    "too deep": (lambda: json_schema(nested(60)), "levels deep"),
    "far too deep": (lambda: json_schema(nested(50_000)), "levels deep"),
    "too many properties": (
        lambda: json_schema({"properties": {f"p{i}": {} for i in range(5000)}}),
        "/properties",
    ),
    "too long": (lambda: json_schema({"enum": ["x" * 600_000]}), "characters"),
    "not JSON": (lambda: json_schema({"const": object()}), "is not JSON"),
    "an open group": (lambda: regex("(a"), "unclosed group"),
    "a look ahead": (lambda: regex("(?=a)b"), "look-around"),
    "a reference back": (lambda: regex(r"(a)\1"), "backreferences"),
    "an empty class": (lambda: regex(r"[^\s\S]"), "nothing can meet it"),
    "a long pattern": (lambda: regex("a" * 70_000), "characters"),
    "an open bracket": (lambda: lark('start: ("a"'), "Expected"),
    "an unknown rule": (lambda: lark("start: foo"), "unknown name"),
    "no start": (lambda: lark('foo: "a"'), "no start"),
    "no grammar": (lambda: lark(""), "no start"),
    "only itself": (lambda: lark('start: start "a"'), "nothing can meet it"),
    "no text": (lambda: lark(7), "must be a text"),  # type: ignore[arg-type]
    "an unknown control token": (lambda: lark('start: <no_such_token> "a"'), "no_such_token"),
    "GBNF cut off": (lambda: gbnf('root ::= ("a"'), "GBNF"),
    "no words": (lambda: choice([]), "one or more"),
    "an empty word": (lambda: choice(["a", ""]), "not empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_by_name_and_place(case: str) -> None:
    make, said = BAD[case]
    with pytest.raises(GrammarError) as caught:
        matcher(make())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    assert caught.value.status == 400
    assert caught.value.param


HARD: dict[str, Callable[[], Constraint]] = {
    "a recursive schema": lambda: json_schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}}}
    ),
    "an empty schema": lambda: json_schema({}),
    "any object": any_json,
    "what cannot be enforced, not strict": lambda: json_schema(
        {"not": {"type": "null"}, "type": "string"}, strict=False
    ),
    "a million items": lambda: json_schema({"type": "array", "items": {"type": "null"}, "minItems": 10**6}),
    "a long text": lambda: json_schema({"type": "string", "minLength": 10**9}),
    "a thousand properties": lambda: json_schema(
        {"properties": {f"p{i}": {"type": "null"} for i in range(1000)}}
    ),
    "many states": lambda: regex("(a|b)*a(a|b){40}"),
    "nested repeats": lambda: regex("(((a{1,100}){1,100}){1,100}){1,100}"),
    "repeats of anything": lambda: regex("(.*a){30}.{50}b"),
    "ambiguity": lambda: lark('start: e\ne: e e e | e e | "a" | '),
    "a long chain of rules": lambda: lark(
        "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1}\n' for i in range(2200)) + 'r2200: "z"'
    ),
    "a long chain of references": lambda: json_schema(
        {
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)} | {"a3000": {}},
        }
    ),
    "llama.cpp's own notation": lambda: gbnf('root ::= "yes" | "no" [a-z]+'),
}


@pytest.mark.parametrize("case", HARD)
def test_what_is_hard_but_sound_is_taken_and_walked(case: str) -> None:
    held = matcher(HARD[case]())
    for _ in range(12):
        if held.is_finished:
            break
        run = held.forced_tokens()
        held.filter_draft((), 0)
        mask = held.row(0)
        word = int(mask.nonzero()[0][0])
        token = word * 32 + (int(mask[word]) & -int(mask[word])).bit_length() - 1
        assert held.advance(run[:8] or [token])


def test_an_exploding_pattern_ends_in_bounded_memory() -> None:
    """In a process of its own, whose memory is limited."""
    code = """
import resource, random
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from grammar_models import matcher, bpe_tokenizer
from keystroke.engine.grammar.constraint import regex, lark
import numpy as np
dice = random.Random(0)
for pattern in ("(a|b)*a(a|b){60}c", "((a|b|ab|ba|aa)*c?){50}(.*x){20}", "(.{0,200}a){0,200}b"):
    held = matcher(regex(pattern))
    for _ in range(300):
        if held.is_finished:
            break
        held.filter_draft((), 0)
        ids = np.flatnonzero(np.unpackbits(held.row(0).view(np.uint8), bitorder="little"))
        held.advance([int(dice.choice(ids))])
print("walked")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=__file__.rpartition("/")[0],
        check=False,
    )
    assert done.stdout.strip() == "walked", done.stderr[-2000:]


def test_what_was_compiled_is_kept_and_the_oldest_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Constraint] = []
    compile_grammar = compiler.compile_grammar

    def counted(constraint: Constraint, vocabulary: Any) -> Any:
        made.append(constraint)
        return compile_grammar(constraint, vocabulary)

    monkeypatch.setattr(compiler, "compile_grammar", counted)
    monkeypatch.setattr(compiler, "_queue", compiler._CompileQueue())
    monkeypatch.setattr(compiler, "MAX_COMPILED", 4)
    wanted = [regex(f"a{{{n}}}") for n in range(1, 6)]
    for constraint in (*wanted[:4], *wanted[:4], wanted[4], wanted[3], wanted[0]):
        matcher(constraint)
    assert made == [*wanted, wanted[0]]
    assert len(compiler._queue._compiled) == 4


def test_many_threads_that_ask_at_once_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    compile_grammar = compiler.compile_grammar

    def counted(constraint: Constraint, vocabulary: Any) -> Any:
        made.append(1)
        return compile_grammar(constraint, vocabulary)

    monkeypatch.setattr(compiler, "compile_grammar", counted)
    monkeypatch.setattr(compiler, "_queue", compiler._CompileQueue())
    model = noise()
    constraint = regex("(ab|ba){1,9}")
    threads = [
        threading.Thread(target=prepare, args=(constraint, model.tokenizer, model.engine.info))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_a_compiler_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(compiler, "compile_grammar", lambda *_: release.wait(60))
    monkeypatch.setattr(compiler, "_queue", compiler._CompileQueue())
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT", 0.01)
    with pytest.raises(GrammarError, match="longer than"):
        matcher(regex("never"))
    release.set()


def test_a_model_that_never_ends_cannot_be_held_to_a_grammar() -> None:
    model = noise()
    info = model.engine.info.__class__(
        **{name: getattr(model.engine.info, name) for name in model.engine.info.__slots__}
        | {"eos": frozenset()}
    )
    with pytest.raises(UnsupportedModel):
        matcher_for(regex("a"), model.tokenizer, info)
