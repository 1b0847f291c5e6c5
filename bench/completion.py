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

By language (`--each N` cases of each kind and language; `bench/data/languages.jsonl.xz` holds those that are
not Python): `rest_em`, `line_em`, `fim_rest_em`, `fim_line_em` and `p50_ms`, from the question to the whole
answer, nothing warm; `shown`: confident enough for ghost text, in a language that the model was trained on,
and `shown_right` of these. `SMALL>LARGE` as a model is the cascade of both: the larger one confirms,
lengthens or replaces what the smaller shows, or is offered where it shows nothing (`bench/exactness.py`).
`against_first` compares each further model with the first at the same places: `only_first` and `only_second`
have it right, `gained` is the difference of their shares. `--answers` keeps answers, which may come from
another machine; `--timed N` asks the first N places of each kind anew, for times of this one. `--plot` draws
exactness with the text below in view against milliseconds.

    python -m bench.completion [--cases N] [--context N] [--typed N] [--bytes N] [--edits N] [--model M ...]
                               [--each N] [--language L ...] [--task T ...] [--answers DIR] [--timed N]
                               [--plot FILE.svg] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.exactness import (
    TASKS,
    AnswerStore,
    Cascade,
    by_language,
    compare_models,
    exactness,
    summarise_languages,
)
from bench.plot import Point, plot
from bench.record import record
from keystroke.config import load_settings
from keystroke.engine.card import card_languages
from keystroke.engine.load import load_model
from keystroke.engine.locate import resolve
from keystroke.errors import KeystrokeError
from keystroke.text.cases import CompletionCase, read_cases
from keystroke_lab.evaluation.completion import ModelSuggester, NgramSuggester, evaluate, limited, summary
from keystroke_lab.evaluation.edit_cases import (
    EditCase,
    WordJudge,
    edit_summary,
    evaluate_edits,
    read_edit_cases,
    scored_edits,
)
from keystroke_lab.pretraining.fim import FimCut

CASES = Path(__file__).parent / "data" / "completion.jsonl.xz"
LANGUAGES = Path(__file__).parent / "data" / "languages.jsonl.xz"
EDITS = Path(__file__).parent / "data" / "edits.jsonl.xz"
COLUMNS = (
    "rest_of_line_em", "line_em", "fim_rest_of_line_em", "fim_line_em", "fim_block_em",
    "bits_per_byte", "chars_per_s", "tokens_per_s", "chars_saved",
    "edit_place", "edit_text", "edit_offered", "edit_alarms",
)  # fmt: skip


def measured_bits(path: Path, cases: list[CompletionCase], texts: int) -> float | None:
    """Bits per byte where torch is installed and the model is a plain Llama; None otherwise."""
    try:
        from keystroke_lab.evaluation.perplexity import bits_per_byte
    except ImportError:
        return None
    sample = [c.prefix + c.middle for c in cases if c.kind == FimCut.LINE][:texts]
    try:
        return bits_per_byte(path, sample)
    except KeystrokeError:
        return None


def measure(
    name: str, cases: list[CompletionCase], typed: int, texts: int, context: int, edits: list[EditCase]
) -> dict[str, Any]:
    if name == "ngram":
        words = edit_summary(evaluate_edits(WordJudge(), edits, sure=0.3)) if edits else {}
        return {**summary(evaluate(NgramSuggester(), cases, typed_lines=typed)), **words}
    settings = load_settings({}, Path.cwd())
    path = resolve(name, settings)
    model = load_model(name, settings)
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


class Voices:
    """The models asked, each loaded when it is first needed and one at a time; answers are kept."""

    def __init__(self, context: int, folder: Path | None) -> None:
        self._context, self._folder = context, folder
        self._kept: dict[str, AnswerStore] = {}
        self._open: dict[str, ModelSuggester] = {}

    def of(self, name: str) -> AnswerStore | Cascade:
        """A model by name or path, or `SMALL>LARGE`."""
        parts = [self._one(part) for part in name.split(">")]
        return parts[0] if len(parts) == 1 else Cascade(*parts[:2])

    def _one(self, name: str) -> AnswerStore:
        if name not in self._kept:
            path = None
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                path = self._folder / f"{name.strip('/').replace('/', '+')}-{self._context}.jsonl"
            learned = card_languages(resolve(name, load_settings({}, Path.cwd())))
            self._kept[name] = AnswerStore(lambda: self._loaded(name), path, learned)
        return self._kept[name]

    def _loaded(self, name: str) -> ModelSuggester:
        model = load_model(name, load_settings({}, Path.cwd()))
        self._open[name] = ModelSuggester(model, self._context)
        return self._open[name]

    def agreement(self, name: str) -> tuple[int, int]:
        """Of the answers timed anew: how many are the ones that were kept, and of how many."""
        same = [one for part in name.split(">") for one in self._one(part).same]
        return sum(same), len(same)

    def close(self) -> None:
        for name, suggester in self._open.items():
            self._kept[name].release()
            suggester.close()
            suggester.model.engine.close()
        self._open.clear()


