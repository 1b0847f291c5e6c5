"""Exactness of one model's suggestions in one language, and what each costs; used by `bench/completion.py`.

Every share has its interval; a time is from the request to the whole answer, with nothing cached. Answers do
not depend on the machine and may come from another one; times are from where the benchmark runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from statistics import median
from typing import Any

from keystroke.analysis.syntax import language_of
from keystroke.assist.completion.extent import Extent
from keystroke.assist.completion.live_completion import ShownCompletion, WithheldCompletion
from keystroke.assist.completion.reasons import WithheldReason
from keystroke.assist.completion.second_opinion import second_opinion
from keystroke.text.cases import CompletionCase
from keystroke_lab.evaluation.completion import GATE, Share, Suggester
from keystroke_lab.pretraining.fim import FimCut

SETTLED = 0.12  # seconds without a key before the larger model starts, as in the gateway
# The kind of place, and whether the prompt contains the text below the cursor.
TASKS = {
    "rest_em": (FimCut.REST_OF_LINE, False),
    "line_em": (FimCut.LINE, False),
    "fim_rest_em": (FimCut.REST_OF_LINE, True),
    "fim_line_em": (FimCut.LINE, True),
}


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """`shown`: confident enough to be shown as ghost text. `first`: seconds to the first text; with one
    model, the whole text. `verdict`: the larger model's verdict on the text of the smaller one."""

    text: str
    confidence: float
    shown: bool
    seconds: float
    first: float
    verdict: str = ""


class AnswerStore:
    """Answers with what each cost, kept on disk where a file is given: what is asked again, by a cascade or
    by a benchmark that was stopped, counts as it was. `load` is called when an answer is missing. `learned`:
    the languages that the model says it has learned; None is all."""

    def __init__(
        self,
        load: Callable[[], Suggester],
        path: Path | None = None,
        learned: frozenset[str] | None = None,
    ) -> None:
        self._load, self._path, self._learned = load, path, learned
        self._suggester: Suggester | None = None
        self._said: dict[str, RecordedAnswer] = {}
        self._timed: dict[str, float] = {}
        self._fills: bool | None = None
        self.same: list[bool] = []  # of the answers timed anew: it is the one that was kept
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            row = json.loads(line)
            self._fills = row["fills"]
            self._said[row["key"]] = _answer(row["text"], row["confidence"], row["seconds"])

    @property
    def fills(self) -> bool:
        if self._fills is None:
            self._fills = self._loaded().fills
        return self._fills

    def answer(self, case: CompletionCase, *, below: bool, again: bool = False) -> RecordedAnswer:
        """`below`: with the text below in view. `again`: timed on this machine, whatever was kept."""
        key = _key(case, below)
        if key not in self._said:
            said = self._ask(case, below)
            self._said[key], self._timed[key] = said, said.seconds
            if self._path is not None:
                row = {
                    "key": key, "text": said.text, "confidence": said.confidence,
                    "seconds": round(said.seconds, 5), "fills": self.fills,
                }  # fmt: skip
                with self._path.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
        elif again and key not in self._timed:
            said = self._ask(case, below)
            self._timed[key] = said.seconds
            self.same.append(said.text.rstrip() == self._said[key].text.rstrip())
        said = self._said[key]
        seconds = self._timed[key] if again else said.seconds
        knows = self._learned is None or language(case) in self._learned
        return replace(said, shown=said.shown and knows, seconds=seconds, first=seconds)

    def _ask(self, case: CompletionCase, below: bool) -> RecordedAnswer:
        suggester = self._loaded()
        began = time.perf_counter()
        said = suggester.line(case.prefix, case.suffix if below else None)
        return _answer(said.text, said.confidence, time.perf_counter() - began)

    def _loaded(self) -> Suggester:
        self._suggester = self._suggester or self._load()
        return self._suggester

    def release(self) -> None:
        """Forget the suggester, not its answers."""
        self._suggester = None


def _answer(text: str, confidence: float, seconds: float) -> RecordedAnswer:
    return RecordedAnswer(text, confidence, confidence >= GATE and bool(text.strip()), seconds, seconds)


def _key(case: CompletionCase, below: bool) -> str:
    return hashlib.sha256(repr((case.prefix, case.suffix if below else None)).encode()).hexdigest()[:24]


class Cascade:
    """Two models. The small model's answer is shown if it is confident and was trained on the language. The
    larger model confirms, lengthens or replaces it, or is offered where nothing is shown, by the gateway's
    rule. If neither is confident enough to be shown, the larger model's answer counts, as an unsure answer
    of a single model does. The larger model starts after the gateway's pause; unlike in the gateway, it
    uses no draft and has not read the prompt in advance."""

    def __init__(self, small: AnswerStore, large: AnswerStore) -> None:
        self._small, self._large = small, large

    @property
    def fills(self) -> bool:
        return self._small.fills and self._large.fills

    def answer(self, case: CompletionCase, *, below: bool, again: bool = False) -> RecordedAnswer:
        first = self._small.answer(case, below=below, again=again)
        second = self._large.answer(case, below=below, again=again)
        seconds = first.seconds + SETTLED + second.seconds
        shown = first.text if first.shown else ""
        offer = ShownCompletion(second.text, Extent.REST, second.confidence)
        opinion = second_opinion(
            shown, offer if second.shown else WithheldCompletion(WithheldReason.LOW_CONFIDENCE, second.text)
        )
        begun = first.seconds if shown else seconds
        if opinion is not None:
            return RecordedAnswer(
                opinion.text, opinion.confidence, True, seconds, begun, opinion.verdict.value
            )
        standing, verdict = (first, "left") if shown else (second, "nothing shown")
        return replace(standing, seconds=seconds, first=begun, verdict=verdict)


