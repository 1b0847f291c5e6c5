"""Next-edit cases from projects no model has seen: is the place right, and the text?

A case is a moment in a real release: what was changed so far, the file as it was, and a few places framed
alike, of which one changes next or none does. An `EditJudge` says how likely a place changes and what it
becomes.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keystroke.assist.next_edit.places import ANSWER_TOKENS, PlacesFormat, PlacesPrompt, adapter_places_format
from keystroke.assist.next_edit.places_question import PLACE
from keystroke.assist.next_edit.prompt import (
    EditFormat,
    EditPrompt,
    LineRange,
    RecentChange,
    detect_edit_format,
)
from keystroke.engine.base import Sampling
from keystroke.engine.model import Model
from keystroke.text.cases import read_rows
from keystroke_lab.corpus.trajectories import FileEdit
from keystroke_lab.evaluation.completion import Share
from keystroke_lab.pretraining.edit_sequences import RegionFramer, quiet_line, situation

PLACES = 6
SURE = 0.8  # a place that is likelier than this to change is offered
_LARGEST = 14_000  # characters of a file: a case must stay small enough to keep
_PER_PROJECT = 8


@dataclass(frozen=True, slots=True)
class EditCase:
    """`right`: which of the places changes, and `answer` what it becomes; None if none does."""

    project: str
    licence: str
    path: str
    history: tuple[RecentChange, ...]
    lines: tuple[str, ...]
    cursor: int | None
    places: tuple[LineRange, ...]
    right: int | None
    answer: tuple[str, ...] | None

    def prompt(self, form: EditFormat, place: int) -> EditPrompt:
        return form.build(self.history, self.path, self.lines, self.places[place], self.cursor)


def edit_case(
    step: Sequence[FileEdit],
    form: RegionFramer,
    rng: random.Random,
    *,
    positive: bool,
    largest: int = _LARGEST,
) -> EditCase | None:
    """A moment of a release step with places framed by `form`; None where the draw makes no clear case or
    the file has more than `largest` characters."""
    moment = situation(step, rng, positive=positive)
    # The change asked for is in the file just edited: otherwise the next file could not be predicted.
    if moment is None or moment.cursor is None or len("\n".join(moment.state.lines)) > largest:
        return None
    places: list[LineRange] = []
    answer: tuple[str, ...] | None = None
    if positive:
        hunk = moment.target[1]
        assert hunk is not None
        region = moment.region(form, moment.state.at[hunk] + rng.randint(-2, 2))
        rewritten = moment.state.rewritten(region)
        if rewritten is None or not rewritten.count:
            return None
        places, answer = [region], tuple(rewritten.lines)
    for _ in range(40):
        region = moment.region(form, quiet_line(moment, rng))
        apart = all(abs(region.first - other.first) >= 3 for other in places)
        quiet = moment.state.rewritten(region)
        if apart and quiet is not None and not quiet.count:
            places.append(region)
        if len(places) == PLACES:
            break
    if len(places) < PLACES // 2:
        return None
    order = list(range(len(places)))
    rng.shuffle(order)
    return EditCase(
        step[0].project,
        step[0].licence,
        moment.path,
        moment.history(),
        tuple(moment.state.lines),
        moment.cursor,
        tuple(places[i] for i in order),
        order.index(0) if positive else None,
        answer,
    )


def read_edit_cases(path: Path) -> list[EditCase]:
    return read_rows(path, _read, "edit cases")


def _read(row: dict[str, Any]) -> EditCase:
    return EditCase(
        **{
            **row,
            "history": tuple(RecentChange(**change) for change in row["history"]),
            "places": tuple(LineRange(**place) for place in row["places"]),
            "lines": tuple(row["lines"]),
            "answer": None if row["answer"] is None else tuple(row["answer"]),
        }
    )


class EditJudge(Protocol):
    """Something that foresees edits."""

    def chances(self, case: EditCase) -> list[float]:
        """How likely each place changes."""

    def rewrite(self, case: EditCase, place: int) -> list[str] | None:
        """What the place becomes; None: nothing."""


class ModelJudge:
    """A model on an engine. One session is kept: the history of a case is computed once."""

    def __init__(self, model: Model, form: EditFormat) -> None:
        self.form = form
        self._session = model.engine.session()

    def chances(self, case: EditCase) -> list[float]:
        found = []
        for place in range(len(case.places)):
            prompt = case.prompt(self.form, place)
            self._session.extend(prompt.tokens)
            first = self._session.step((), Sampling(logprobs=20)).logprobs[0]
            keep = dict(((first.token, first.logprob), *first.top)).get(prompt.keep, -math.inf)
            found.append(1.0 - math.exp(keep))
        return found

    def rewrite(self, case: EditCase, place: int) -> list[str] | None:
        prompt = case.prompt(self.form, place)
        self._session.extend(prompt.tokens)
        # The answer may not be "leave it" any more: what it would become is the question.
        said: list[int] = []
        bias = {prompt.keep: -100.0}
        while prompt.end not in said and len(said) < prompt.room:
            ahead = _ahead(prompt.draft, said)
            said += self._session.step(ahead, Sampling(logit_bias=bias)).tokens
        return rewritten(self.form, prompt, said)

    def close(self) -> None:
        self._session.close()


def rewritten(form: EditFormat, prompt: EditPrompt, said: Sequence[int]) -> list[str] | None:
    """What the answer makes of the region; None where that is nothing new."""
    lines = form.parse(prompt, said)
    return None if lines is None or tuple(lines) == prompt.lines else lines


def _ahead(draft: Sequence[int], said: Sequence[int], most: int = 12) -> Sequence[int]:
    """The old text from where the answer agrees with it again: some of an answer is a copy."""
    if len(said) < 3:  # the place, and where the new text begins
        return ()
    tail = tuple(said[-3:])
    for start in range(len(draft) - len(tail) + 1):
        if tuple(draft[start : start + len(tail)]) == tail:
            return draft[start + len(tail) : start + len(tail) + most]
    return ()


class PlacesJudge:
    """A model that is shown all places at once. One session is kept: a case's prompt is read once."""

    def __init__(self, model: Model, form: PlacesFormat) -> None:
        self.form = form
        self._session = model.engine.session()

    def chances(self, case: EditCase) -> list[float]:
        prompt = self._prompt(case)
        self._session.extend(prompt.tokens)
        first = self._session.step((), Sampling(logprobs=20)).logprobs[0]
        found = dict(((first.token, first.logprob), *first.top))
        numbers = [self._number(prompt, place) for place in case.places]
        return [math.exp(found.get(number, -math.inf)) for number in numbers]

    def rewrite(self, case: EditCase, place: int) -> list[str] | None:
        prompt = self._prompt(case)
        number = self._number(prompt, case.places[place])
        old = prompt.lines[prompt.places.index(case.places[place])]
        draft = [token for line in old for token in self.form.encode(f"{line}\n")]
        self._session.extend([*prompt.tokens, number])
        said: list[int] = []
        while prompt.end not in said and len(said) < ANSWER_TOKENS:
            said += self._session.step(_ahead(draft, said), Sampling()).tokens
        try:
            answer = self.form.parse(prompt, [number, *said])
        except ValueError:
            return None
        return None if answer is None or answer.lines == old else list(answer.lines)

    def close(self) -> None:
        self._session.close()

    def _prompt(self, case: EditCase) -> PlacesPrompt:
        return self.form.build(case.history, case.path, case.lines, case.places, case.cursor)

    def _number(self, prompt: PlacesPrompt, place: LineRange) -> int:
        return self.form.marks.numbers[1 + prompt.places.index(place)]