def measured_languages(
    name: str, chosen: dict[str, list[CompletionCase]], tasks: list[str], voices: Voices, timed: int
) -> dict[str, Any]:
    """The rows of one model, or of a cascade of two, by language; `all` holds them together."""
    rows: dict[str, Any] = {}
    try:
        for language, cases in chosen.items():
            rows[language] = exactness(voices.of(name), cases, tasks, timed)
            print(f"{name} {language}: {rows[language]}", file=sys.stderr, flush=True)
    finally:
        voices.close()
    total = summarise_languages(rows, tasks)
    if timed:
        same, of = voices.agreement(name)
        total |= {"timed_same": same, "timed_of": of}
    return {**rows, "all": total}


def languages_table(results: dict[str, dict[str, Any]], tasks: list[str]) -> None:
    columns = [*tasks, "shown", "shown_right"]
    print(f"{'model':<28} {'language':<12}", *(f"{c:>24}" for c in columns), f"{'p50_ms':>9}")
    for name, rows in results.items():
        for language, row in rows.items():
            cells = (
                f"{row[t]:.3f} [{row[f'{t}_95'][0]:.2f}, {row[f'{t}_95'][1]:.2f}]" if t in row else "-"
                for t in columns
            )
            print(
                f"{name[-28:]:<28} {language:<12}",
                *(f"{cell:>24}" for cell in cells),
                f"{row['p50_ms']!s:>9}",
            )


def draw_plot(results: dict[str, dict[str, Any]]) -> str:
    """One point a model: the rest of a line with the text below in view, all languages together."""
    points = []
    for name, rows in results.items():
        task = next((t for t in ("fim_rest_em", "rest_em") if t in rows["all"]), None)
        if task is not None and rows["all"]["p50_ms"]:
            label = ">".join(Path(part).stem for part in name.split(">"))
            points.append(Point(label, rows["all"]["p50_ms"], rows["all"][task], *rows["all"][f"{task}_95"]))
    return plot(points, "Rest of a line right to the letter, all languages")


def shown(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) and value < 10 else f"{value}"


def by_languages(given: argparse.Namespace) -> int:
    chosen = by_language([*read_cases(CASES), *read_cases(LANGUAGES)], given.each)
    chosen = {name: cases for name, cases in chosen.items() if not given.language or name in given.language}
    tasks = given.task or list(TASKS)
    voices = Voices(given.context, given.answers)
    results: dict[str, dict[str, Any]] = {}
    for name in given.model or ["embedded", "smollm2"]:
        try:
            results[name] = measured_languages(name, chosen, tasks, voices, given.timed)
        except KeystrokeError as error:
            print(f"{name}: {error}", file=sys.stderr)
    languages_table(results, tasks)
    first, *others = results or [""]
    places = [case for cases in chosen.values() for case in cases]
    against = {name: compare_models(voices.of(first), voices.of(name), places, tasks) for name in others}
    voices.close()
    for name, row in against.items():
        print(f"{name} against {first}, the same places: {row}")
    if given.plot:
        given.plot.write_text(draw_plot(results), encoding="utf-8")
    figures = {
        "bench": "completion",
        "each": given.each,
        "context": given.context,
        "languages": results,
        "against_first": against,
    }
    record("completion", figures)
    if given.out:
        given.out.write_text(json.dumps(figures) + "\n")
    return 0 if results else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=60, help="cases of each kind; 0 is all")
    parser.add_argument("--context", type=int, default=256, help="tokens around the cursor")
    parser.add_argument("--typed", type=int, default=10, help="lines typed in the simulation")
    parser.add_argument("--bytes", type=int, default=12, help="texts for bits per byte")
    parser.add_argument("--edits", type=int, default=30, help="cases of next edits")
    parser.add_argument("--model", action="append", help="a model by name or path; may be repeated")
    parser.add_argument(
        "--each", type=int, default=0, help="by language: cases of each kind; 0 leaves it out"
    )
    parser.add_argument("--language", action="append", help="only these languages")
    parser.add_argument("--task", action="append", choices=list(TASKS), help="only these, by language")
    parser.add_argument("--answers", type=Path, help="by language: keep answers in this folder, and go on")
    parser.add_argument(
        "--timed", type=int, default=0, help="by language: time so many places of each kind anew"
    )
    parser.add_argument("--plot", type=Path, help="write exactness against time as an SVG")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.each:
        return by_languages(given)
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
    figures = {"bench": "completion", "cases": len(cases), "context": given.context, "models": results}
    record("completion", figures)
    if given.out:
        given.out.write_text(json.dumps(figures) + "\n")
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