def language(case: CompletionCase) -> str:
    name = language_of(case.path, None) or PurePath(case.path).suffix.lstrip(".")
    return "typescript" if name == "tsx" else name


def by_language(cases: Sequence[CompletionCase], each: int) -> dict[str, list[CompletionCase]]:
    """The first `each` cases of each kind in each language; all of them for 0."""
    found: dict[str, list[CompletionCase]] = {}
    for case in cases:
        held = found.setdefault(language(case), [])
        if not each or sum(other.kind == case.kind for other in held) < each:
            held.append(case)
    return found


def exactness(
    suggester: AnswerStore | Cascade, cases: Sequence[CompletionCase], tasks: Sequence[str], timed: int = 0
) -> dict[str, Any]:
    """The share of each task that is right to the letter, with its interval; of all answers those sure enough
    to be `shown`, and of these the `shown_right`; `p50_ms` over all, or over the first `timed` places of each
    task, which are then asked on this machine whatever was kept."""
    row: dict[str, Any] = {}
    clock: list[RecordedAnswer] = []
    shown, right, asked, verdicts = 0, 0, 0, Counter[str]()
    for task in tasks:
        kind, below = TASKS[task]
        places = [case for case in cases if case.kind == kind]
        if not places or (below and not suggester.fills):
            continue
        hits = 0
        for number, case in enumerate(places):
            said = suggester.answer(case, below=below, again=number < timed)
            if not timed or number < timed:
                clock.append(said)
            hit = _right(said, case)
            hits, asked = hits + hit, asked + 1
            shown, right = shown + said.shown, right + (hit and said.shown)
            verdicts[said.verdict] += 1
        row |= Share(hits, len(places)).row(task)
    if asked:
        row |= Share(shown, asked).row("shown") | Share(right, shown).row("shown_right")
    row["p50_ms"] = round(median(said.seconds for said in clock) * 1e3, 1) if clock else None
    if isinstance(suggester, Cascade) and clock:
        row["first_p50_ms"] = round(median(said.first for said in clock) * 1e3, 1)
        row["verdicts"] = dict(verdicts.most_common())
    return row


def _right(said: RecordedAnswer, case: CompletionCase) -> bool:
    return said.text.rstrip() == case.middle.rstrip()


def compare_models(
    first: AnswerStore | Cascade,
    second: AnswerStore | Cascade,
    cases: Sequence[CompletionCase],
    tasks: Sequence[str],
) -> dict[str, Any]:
    """At the same places: how many only the one has right and how many only the other, and the difference of
    their shares with its 95 % interval. It tells two models apart long before their own intervals do."""
    only_first = only_second = of = 0
    for task in tasks:
        kind, below = TASKS[task]
        if below and not (first.fills and second.fills):
            continue
        for case in (case for case in cases if case.kind == kind):
            one, other = (_right(asked.answer(case, below=below), case) for asked in (first, second))
            only_first, only_second, of = only_first + (one > other), only_second + (other > one), of + 1
    row: dict[str, Any] = {"only_first": only_first, "only_second": only_second, "of": of}
    if of:
        gained = (only_second - only_first) / of
        half = 1.96 * math.sqrt(max(0.0, (only_first + only_second) / of - gained * gained) / of)
        row |= {"gained": round(gained, 4), "gained_95": [round(gained - half, 4), round(gained + half, 4)]}
    return row


def summarise_languages(rows: dict[str, dict[str, Any]], tasks: Sequence[str]) -> dict[str, Any]:
    """All languages together: hits over places, the median of the languages' medians."""
    total: dict[str, Any] = {}
    for task in (*tasks, "shown", "shown_right"):
        counted = [(row[task] * row[f"{task}_of"], row[f"{task}_of"]) for row in rows.values() if task in row]
        if counted:
            hits = round(sum(hits for hits, _ in counted))
            total |= Share(hits, sum(of for _, of in counted)).row(task)
    total["p50_ms"] = None
    for key in ("p50_ms", "first_p50_ms"):
        if times := [row[key] for row in rows.values() if row.get(key) is not None]:
            total[key] = round(median(times), 1)
    if any("verdicts" in row for row in rows.values()):
        verdicts = sum((Counter(row.get("verdicts", {})) for row in rows.values()), Counter[str]())
        total["verdicts"] = dict(verdicts.most_common())
    return total
