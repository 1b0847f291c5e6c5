"""What learning from outcomes does to ghost text, replayed on a model's real confidences by language.

Regime: each language's cases (late code, text below in view) are answered once by the model; the answers,
drawn again and again in random order, are a day's suggestions: right ones are taken, wrong ones not. Without
learning one is shown from the default threshold on; with it, the threshold follows what became of those
before it (shown, or held back and then typed by hand), looked up every 20 as the live channel does. `gain`:
accepted characters per shown suggestion with learning over without. A language that the model was not trained
on is a trace with few right answers. Ceiling: a threshold only chooses among what the model says; if
confidence does not correlate with correctness, nothing can be gained.

    python -m bench.learning [--model M] [--each N] [--length N] [--days N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from bench.completion import CASES, LANGUAGES
from bench.exactness import by_language
from bench.record import record
from keystroke.assist.completion.gate import THRESHOLDS
from keystroke.assist.completion.tuning import count_outcomes, tune_threshold
from keystroke.config import load_settings
from keystroke.engine.load import load_model
from keystroke.text.cases import CompletionCase, read_cases
from keystroke_lab.evaluation.completion import ModelSuggester

DEFAULT = THRESHOLDS["balanced"]
Answer = tuple[float, bool, int]  # how sure, whether right, how long


def answers(suggester: ModelSuggester, cases: list[CompletionCase]) -> list[Answer]:
    found = []
    for case in cases:
        said = suggester.line(case.prefix, case.suffix)
        if said.text.strip():
            right = said.text.rstrip() == case.middle.rstrip()
            found.append((said.confidence, right, len(said.text.rstrip())))
    return found


def replay(day: list[Answer], *, learning: bool) -> tuple[int, int, float]:
    """Suggestions shown, characters taken, and the threshold in the end."""
    shown = taken = 0
    threshold = DEFAULT
    known: list[tuple[float, float]] = []
    for number, (sure, right, length) in enumerate(day):
        if learning and number % 20 == 0:
            threshold = tune_threshold(DEFAULT, count_outcomes(known))
        if sure >= threshold:
            shown += 1
            taken += length * right
        known.append((sure, float(right)))
    return shown, taken, threshold


def days(found: list[Answer], length: int, count: int) -> dict[str, Any]:
    rng = random.Random(0)
    plain, learned = [0, 0], [0, 0]
    ends = []
    for _ in range(count):
        day = rng.choices(found, k=length)
        for total, on in ((plain, False), (learned, True)):
            shown, taken, end = replay(day, learning=on)
            total[0] += shown
            total[1] += taken
        ends.append(end)
    before, after = (taken / max(1, shown) for shown, taken in (plain, learned))
    return {
        "answers": len(found),
        "right": round(sum(right for _, right, _ in found) / max(1, len(found)), 3),
        "shown": round(plain[0] / count, 1),
        "shown_learned": round(learned[0] / count, 1),
        "taken": round(plain[1] / count, 1),
        "taken_learned": round(learned[1] / count, 1),
        "per_shown": round(before, 2),
        "per_shown_learned": round(after, 2),
        "gain": round(after / before, 3) if before else None,
        "threshold": round(sum(ends) / len(ends), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--each", type=int, default=40, help="cases of each kind and language")
    parser.add_argument("--length", type=int, default=500, help="suggestions of a day")
    parser.add_argument("--days", type=int, default=40)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = load_model(given.model, load_settings({}, Path.cwd()))
    suggester = ModelSuggester(model, given.context)
    rows: dict[str, dict[str, Any]] = {}
    try:
        for language, cases in by_language([*read_cases(CASES), *read_cases(LANGUAGES)], given.each).items():
            lines = [case for case in cases if case.kind in ("rest_of_line", "line")]
            rows[language] = days(answers(suggester, lines), given.length, given.days)
            print(f"{language}: {rows[language]}", file=sys.stderr, flush=True)
    finally:
        suggester.close()
        model.engine.close()
    keys = ("right", "shown", "shown_learned", "per_shown", "per_shown_learned", "gain", "threshold")
    print(f"{'language':<12}", *(f"{key:>18}" for key in keys))
    for language, row in rows.items():
        print(f"{language:<12}", *(f"{row[key]!s:>18}" for key in keys))
    figures = {"bench": "learning", "model": given.model, "default": DEFAULT, "languages": rows}
    record("learning", figures)
    if given.out:
        given.out.write_text(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
