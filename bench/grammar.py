"""The cost and gain of constraining a model by a grammar.

Regime: one stream, greedy, without drafts (and, in separate rows, with them). The same engine answers the
same prompt with and without a constraint, in turns within one run; figures are medians of the rounds.
Unconstrained answers get as many tokens as the constrained one. Ceiling: a constrained token costs at least
as much as an unconstrained one. A mask takes microseconds, during or after the step; free text, and long
strings on an engine that runs ahead, need none (`masks` counts them). Where the grammar leaves one choice,
tokens are appended without a step, so the whole answer may be faster. On a GPU, free text with tools offered
must take as long as without tools.

Schemas: each file given by `--schemas` is a JSON Schema, a list of cases of the JSON Schema test suite, or an
OpenAPI document (one schema per component); a folder stands for its files. `--limit` schemas are sampled, the
same number from each path; without `--schemas`, a few built-in ones are used. A schema is supported if every
part of it compiles. Supported schemas are answered by a model with random logits that favours end tokens, and
another validator checks every answer that ends.

    python -m bench.grammar                                       # the embedded model, this machine
    python -m bench.grammar --model coder.gguf --engine cuda      # a GPU
    python -m bench.grammar --model folder --engine cuda --random # a folder without weights: speed alone
    python -m bench.grammar --schemas suite/tests/draft2020-12 openapi.json --limit 200
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import record
from keystroke.assist.tool_calls.forms import call_form
from keystroke.assist.tool_calls.grammar import calls_constraint
from keystroke.assist.tool_calls.tools import OfferedTool, short_toolset, whole_toolset
from keystroke.assist.tool_calls.usable import ToolConstraints
from keystroke.config import load_settings
from keystroke.engine.base import Engine, EngineStats, Interrupt, Mask, ModelInfo, Sampling, Session
from keystroke.engine.checkpoint.huggingface import configured_spec
from keystroke.engine.generation import Finish, Generation, GenerationParams
from keystroke.engine.grammar.compiler import prepare
from keystroke.engine.grammar.constraint import Constraint, json_schema
from keystroke.engine.grammar.matcher import Matcher
from keystroke.engine.host import HostSession
from keystroke.engine.load import load_model
from keystroke.engine.model import Model
from keystroke.engine.speculative import drafter_for
from keystroke.engine.templates import detect_chat
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer
from keystroke.errors import GrammarError, KeystrokeError

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "year_of_birth": {"type": "integer", "minimum": 1900, "maximum": 2026},
        "email_address": {"type": "string", "maxLength": 40},
        "favourite_language": {"enum": ["Python", "Rust", "Go", "TypeScript"]},
        "is_maintainer": {"type": "boolean"},
    },
    "required": [
        "first_name",
        "last_name",
        "year_of_birth",
        "email_address",
        "favourite_language",
        "is_maintainer",
    ],
    "additionalProperties": False,
}
PATCH = OfferedTool(
    "apply_patch",
    custom=True,
    description="Edits files.",
    grammar=(
        "lark",
        'start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?\n'
        'hunk: "*** Add File: " /.+/ LF ("+" /.*/ LF)+ | "*** Delete File: " /.+/ LF | update\n'
        'update: "*** Update File: " /.+/ LF (("@@" | "@@ " /.+/) LF | ("+" | "-" | " ") /.*/ LF)+\n'
        "%import common.LF\n",
    ),
)
COMMAND = OfferedTool(
    "exec_command",
    description="Runs a command and returns its output.",
    parameters={
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "timeout_seconds": {"type": "integer"}},
        "required": ["cmd", "timeout_seconds"],
        "additionalProperties": False,
    },
)
CREATE = OfferedTool(
    "create_file",
    description="Creates a file.",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
        "additionalProperties": False,
    },
)
FILE = "def add(a, b):\n    return a - b\n"


@dataclass
class GrammarRow:
    """One kind of answer."""

    name: str
    prompt: list[int]
    constraint: Constraint


def rows(model: Model) -> list[GrammarRow]:
    """Prompts as a chat where the model has a template, else as plain text."""
    form = call_form(model.chat.source if model.chat is not None else "")
    tools, edits, creating = whole_toolset([COMMAND, PATCH]), short_toolset([PATCH]), whole_toolset([CREATE])
    seen = [line + "\n" for line in FILE.splitlines()]
    fix = f"calc.py is:\n{FILE}\nFix add."
    said: list[tuple[str, str, Any, Constraint]] = [
        ("JSON schema", "Invent a person, as JSON.", None, json_schema(PERSON)),
        (
            "apply_patch",
            fix,
            tools,
            calls_constraint(
                tools, form, model.tokenizer, ToolConstraints({"apply_patch"}), required=True, parallel=False
            ),
        ),
        (
            "edit of lines read",
            fix,
            edits,
            calls_constraint(
                edits, form, model.tokenizer, ToolConstraints(seen_lines=seen), required=True, parallel=False
            ),
        ),
        (
            "tool call",
            "Run the tests with pytest.",
            tools,
            calls_constraint(
                tools, form, model.tokenizer, ToolConstraints({"exec_command"}), required=True, parallel=False
            ),
        ),
    ]
    said.insert(
        3,
        (
            "long string",
            "Write shapes.py: functions for the areas of a circle, a square, a triangle and a trapezoid.",
            creating,
            calls_constraint(creating, form, model.tokenizer, required=True, parallel=False),
        ),
    )
    made = []
    for name, text, shown, constraint in said:
        if model.chat is None:
            prompt = model.prompt(f"# {text}\n")
        else:
            specs = None if shown is None else shown.specs
            prompt = model.chat.tokens(model.tokenizer, [{"role": "user", "content": text}], tools=specs)
        made.append(GrammarRow(name, prompt, constraint))
    free = calls_constraint(tools, form, model.tokenizer)
    prompt = model.prompt("def fibonacci(n):\n")
    if model.chat is not None:
        asked = [{"role": "user", "content": "Explain what a binary search does, in five sentences."}]
        prompt = model.chat.tokens(model.tokenizer, asked)
        made.append(GrammarRow("tool call by choice", made[-1].prompt, free))
    made.append(GrammarRow("free text, tools on offer", prompt, free))
    return made


def random_model(folder: Path, precision: str) -> Model:
    """A model of the shape, tokenizer and template that `folder` holds, its weights random, on a GPU: what it
    says is noise, and takes as long."""
    from bench.cuda_rows.cuda_parts import Part
    from keystroke.engine.cuda.backend import PRECISIONS

    chosen = PRECISIONS[precision]
    engine = Part(configured_spec(folder), (), "bf16" if chosen == "auto" else chosen).engine()
    return Model(folder.name, engine, load_tokenizer(folder), detect_chat(folder))


# Speed


@dataclass
class TimedAnswer:
    tokens: int
    steps: int
    forced: int
    masks: int
    seconds: float

    @property
    def per_token(self) -> float:
        return self.seconds / max(self.tokens, 1)


class Masks:
    """Counts the masks that engines ask for, and their microseconds."""

    _one: Masks | None = None

    def __init__(self) -> None:
        self.spent: list[float] = []
        row = Matcher.row

        def timed(matcher: Matcher, index: int) -> Mask:
            began = time.perf_counter()
            mask = row(matcher, index)
            self.spent.append((time.perf_counter() - began) * 1e6)
            return mask

        Matcher.row = timed  # type: ignore[method-assign, assignment]

    @property
    def count(self) -> int:
        return len(self.spent)

    @classmethod
    def counted(cls) -> Masks:
        cls._one = cls._one or cls()
        return cls._one


def answer(
    model: Model, prompt: Sequence[int], constraint: Constraint | None, count: int, *, drafts: bool = False
) -> tuple[TimedAnswer, str]:
    params = GenerationParams(count, Sampling(), constraint=constraint, ignore_eos=constraint is None)
    drafter = drafter_for(model.engine) if drafts else None
    asked = Masks.counted()
    before = asked.count
    with model.engine.session() as session:
        generation = Generation(model, session, prompt, params, drafter=drafter)
        generation.prefill()
        began = time.perf_counter()
        while generation.finish is None:
            generation.advance()
        seconds = time.perf_counter() - began
    stats = generation.stats
    return TimedAnswer(
        stats.tokens, stats.steps, stats.forced, asked.count - before, seconds
    ), generation.text


def speed(model: Model, rounds: int, longest: int, *, drafts: bool) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    head = f"{'tokens':>6} {'forced':>6} {'steps':>6} {'masks':>6} {'held ms':>8} {'free ms':>8} {'ratio':>6}"
    head += f" {'tok/s':>7}"
    print(f"\n{'answer':28} {head}")
    for row in rows(model):
        answer(model, row.prompt, row.constraint, longest, drafts=drafts)  # compiled, caches warm
        held, free = [], []
        for _ in range(rounds):
            held.append(answer(model, row.prompt, row.constraint, longest, drafts=drafts)[0])
            free.append(answer(model, row.prompt, None, max(held[-1].tokens, 8), drafts=drafts)[0])
        last = held[-1]
        ours = statistics.median(t.per_token for t in held)
        theirs = statistics.median(t.per_token for t in free)
        figures[row.name] = {
            "ratio": ours / theirs,
            "forced": last.forced / max(last.tokens, 1),
            "masks": last.masks,
            "tokens_per_second": 1 / ours,
            "free_tokens_per_second": 1 / theirs,
        }
        counted = f"{row.name:28} {last.tokens:6} {last.forced:6} {last.steps:6} {last.masks:6}"
        print(f"{counted} {ours * 1e3:8.2f} {theirs * 1e3:8.2f} {ours / theirs:6.3f} {1 / ours:7.1f}")
    return figures


def masks(model: Model, longest: int) -> list[float]:
    """Microseconds of every mask of every kind of answer."""
    asked = Masks.counted()
    before = asked.count
    for each in rows(model):
        answer(model, each.prompt, each.constraint, longest)
    return asked.spent[before:]


# Schemas


class NoiseEngine(Engine):
    """A model with random logits over a real vocabulary; it favours closing brackets and end tokens."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self.info = replace(info, context_length=8192)
        closing = [
            t
            for t in range(tokenizer.vocab_size)
            if not tokenizer.is_special(t) and tokenizer.token_bytes(t)[:1] in (b'"', b"}", b"]", b",")
        ]
        self.bias = np.zeros(info.vocab_size, dtype=np.float32)
        self.bias[closing] = 6.0
        self.bias[[e for e in info.eos if e < info.vocab_size]] = 9.0
        self.seed = 0

    def session(self, scope: str = "") -> NoiseSession:
        return NoiseSession(self)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)

    def close(self) -> None:
        pass


