"""What each threshold of ghost text shows, and how much of it is right.

Regime: the late cases of `bench/completion.py` in eight languages, the rest of a line and whole lines, with
the prompts of the live channel (a window of 512 tokens, token healing, the n-gram cache of the file, greedy),
without further typing. Every place is completed once; then each row applies the gateway's decision to the
same text: the whole line, a confident beginning, or nothing. Rows: the three values of `assist.eagerness`
with the shipped threshold for whole lines, and other thresholds (`--whole`). Thresholds are chosen on Python
and reported separately for the other languages.

`shown`: suggestions shown; `right`: those equal to the file's text or a beginning of it; `wrong_chars`:
characters shown that the file does not have; `saved_chars`: characters of right suggestions; `tokens`: mean
number generated before the decision. Ceiling: where several lines would be good, only the file's counts.

    python -m bench.display [--model M] [--places N] [--whole CHANCE ...]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any

from bench.completion import CASES, LANGUAGES
from bench.exactness import language
from bench.record import record
from keystroke.assist.completion import Extent, LiveCompletion, ShownCompletion
from keystroke.assist.completion.beginning import WHOLE
from keystroke.config import AssistSettings
from keystroke.engine.generation import Chunk, Generation
from keystroke.engine.load import load_model
from keystroke.engine.mixing import Mixing
from keystroke.engine.model import Model
from keystroke.text.cases import CompletionCase, read_cases
from keystroke.text.diff import common_prefix
from keystroke_lab.pretraining.fim import FimCut

WINDOW = 512


@dataclass(frozen=True, slots=True)
class WrittenCompletion:
    case: CompletionCase
    steps: tuple[Chunk, ...]


def write_completions(model: Model, cases: Sequence[CompletionCase]) -> Iterator[WrittenCompletion]:
    """What the model says at each place, step by step."""
    with model.engine.session() as session:
        for case in cases:
            stream = _buffer(model, case, "balanced").begin(*_place(case), Extent.REST)
            steps = []
            for chunk in Generation(
                model, session, stream.prompt.tokens, stream.params(), mixing=Mixing(stream.predictor)
            ):
                steps.append(chunk)
                stream.feed(chunk)
                if stream.done:
                    break
            yield WrittenCompletion(case, tuple(steps))


def judge(model: Model, one: WrittenCompletion, eagerness: str) -> tuple[ShownCompletion | None, int]:
    """What is shown of it, and how many tokens had been said by then."""
    text, cursor = _place(one.case)
    buffer = _buffer(model, one.case, eagerness)
    stream = buffer.begin(text, cursor, Extent.REST)
    told = 0
    for step in one.steps:
        for part in step.split():
            stream.feed(part)
            told += 1
            answer = buffer.answer(text, cursor, stream)
            if isinstance(answer, ShownCompletion):
                return answer, told
            if stream.done:
                return None, told
    return None, told


def row(model: Model, places: Sequence[WrittenCompletion], eagerness: str) -> dict[str, Any]:
    shown = right = wrong = saved = 0
    tokens = []
    for one in places:
        offer, told = judge(model, one, eagerness)
        if offer is None:
            continue
        wanted = one.case.middle.rstrip()
        true = wanted.startswith(offer.text) if offer.partial else wanted == offer.text.rstrip()
        shown, right = shown + 1, right + true
        wrong += len(offer.text) - common_prefix(offer.text, wanted)
        saved += len(offer.text) if true else 0
        tokens.append(told)
    return {
        "places": len(places),
        "shown": shown,
        "right": right,
        "wrong_chars": wrong,
        "saved_chars": saved,
        "tokens": round(mean(tokens), 2) if tokens else None,
    }


@contextmanager
def whole_from(eagerness: str, chance: float) -> Iterator[None]:
    """Whole lines from this chance on, for as long as it lasts."""
    shipped = WHOLE[eagerness]
    WHOLE[eagerness] = chance
    try:
        yield
    finally:
        WHOLE[eagerness] = shipped


def _buffer(model: Model, case: CompletionCase, eagerness: str) -> LiveCompletion:
    settings = AssistSettings(eagerness=eagerness)
    return LiveCompletion(model, settings, path=case.path, language=language(case), budget=WINDOW)


def _place(case: CompletionCase) -> tuple[str, int]:
    return case.prefix + case.suffix, len(case.prefix)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="embedded", help="by name or path")
    parser.add_argument("--places", type=int, default=200, help="in Python, and as many elsewhere; 0 is all")
    parser.add_argument(
        "--whole", type=float, action="append", help="another least chance of a whole line; may be repeated"
    )
    given = parser.parse_args()
    groups = {}
    for name, path in (("python", CASES), ("others", LANGUAGES)):
        cases = [case for case in read_cases(path) if case.kind in (FimCut.REST_OF_LINE, FimCut.LINE)]
        random.Random(0).shuffle(cases)
        groups[name] = cases[: given.places or None]
    model = load_model(given.model)
    try:
        texts: dict[str, list[WrittenCompletion]] = {}
        for name, cases in groups.items():
            texts[name] = []
            for one in write_completions(model, cases):
                texts[name].append(one)
                print(f"\r{name}: {len(texts[name])} of {len(cases)}", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
        rows = []
        for eagerness, shipped in WHOLE.items():
            for chance in sorted({shipped, *(given.whole or ())}):
                with whole_from(eagerness, chance):
                    for name, places in texts.items():
                        told = row(model, places, eagerness)
                        rows.append(
                            {
                                "eagerness": eagerness,
                                "whole": chance,
                                "ships": chance == shipped,
                                "in": name,
                                **told,
                            }
                        )
    finally:
        model.engine.close()
    columns = (
        "eagerness",
        "whole",
        "ships",
        "in",
        "places",
        "shown",
        "right",
        "wrong_chars",
        "saved_chars",
        "tokens",
    )
    print(*(f"{column:>12}" for column in columns))
    for cells in rows:
        print(*(f"{cells[column]!s:>12}" for column in columns))
    record("display", {"bench": "display", "model": given.model, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
