"""How well the shipped model completes code it has never seen, beside its peers, on this machine's CPU.

Regime: files of projects first released in July 2025 or later, which no model here was trained on;
at most 256 tokens around the cursor; greedy; the embedded engine, one request at a time; the same cases for
every model. (a) `rest_of_line_em`: the rest of a line from a random point, text before the
cursor only; (b) `line_em`: a whole line, text before only; (c) `fim_line_em`, `fim_block_em`: with the
text after it, for models that can read it; `fim_rest_of_line_em` likewise. Exact match after trailing
spaces are dropped, with Wilson's 95 % interval. `bits_per_byte`: of the text before the cursor, in
float32, whatever the tokenizer. `chars_per_s`: decoding alone. `chars_saved`: share of characters that
taken suggestions would have typed, in simulated typing with a display gate. Ceiling: exact match cannot
reach 1, since names and comments are free choices.

Next edits, of releases held out: `edit_place`: of six places of a file just edited, the one that changed next
is ranked first (chance 1/6); `edit_text`: what it became, to the letter; `edit_offered`: of the places
offered (likely enough to change, and written differently), how many were right; `edit_alarms`: something was
offered where nothing was left to do. The baseline ranks by the names that went, and repeats the last change.

    python bench/completion.py [--cases N] [--context N] [--typed N] [--bytes N] [--edits N] [--model M ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from keystroke.config import load_settings
from keystroke.engine.load import load_model
from keystroke.engine.locate import resolve
from keystroke.errors import KeystrokeError
from keystroke.train.cases import Case, read_cases
from keystroke.train.edit_cases import (
    EditCase,
    WordJudge,
    edit_summary,
    evaluate_edits,
    read_edit_cases,
    scored_edits,
)
from keystroke.train.evaluate import ModelSuggester, NgramSuggester, evaluate, limited, summary
from keystroke.train.fim import Cut

CASES = Path(__file__).parent / "data" / "completion.jsonl.xz"
EDITS = Path(__file__).parent / "data" / "edits.jsonl.xz"
COLUMNS = (
    "rest_of_line_em", "line_em", "fim_rest_of_line_em", "fim_line_em", "fim_block_em",
    "bits_per_byte", "chars_per_s", "tokens_per_s", "chars_saved",
    "edit_place", "edit_text", "edit_offered", "edit_alarms",
)  # fmt: skip


def measured_bits(path: Path, cases: list[Case], texts: int) -> float | None:
    """Bits per byte where torch is installed and the model is a plain Llama; None otherwise."""
    try:
        from keystroke.train.perplexity import bits_per_byte
    except ImportError:
        return None
    sample = [c.prefix + c.middle for c in cases if c.kind == Cut.LINE][:texts]
    try:
        return bits_per_byte(path, sample)
    except KeystrokeError:
        return None


def measure(
    name: str, cases: list[Case], typed: int, texts: int, context: int, edits: list[EditCase]
) -> dict[str, Any]:
    if name == "ngram":
        words = edit_summary(evaluate_edits(WordJudge(), edits, sure=0.3)) if edits else {}
        return {**summary(evaluate(NgramSuggester(), cases, typed_lines=typed)), **words}
    path = resolve(name, load_settings({}, Path.cwd()))
    model = load_model(path)
    suggester = ModelSuggester(model, context)
    try:
        report = evaluate(suggester, cases, typed_lines=typed)
        foreseen = scored_edits(model, path, edits)
    finally:
        suggester.close()
        model.engine.close()
    if texts:
        report.bits_per_byte = measured_bits(path, cases, texts)
    return {**summary(report), **foreseen}


def shown(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) and value < 10 else f"{value}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=60, help="cases of each kind; 0 is all")
    parser.add_argument("--context", type=int, default=256, help="tokens around the cursor")
    parser.add_argument("--typed", type=int, default=10, help="lines typed in the simulation")
    parser.add_argument("--bytes", type=int, default=12, help="texts for bits per byte")
    parser.add_argument("--edits", type=int, default=30, help="cases of next edits")
    parser.add_argument("--model", action="append", help="a model by name or path; may be repeated")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cases = limited(read_cases(CASES), given.cases)
    edits = read_edit_cases(EDITS)[: given.edits]
    results: dict[str, Any] = {}
    for name in given.model or ["embedded", "smollm2", "ngram"]:
        started = time.perf_counter()
        try:
            results[name] = measure(name, cases, given.typed, given.bytes, given.context, edits)
        except KeystrokeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        results[name]["seconds"] = round(time.perf_counter() - started, 1)
    width = max(map(len, results), default=5)
    print(" " * width, *(f"{c:>20}" for c in COLUMNS))
    for name, row in results.items():
        print(f"{name:<{width}}", *(f"{shown(row.get(c)):>20}" for c in COLUMNS))
    line = json.dumps(
        {"bench": "completion", "cases": len(cases), "context": given.context, "models": results}
    )
    print(line)
    if given.out:
        given.out.write_text(line + "\n")
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
