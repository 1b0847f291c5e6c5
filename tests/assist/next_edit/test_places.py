"""The question about several places: what is asked can be answered, and answers are read as meant."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from keystroke.assist.next_edit import EngineAnswer, NoEditReason, PredictedEdits, burst_between
from keystroke.assist.next_edit.places import (
    ANSWER_TOKENS,
    CHANGE_TOKENS,
    HISTORY_TOKENS,
    PlaceMarks,
    PlacesAnswer,
    PlacesFormat,
    PlacesPrompt,
    adapter_places_format,
    enclosing_lines,
)
from keystroke.assist.next_edit.places_question import PLACE, PlacesQuestion
from keystroke.assist.next_edit.prompt import LineRange, RecentChange
from keystroke.engine.base import TokenLogprob
from keystroke.engine.generation import GenerationParams
from keystroke.engine.speculative import Drafter
from keystroke.engine.tokenizer import ByteTokenizer

SPECIAL = 0x110000
MARKS = PlaceMarks(
    SPECIAL,
    SPECIAL + 1,
    SPECIAL + 2,
    SPECIAL + 3,
    tuple(map(ord, "0123456")),
    tuple(map(ord, "ABCDEFGHIJKLM")),
)


def decoded(tokens: Sequence[int]) -> str:
    return "".join(chr(token) if token < SPECIAL else f"<{token - SPECIAL}>" for token in tokens)


FORMAT = PlacesFormat(lambda text: [ord(sign) for sign in text], decoded, MARKS)
LINES = ["class A:", "    def f(self):", "        x = old()", "        return x", "", "y = old()", "z = 1"]
HISTORY = [RecentChange("a.py", "w = old()\n", "w = new()\n")]
PLACES = [LineRange(5, 7), LineRange(2, 4)]


def prompt(**more: Any) -> PlacesPrompt:
    return FORMAT.build(HISTORY, "a.py", LINES, PLACES, **more)


def test_a_prompt_reads_as_the_format_says() -> None:
    text = decoded(prompt(cursor=3).tokens)
    head, _, rest = text.partition("left to do.\n")
    assert head.startswith("<0>user\n")
    assert rest == (
        "<2>a.py\n-w = old()\n+w = new()\n<2>a.py\n"
        "1\nclass A:\n    def f(self):\nA        x = old()\nB<3>        return x\nC\n"
        "2\nAy = old()\nBz = 1\nC\n<1>\n<0>assistant\n"
    )


def test_places_are_numbered_in_the_order_of_the_file() -> None:
    assert prompt().places == (LineRange(2, 4), LineRange(5, 7))
    assert prompt().lines[1] == ("y = old()", "z = 1")


@pytest.mark.parametrize(
    "said",
    [
        None,
        PlacesAnswer(0, ("        x = new()", "        return x")),
        PlacesAnswer(1, ("y = new()", "z = 1")),
        PlacesAnswer(1, ("y = old()",)),
        PlacesAnswer(1, ()),
        PlacesAnswer(1, ("y = old()", "", "z = 1")),
        PlacesAnswer(1, ("import q", "y = old()", "z = 1", "end")),
    ],
)
def test_an_answer_is_read_as_it_was_meant(said: PlacesAnswer | None) -> None:
    asked = prompt()
    assert FORMAT.parse(asked, FORMAT.encode_answer(asked, said)) == said


def test_a_place_that_stays_as_it_is_is_silence() -> None:
    asked = prompt()
    assert FORMAT.parse(asked, FORMAT.encode_answer(asked, PlacesAnswer(1, asked.lines[1]))) is None


@pytest.mark.parametrize(
    "answer", ["1AB\nx", "7AB\nx<", "3AB\nx<", "1ZB\nx<", "1BA\nx<", "1A<", "hello<", "<", "1ABx<"]
)
def test_an_answer_that_is_none_is_refused(answer: str) -> None:
    tokens = [MARKS.end if sign == "<" else ord(sign) for sign in answer]
    with pytest.raises(ValueError, match="the answer"):
        FORMAT.parse(prompt(), tokens)


def test_the_newest_changes_are_kept_and_long_ones_cut() -> None:
    many = [RecentChange("a.py", f"a{i} = {'1' * 300}\n", f"a{i} = 2\n") for i in range(20)]
    asked = FORMAT.build(many, "a.py", LINES, PLACES)
    text = decoded(asked.tokens)
    assert "+a19 = 2" in text
    assert "+a0 = 2" not in text
    assert asked.shared < HISTORY_TOKENS + 600
    assert "1" * CHANGE_TOKENS not in text


def test_the_lines_a_place_stands_under_are_found_by_indentation() -> None:
    assert enclosing_lines(LINES, 2) == ["class A:", "    def f(self):"]
    assert enclosing_lines(LINES, 5) == []
    assert enclosing_lines([], 0) == []


def test_a_tokenizer_of_another_family_has_no_such_format() -> None:
    assert adapter_places_format(ByteTokenizer({}), {"next_edit": "3"}) is None
    assert adapter_places_format(ByteTokenizer({}), {}) is None


BEFORE = "a = old()\nq = 1\nr = 2\ns = 3\n" + "\n" * 12 + "b = old()\n"
AFTER = BEFORE.replace("a = old()", "a = new()")


class Model:
    """Chooses `number` with the chance `sure`, then writes `text`."""

    def __init__(self, number: str, text: str = "", sure: float = 0.95, fluent: float = 0.99) -> None:
        self.number, self.text, self.sure, self.fluent = ord(number), text, sure, fluent
        self.asked: list[tuple[int, ...]] = []

    async def run(
        self, tokens: Sequence[int], params: GenerationParams, drafter: Drafter | None
    ) -> EngineAnswer:
        self.asked.append(tuple(tokens))
        if params.max_tokens == 1:
            silence = ord("0")
            rest = (silence, math.log(1 - self.sure)) if self.number != silence else (ord("1"), -4.0)
            first = TokenLogprob(self.number, math.log(self.sure), (rest,))
            return EngineAnswer((self.number,), (first,))
        assert params.max_tokens is not None
        assert params.max_tokens <= ANSWER_TOKENS
        said = [*(ord(sign) for sign in self.text), MARKS.end]
        return EngineAnswer(
            tuple(said), tuple(TokenLogprob(token, math.log(self.fluent), ()) for token in said)
        )


def answered(model: Model, **more: Any) -> PredictedEdits | NoEditReason:
    change = burst_between(BEFORE, AFTER)
    assert change is not None
    return asyncio.run(PlacesQuestion(FORMAT, "a.py", "python", change, **more).resolve(model.run))


def place_of(line: str) -> tuple[str, str]:
    """The number and the letter under which a line is shown."""
    change = burst_between(BEFORE, AFTER)
    assert change is not None
    asked = PlacesQuestion(FORMAT, "a.py", "python", change).prompt()
    assert asked is not None
    for number, lines in enumerate(asked.lines, start=1):
        if line in lines:
            return str(number), chr(MARKS.letters[lines.index(line)])
    raise AssertionError(line)


def test_a_sure_choice_with_a_sure_text_is_an_edit() -> None:
    number, letter = place_of("b = old()")
    model = Model(number, f"{letter}{chr(ord(letter) + 1)}\nb = new()\n")
    found = answered(model)
    assert isinstance(found, PredictedEdits)
    (edit,) = found.edits
    assert AFTER[: edit.start] + edit.text + AFTER[edit.end :] == AFTER.replace("b = old()", "b = new()")
    assert model.asked[1] == (*model.asked[0], ord(number))  # what was read for the choice is not read again


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Model("0"), NoEditReason.LEFT),
        (Model("1", sure=0.3), NoEditReason.LEFT),
        (Model("1", sure=0.55), NoEditReason.UNSURE),
        (Model("1", "nonsense"), NoEditReason.UNUSABLE),
    ],
)
def test_doubt_is_named_and_nothing_is_written_in_doubt_about_the_place(
    model: Model, reason: NoEditReason
) -> None:
    assert PLACE["calm"] > 0.55  # likelier than silence, and not likely enough
    assert answered(model, eagerness="calm") == reason
    assert len(model.asked) == (1 if reason in (NoEditReason.LEFT, NoEditReason.UNSURE) else 2)


def test_a_text_that_the_model_doubts_is_not_shown() -> None:
    number, letter = place_of("b = old()")
    assert (
        answered(Model(number, f"{letter}{chr(ord(letter) + 1)}\nb = new()\n", fluent=0.3))
        == NoEditReason.UNSURE
    )


def test_what_breaks_the_syntax_is_not_shown() -> None:
    number, letter = place_of("b = old()")
    assert answered(Model(number, f"{letter}{chr(ord(letter) + 1)}\nb = (((\n")) == NoEditReason.BREAKS
