"""The model's next edit: asked place by place, written once, and offered only where it holds up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from keystroke.assist.next_edit import (
    Cause,
    EngineAnswer,
    NextEditTracker,
    NoEditReason,
    PredictedEdits,
    SinglePlaceQuestion,
    burst_between,
    proposal_from_model,
)
from keystroke.assist.next_edit.prompt import SPELLING, EditFormat, find_marks
from keystroke.assist.next_edit.question import changes_in_burst, merged_edits
from keystroke.engine.base import TokenLogprob
from keystroke.engine.echo import END_OF_TURN
from keystroke.engine.generation import GenerationParams
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.text import Edit, apply_edits

SPECIAL = {name: 300 + i for i, name in enumerate(SPELLING)} | {"<|endoftext|>": END_OF_TURN}
TOKENIZER = ByteTokenizer(SPECIAL, vocab_size=340)
MARKS = find_marks(TOKENIZER)
assert MARKS is not None
FORMAT = EditFormat(TOKENIZER.encode, TOKENIZER.decode, MARKS)
KEEP, END = MARKS.keep, MARKS.end


def question(before: str, old: str, new: str, **more: Any) -> SinglePlaceQuestion:
    change = burst_between(before, before.replace(old, new, 1))
    assert change is not None
    return SinglePlaceQuestion(FORMAT, "a.py", "python", change, **more)


class Model:
    """Keeps what it is asked; changes the places that `writes` says something about."""

    def __init__(self, writes: Callable[[str], str | None], sure: float = 0.99) -> None:
        self.writes, self.sure = writes, sure
        self.probes: list[str] = []
        self.written = 0

    async def run(self, tokens: Sequence[int], params: GenerationParams, drafter: object) -> EngineAnswer:
        assert MARKS is not None
        at = max(i for i, t in enumerate(tokens) if t == MARKS.before)
        asked = TOKENIZER.decode(tokens[at : list(tokens).index(MARKS.below, at)])
        answer = self.writes(asked)
        if params.max_tokens == 1:
            self.probes.append(asked)
            chosen = KEEP if answer is None else 65
            chance = math.log(self.sure)
            rival = math.log(1 - self.sure)
            return EngineAnswer(
                (chosen,),
                (
                    TokenLogprob(
                        chosen, chance, ((chosen, chance), (KEEP, rival))[: 2 if answer is not None else 1]
                    ),
                ),
            )
        self.written += 1
        old, new = (t.removesuffix("\n").split("\n") for t in (asked, answer or ""))
        said = tuple(FORMAT.encode_answer(old, new))
        if "<|edit|>" in (answer or ""):
            said = (*said[:-1], MARKS.edit, END)
        return EngineAnswer(said, tuple(TokenLogprob(t, math.log(self.sure)) for t in said))


def asked(q: SinglePlaceQuestion, model: Model) -> PredictedEdits | NoEditReason:
    return asyncio.run(q.resolve(model.run))


def rewriting(old: str, new: str) -> Callable[[str], str | None]:
    return lambda region: region.replace(old, new) if old in region else None


FILE = (
    "def area(width, height):\n    return width * height\n\n\n"
    + "".join(f"value_{n} = {n}\n" for n in range(20))
    + "\n\ndef report(w, h):\n    print(area(w, h))\n"
)


def test_the_best_place_is_written_and_reduced_to_its_smallest_edit() -> None:
    q = question(FILE, "def area(width, height)", "def area(width, height, depth)")
    model = Model(rewriting("area(w, h))", "area(w, h, 1))"))
    found = asked(q, model)
    assert isinstance(found, PredictedEdits)
    assert model.written == 1
    assert apply_edits(q.text, found.edits) == q.text.replace("area(w, h))", "area(w, h, 1))")
    assert [(e.start, e.end, e.text) for e in found.edits] == [
        (q.text.index("h))") + 1, q.text.index("h))") + 1, ", 1")
    ]


def test_where_every_place_stays_nothing_is_written() -> None:
    model = Model(lambda _region: None)
    assert asked(question(FILE, "width * height", "height * width"), model) is NoEditReason.LEFT
    assert model.probes
    assert model.written == 0


def test_a_place_sure_to_change_ends_the_asking() -> None:
    q = question(FILE, "area", "surface")
    model = Model(lambda region: region.replace("value", "number"))
    asked(q, model)
    assert len(model.probes) == 1


@pytest.mark.parametrize(("eagerness", "shown"), [("calm", False), ("eager", True)])
def test_how_sure_it_must_be_follows_the_eagerness(eagerness: str, shown: bool) -> None:
    q = question(FILE, "area", "surface", eagerness=eagerness)
    found = asked(q, Model(rewriting("area(w", "surface(w"), sure=0.9))
    assert isinstance(found, PredictedEdits) is shown
    assert shown or found is NoEditReason.UNSURE


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda r: r.replace("area(w, h))", "area(w, h)"), NoEditReason.BREAKS),
        (lambda r: r.replace("print(area(w, h))", f"print({'x' * 90})"), NoEditReason.TOO_LONG),
        (lambda r: r.replace("depth)", ")"), NoEditReason.UNDOES),
        (lambda r: r, NoEditReason.LEFT),
        (lambda r: f"{r}<|edit|>", NoEditReason.UNUSABLE),
    ],
)
def test_what_does_not_hold_up_is_not_offered(answer: Callable[[str], str], reason: NoEditReason) -> None:
    q = question(FILE, "height)", "height, depth)", max_line=80)
    place = "depth" if reason is NoEditReason.UNDOES else "report"
    assert asked(q, Model(lambda region: answer(region) if place in region else None)) is reason


def test_a_refused_edit_is_not_offered_again() -> None:
    q = question(FILE, "area", "surface")
    model = Model(rewriting("area(w", "surface(w"))
    found = asked(q, model)
    assert isinstance(found, PredictedEdits)
    edit = found.edits[0]
    refused = frozenset({(q.text[edit.start : edit.end], edit.text)})
    assert asked(replace(q, dismissed=refused), model) is NoEditReason.DISMISSED


def test_line_ends_stay_what_they_are() -> None:
    q = question(FILE.replace("\n", "\r\n"), "area", "surface")
    found = asked(q, Model(rewriting("    print(area(w, h))\n", "    print(surface(w, h))\n    done()\n")))
    assert isinstance(found, PredictedEdits)
    after = apply_edits(q.text, found.edits)
    assert after.replace("\r\n", "").count("\n") == 0
    assert after.endswith("    print(surface(w, h))\r\n    done()\r\n")


def test_lines_may_go_without_a_trace() -> None:
    q = question(FILE, "area", "surface")
    found = asked(
        q, Model(lambda r: r.replace("    print(area(w, h))\n", "    pass\n") if "print" in r else None)
    )
    assert isinstance(found, PredictedEdits)
    assert apply_edits(q.text, found.edits).endswith("def report(w, h):\n    pass\n")


def test_changes_of_neighbouring_lines_are_one_jump_and_others_are_not() -> None:
    old = "a = 1\nb = 2\nkeep = 3\nkeep = 4\nc = 5\n"
    edits = merged_edits(old, old.replace("a", "x").replace("b", "y").replace("c =", "z ="))
    assert len(edits) == 2
    assert apply_edits(old, edits) == "x = 1\ny = 2\nkeep = 3\nkeep = 4\nz = 5\n"


def test_a_paste_or_white_space_asks_for_nothing() -> None:
    for old, new in (("x\n", "x\n" + "y\n" * 500), ("x = 1\n", "x  =  1\n")):
        burst = burst_between(old, new)
        assert burst is not None
        assert changes_in_burst(burst, "a.py") == []


def test_an_insertion_is_told_with_the_line_above_it() -> None:
    burst = burst_between("import os\nimport re\n", "import os\nimport json\nimport re\n")
    assert burst is not None
    (change,) = changes_in_burst(burst, "a.py")
    assert (change.before, change.after) == ("import os\n", "import os\nimport json\n")


class TestTaking:
    """What the tracker makes of the model's edits."""

    def offered(self) -> tuple[NextEditTracker, str, Edit]:
        before = FILE
        tracker = NextEditTracker(before, "python", "a.py")
        start = before.index("width * height")
        text = before[:start] + "width * height * 2" + before[start + 14 :]
        tracker.apply_edits(before, [Edit(start + 14, start + 14, " * 2")])
        at = text.index("print")
        edit = Edit(at, at + 5, "log")
        tracker.adopt(proposal_from_model(text, PredictedEdits((edit,), 0.9)))
        return tracker, text, edit

    def test_a_taken_edit_leads_to_the_next_question_with_both_changes_told(self) -> None:
        tracker, text, edit = self.offered()
        tracker.apply_edits(text, [edit])
        after = apply_edits(text, [edit])
        intent = tracker.intent(after)
        assert intent is not None
        assert (intent.change.old, intent.change.new) == ("print", "log")
        assert [c.after for c in intent.history] == ["    return width * height * 2\n"]

    def test_it_moves_with_what_is_typed_above_it(self) -> None:
        tracker, text, edit = self.offered()
        assert tracker.apply_edits(text, [Edit(0, 0, "# note\n")]) is None
        assert tracker.proposal is not None
        assert tracker.proposal.cause is Cause.MODEL
        assert tracker.proposal.edits[0].edit == Edit(edit.start + 7, edit.end + 7, "log")

    def test_a_dismissed_edit_is_remembered(self) -> None:
        tracker, text, _ = self.offered()
        tracker.dismiss(text)
        assert tracker.intent(text) is None
        tracker.apply_edits(text, [Edit(0, 0, "#")])
        intent = tracker.intent("#" + text)
        assert intent is not None
        assert ("print", "log") in intent.dismissed
