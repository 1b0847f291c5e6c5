"""A model that is shown all places is scored as one that is asked about each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from keystroke.assist.next_edit.places import PlaceMarks, PlacesAnswer, PlacesFormat
from keystroke.assist.next_edit.prompt import LineRange, RecentChange
from keystroke.engine.base import Sampling, Step, TokenLogprob
from keystroke.engine.model import Model
from keystroke_lab.evaluation.edit_cases import EditCase, PlacesJudge, edit_summary, evaluate_edits

FORMAT = PlacesFormat(
    lambda text: [ord(sign) for sign in text],
    lambda tokens: "".join(map(chr, tokens)),
    PlaceMarks(1, 2, 3, 4, tuple(map(ord, "0123456")), tuple(map(ord, "ABCDEFGHIJKLM"))),
)
LINES = tuple(f"v{i} = old({i})" for i in range(60))
PLACES = (LineRange(40, 52), LineRange(0, 12), LineRange(20, 32))  # not in the order of the file
ANSWER = ("v40 = new(40)", *LINES[41:52])
OPEN = EditCase("p", "MIT", "a.py", (RecentChange("a.py", "old\n", "new\n"),), LINES, 3, PLACES, 0, ANSWER)
QUIET = EditCase("p", "MIT", "a.py", (RecentChange("a.py", "x\n", "y\n"),), LINES, 3, PLACES, None, None)


@dataclass
class Session:
    """Changes the last place where something old became new, and is silent otherwise."""

    held: list[int] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        self.held = list(tokens)

    def step(self, draft: Sequence[int], sampling: Sampling) -> Step:
        text = "".join(map(chr, self.held))
        moves = "-old" in text
        if sampling.logprobs:
            sure, other = (ord("3"), ord("0")) if moves else (ord("0"), ord("1"))
            first = TokenLogprob(sure, math.log(0.9), ((other, math.log(0.1)),))
            return Step((sure,), 0, (first,))
        prompt = FORMAT.build(OPEN.history, OPEN.path, OPEN.lines, OPEN.places, OPEN.cursor)
        said = FORMAT.encode_answer(prompt, PlacesAnswer(2, ANSWER))[1:]
        return Step(tuple(said), len(said) - 1)

    def close(self) -> None: ...


def judge() -> PlacesJudge:
    return PlacesJudge(cast(Model, SimpleNamespace(engine=SimpleNamespace(session=Session))), FORMAT)


def test_chances_belong_to_the_places_as_the_case_has_them() -> None:
    assert [round(chance, 3) for chance in judge().chances(OPEN)] == [0.9, 0.0, 0.0]


def test_the_scores_count_place_text_and_silence() -> None:
    found: dict[str, Any] = edit_summary(evaluate_edits(judge(), [OPEN, QUIET]))
    assert (found["edit_place"], found["edit_text"], found["edit_both"]) == (1.0, 1.0, 1.0)
    assert (found["edit_offered"], found["edit_alarms"]) == (1.0, 0.0)