class NoiseSession(HostSession):
    def __init__(self, engine: NoiseEngine) -> None:
        super().__init__(engine.info.context_length, chunk=512, tail=512)
        self._engine = engine
        self._dice = np.random.default_rng(engine.seed)

    def fork(self) -> Session:
        raise NotImplementedError

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        noise = self._dice.standard_normal((rows, self._engine.info.vocab_size), dtype=np.float32)
        return noise + self._engine.bias


def schemas_in(paths: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Every schema in the files, in an order that does not depend on the machine."""
    for path in paths:
        files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        for file in files:
            try:
                document = json.loads(file.read_text())
            except (ValueError, OSError):
                continue
            if isinstance(document, list):  # the test suite's own files
                for case in document:
                    if isinstance(case, dict) and isinstance(case.get("schema"), dict):
                        yield f"{file.stem}: {case.get('description')}", case["schema"]
            elif isinstance(document, dict) and "components" in document:
                shared = document["components"].get("schemas", {})
                for name in shared:
                    yield f"{file.stem}: {name}", _alone(shared, name)
            elif isinstance(document, dict):
                yield file.stem, document.get("schema", document)


def sample_schemas(groups: Sequence[list[tuple[str, Any]]], limit: int) -> list[tuple[str, Any]]:
    """At most `limit` schemas, from each group in turn, the same ones in every run."""
    for group in groups:
        random.Random(0).shuffle(group)
    return [one for turn in zip_longest(*groups) for one in turn if one is not None][:limit]


def _alone(shared: dict[str, Any], name: str) -> Any:
    """One component with those it needs."""
    needed: dict[str, Any] = {}
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one not in needed and one in shared:
            needed[one] = shared[one]
            text = json.dumps(shared[one])
            waiting += [part.split('"')[0] for part in text.split("#/components/schemas/")[1:]]
    text = json.dumps({"$ref": f"#/$defs/{name}", "$defs": needed})
    return json.loads(text.replace("#/components/schemas/", "#/$defs/"))


def own_schemas() -> Iterator[tuple[str, Any]]:
    yield "person", PERSON
    yield "command", COMMAND.parameters
    yield "list", {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 3}
    yield (
        "tree",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "number"},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "required": ["value"],
                }
            },
        },
    )
    yield (
        "either",
        {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,5}$"}, {"type": "integer", "minimum": 3}]},
    )


def judge(model: Model, given: Sequence[tuple[str, Any]], longest: int) -> dict[str, float]:
    """Compile each, answer those supported, and have every whole answer judged."""
    import jsonschema_rs

    engine = NoiseEngine(model.tokenizer, model.engine.info)
    noise = Model("noise", engine, model.tokenizer)
    times: list[float] = []
    supported = refused = ended = valid = 0
    for number, (name, schema) in enumerate(given):
        engine.seed = number
        began = time.perf_counter()
        try:
            constraint = json_schema(schema)
            prepare(constraint, model.tokenizer, engine.info)
        except (GrammarError, RecursionError):
            refused += 1
            continue
        times.append((time.perf_counter() - began) * 1e3)
        supported += 1
        timed, text = answer_of(noise, constraint, longest)
        if timed is not Finish.STOP:
            continue
        ended += 1
        try:
            good = jsonschema_rs.is_valid(schema, json.loads(text))
        except ValueError as error:
            good = False
            print(f"  {name}: {str(error)[:100]}")
        valid += good
        if not good:
            print(f"  wrong: {name}: {text[:150]}")
    print(
        f"\n{len(given)} schemas: {supported} supported, {refused} refused; "
        f"compile p50 {_part(times, 50):.1f} ms, p99 {_part(times, 99):.1f} ms, "
        f"worst {max(times, default=0):.1f} ms; "
        f"{ended} answers ended, {valid} of them valid"
    )
    return {
        "schemas": len(given),
        "schemas_supported": supported / max(len(given), 1),
        "compile_ms_p50": _part(times, 50),
        "compile_ms_p99": _part(times, 99),
        "answers_ended": ended,
        "answers_valid": valid / max(ended, 1),
    }


def answer_of(model: Model, constraint: Constraint, longest: int) -> tuple[Finish | None, str]:
    params = GenerationParams(longest, Sampling(), constraint=constraint)
    with model.engine.session() as session:
        generation = Generation(model, session, [1], params)
        try:
            text = "".join(chunk.text for chunk in generation)
        except KeystrokeError as error:
            print(f"  {error}", file=sys.stderr)
            return None, ""
    return generation.finish, text


def _part(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded", help="a name, a GGUF file or a folder")
    parser.add_argument("--engine", default="auto", choices=("auto", "onnx", "cuda"))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--random", action="store_true", help="random weights: needs a folder and a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=160, help="tokens of an answer, at most")
    parser.add_argument("--schemas", nargs="*", type=Path, default=[])
    parser.add_argument("--limit", type=int, default=200, help="schemas, drawn evenly from all")
    parser.add_argument("--no-speed", action="store_true", help="schemas only")
    asked = parser.parse_args()
    settings = load_settings()
    settings = replace(
        settings,
        engine=replace(settings.engine, kind=asked.engine),
        model=replace(settings.model, precision=asked.precision),
    )
    named = Path(asked.model) if Path(asked.model).exists() else asked.model
    model = random_model(Path(asked.model), asked.precision) if asked.random else load_model(named, settings)
    began = time.perf_counter()
    prepare(None, model.tokenizer, model.engine.info)
    took, size = time.perf_counter() - began, model.tokenizer.vocab_size
    print(f"{model.engine.info.name}, vocabulary of {size:,} read in {took:.2f} s")
    figures: dict[str, Any] = {"model": model.engine.info.name, "precision": model.engine.info.precision}
    if not asked.no_speed:
        plain = speed(model, asked.rounds, asked.longest, drafts=False)
        print("\nwith drafts")
        drafted = speed(model, asked.rounds, asked.longest, drafts=True)
        spent = masks(model, asked.longest)
        print(f"\n{len(spent)} masks: p50 {_part(spent, 50):.0f} us, p99 {_part(spent, 99):.0f} us")
        figures |= {
            "constrained_vs_free": max(row["ratio"] for row in plain.values()),
            "forced_share": statistics.mean(r["forced"] for name, r in plain.items() if "free" not in name),
            "mask_us_p50": _part(spent, 50),
            "mask_us_p99": _part(spent, 99),
            "constrained_tokens_per_second": min(row["tokens_per_second"] for row in plain.values()),
            "rows": plain,
            "rows_with_drafts": drafted,
        }
    given = sample_schemas([list(schemas_in([path])) for path in asked.schemas], asked.limit) or list(
        own_schemas()
    )
    figures |= judge(model, given, 400)
    record("grammar", figures)


if __name__ == "__main__":
    main()
