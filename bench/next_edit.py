"""How well models predict the next edit, and how long a prediction takes on this machine.

Regime: moments of releases that people made, of projects no model here was trained on
(`bench/data/edits.jsonl.xz`): what they had changed, the file as it stood, and places of it framed alike
(mostly six), of which one had to change next (two cases in three) or none had. The real engine, one request
at a time, greedy. `place`: the place that changed is ranked first (chance 1/6); `text_em`: asked about
that place, the new text is right to the letter; `quiet`: nothing is offered where nothing is left to do;
`offered_right`: of what is offered, how much is the right place. With Wilson's 95 % intervals. `p50_ms`:
from question to the choice of a place, nothing kept from the case before. `words` ranks by the names that
went and repeats the last change. Ceiling: `text_em` cannot reach 1, since many answers are new code that
nobody could foresee.

    python -m bench.next_edit [--cases N] [--sure X] [--model M ...] [--plot FILE.svg] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.plot import Point, plot
from bench.record import record
from keystroke.assist.next_edit.places import adapter_places_format
from keystroke.assist.next_edit.places_question import PLACE
from keystroke.assist.next_edit.prompt import detect_edit_format
from keystroke.config import load_settings
from keystroke.engine.load import load_model
from keystroke.engine.locate import resolve
from keystroke.errors import KeystrokeError
from keystroke_lab.evaluation.edit_cases import (
    SURE,
    EditCase,
    EditJudge,
    ModelJudge,
    PlacesJudge,
    WordJudge,
    evaluate_edits,
    read_edit_cases,
)

CASES = Path(__file__).parent / "data" / "edits.jsonl.xz"
COLUMNS = ("place", "text_em", "quiet", "offered_right", "offered", "p50_ms")


class TimedJudge:
    """A judge whose choices are timed."""

    def __init__(self, judge: EditJudge) -> None:
        self._judge = judge
        self.seconds: list[float] = []

    def chances(self, case: EditCase) -> list[float]:
        began = time.perf_counter()
        found = self._judge.chances(case)
        self.seconds.append(time.perf_counter() - began)
        return found

    def rewrite(self, case: EditCase, place: int) -> list[str] | None:
        return self._judge.rewrite(case, place)


def measure(name: str, cases: list[EditCase], sure: float | None) -> dict[str, Any]:
    """Raises KeystrokeError where the model cannot be had or has not learned edits."""
    if name == "words":
        return scores(TimedJudge(WordJudge()), cases, 0.3 if sure is None else sure)
    settings = load_settings({}, Path.cwd())
    path = resolve(name, settings)
    model = load_model(name, settings)
    try:
        places, form = (
            adapter_places_format(model.tokenizer, model.adapter_facts),
            detect_edit_format(model.tokenizer, path),
        )
        if places is None and form is None:
            raise KeystrokeError(f"{name} has not learned edits; name another model, or one with an adapter")
        judge = PlacesJudge(model, places) if places is not None else ModelJudge(model, form)  # type: ignore[arg-type]
        usual = PLACE["balanced"] if places is not None else SURE
        try:
            return scores(TimedJudge(judge), cases, usual if sure is None else sure)
        finally:
            judge.close()
    finally:
        model.engine.close()


def scores(judge: TimedJudge, cases: list[EditCase], sure: float) -> dict[str, Any]:
    report = evaluate_edits(judge, cases, sure)
    row: dict[str, Any] = {"sure": sure}
    for key, share in (("place", report.place), ("text_em", report.text), ("offered_right", report.offered)):
        row |= share.row(key)
    low, high = report.alarms.interval
    row |= {
        "quiet": round(1 - report.alarms.value, 4),
        "quiet_95": [round(1 - high, 4), round(1 - low, 4)],
        "quiet_of": report.alarms.of,
        "offered": report.offered.of,
        "p50_ms": round(1000 * statistics.median(judge.seconds), 1) if judge.seconds else None,
    }
    return row


def draw_plot(results: dict[str, Any]) -> str:
    points = [
        Point(Path(name).stem, max(row["p50_ms"], 0.1), row["text_em"], *row["text_em_95"])
        for name, row in results.items()
        if row["p50_ms"]
    ]
    return plot(points, "The next edit right to the letter, asked about its place")


def shown(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) and value < 10 else f"{value}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=60, help="cases; 0 is all")
    parser.add_argument("--sure", type=float, help="how likely a place must be to be offered")
    parser.add_argument("--model", action="append", help="a model by name or path; may be repeated")
    parser.add_argument("--plot", type=Path, help="write text_em against time as an SVG")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cases = read_edit_cases(CASES)[: given.cases or None]
    results: dict[str, Any] = {}
    for name in given.model or ["embedded", "words"]:
        try:
            results[name] = measure(name, cases, given.sure)
        except KeystrokeError as error:
            print(f"{name}: {error}", file=sys.stderr)
    if given.plot:
        given.plot.write_text(draw_plot(results), encoding="utf-8")
    width = max(map(len, results), default=5)
    print(" " * width, *(f"{c:>14}" for c in COLUMNS))
    for name, row in results.items():
        print(f"{name:<{width}}", *(f"{shown(row.get(c)):>14}" for c in COLUMNS))
    figures = {"bench": "next_edit", "cases": len(cases), "models": results}
    record("next_edit", figures)
    if given.out:
        given.out.write_text(json.dumps(figures) + "\n")
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main())