class WordJudge:
    """The baseline without a model: a place that holds more of the names that went is likelier."""

    def chances(self, case: EditCase) -> list[float]:
        went: set[str] = set()
        for change in case.history:
            went |= set(_WORD.findall(change.before)) - set(_WORD.findall(change.after))
        found = []
        for place in case.places:
            inside = set(_WORD.findall("\n".join(case.lines[place.first : place.last])))
            found.append(len(went & inside) / (1 + len(went)))
        return found

    def rewrite(self, case: EditCase, place: int) -> list[str] | None:
        """The last change repeated, where its words stand."""
        region = case.places[place]
        lines = list(case.lines[region.first : region.last])
        last = case.history[-1]
        old, new = last.before.rstrip("\n"), last.after.rstrip("\n")
        text = "\n".join(lines)
        return text.replace(old, new).split("\n") if old and old in text else None


_WORD = re.compile(r"[A-Za-z_]\w{2,}")


@dataclass(slots=True)
class EditReport:
    """`place`: the place that changed was ranked first; `text`: asked about the right place, the
    answer was right to the letter; `both`: the likeliest place was offered, and place and text were right;
    `offered`: of what was offered (likely enough, and written differently), how much was right in place;
    `alarms`: moments with nothing left to do at which something was offered."""

    place: Share
    text: Share
    both: Share
    offered: Share
    alarms: Share


def evaluate_edits(judge: EditJudge, cases: Sequence[EditCase], sure: float = SURE) -> EditReport:
    place = text = both = offered = right = alarms = 0
    open_cases = [case for case in cases if case.right is not None]
    for case in cases:
        chances = judge.chances(case)
        best = max(range(len(chances)), key=chances.__getitem__)
        written = judge.rewrite(case, best) if chances[best] >= sure else None
        shown = written is not None
        offered += shown
        if case.right is None:
            alarms += shown
            continue
        hit = best == case.right
        said = written if hit and shown else judge.rewrite(case, case.right)
        exact = said is not None and tuple(said) == case.answer
        place += hit
        text += exact
        both += hit and exact and shown
        right += hit and shown
    n = len(open_cases)
    return EditReport(
        Share(place, n), Share(text, n), Share(both, n), Share(right, offered), Share(alarms, len(cases) - n)
    )


def edit_summary(report: EditReport) -> dict[str, float | list[float] | int]:
    rows: dict[str, float | list[float] | int] = {}
    for key in ("place", "text", "both", "offered", "alarms"):
        rows |= getattr(report, key).row(f"edit_{key}")
    return rows


def scored_edits(model: Model, path: Path, cases: Sequence[EditCase]) -> dict[str, float | list[float] | int]:
    """The scores of a model; nothing where it has not learned edits or there are no cases."""
    if not cases:
        return {}
    places, form = (
        adapter_places_format(model.tokenizer, model.adapter_facts),
        detect_edit_format(model.tokenizer, path),
    )
    judge: ModelJudge | PlacesJudge
    sure = SURE
    if places is not None:
        judge, sure = PlacesJudge(model, places), PLACE["balanced"]
    elif form is not None:
        judge = ModelJudge(model, form)
    else:
        return {}
    try:
        return edit_summary(evaluate_edits(judge, cases, sure))
    finally:
        judge.close()
