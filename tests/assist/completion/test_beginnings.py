"""What is shown of a suggestion nobody is sure of: its confident beginning, or the first lines of a body."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keystroke.assist.completion import (
    Extent,
    LiveCompletion,
    ShownCompletion,
    WithheldCompletion,
    WithheldReason,
    complete,
)
from keystroke.assist.completion.beginning import confident_beginning, confident_lines
from keystroke.assist.completion.cache import CachedSuggestion
from keystroke.assist.completion.extent import body_floor, extent_at
from keystroke.assist.completion.gate import DismissedSuggestions
from keystroke.assist.completion.stream import SuggestionStream
from keystroke.config import AssistSettings
from keystroke.engine.base import TokenLogprob
from keystroke.engine.card import card_languages
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.generation import Chunk, Finish
from keystroke.engine.model import Model
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.errors import ModelDamaged


def kept(*tokens: tuple[str, float], extent: Extent = Extent.REST) -> CachedSuggestion:
    """A suggestion made of tokens and their chances."""
    text, ends = "", []
    for piece, _ in tokens:
        text += piece
        ends.append(len(text))
    return CachedSuggestion(text, extent, tuple(ends), tuple(math.log(chance) for _, chance in tokens))


def judged(
    suggestion: CachedSuggestion, text: str, eagerness: str = "balanced"
) -> ShownCompletion | WithheldCompletion | None:
    completion = LiveCompletion(None, AssistSettings(eagerness=eagerness), language="python")
    completion.cache.put(text, "", suggestion)
    return completion.answer(text, len(text))


def test_a_line_is_cut_to_its_confident_beginning_instead_of_being_hidden() -> None:
    offer = judged(kept(("eight", 0.99), (" *", 0.3), (" depth", 0.2)), "return self.h")
    assert isinstance(offer, ShownCompletion)
    assert offer.text == "eight"


def test_a_sure_line_is_shown_whole() -> None:
    offer = judged(kept(("eight", 0.99), (" *", 0.95), (" width", 0.96)), "return self.h")
    assert isinstance(offer, ShownCompletion)
    assert offer.text == "eight * width"


def test_a_long_line_of_fair_tokens_is_no_longer_taken_for_sure() -> None:
    fair = [(f" + word{n}", 0.85) for n in range(20)]  # 0.85 in the mean, 0.04 that all are right
    offer = judged(kept(*fair), "return self.h")
    assert isinstance(offer, ShownCompletion)
    assert offer.text == " + word0 + word1 + word2 + word3"


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        ([("he", 0.95), ("ight", 0.2)], ""),  # no word is torn
        ([("print", 0.95), ("(", 0.95), ("value", 0.95), (")", 0.1)], "print"),  # no bracket is left open
        ([("name", 0.95), (" = ", 0.95), ('"', 0.95), ("some text", 0.95), ('"', 0.1)], "name"),
        ([("first", 0.95), (".", 0.99), ("other", 0.1)], "first"),
        ([("ab", 0.99), (" x", 0.1)], ""),  # two letters save nothing
        ([("nothing", 0.2)], ""),
    ],
)
def test_a_beginning_ends_where_a_reader_would_end_it(tokens: list[tuple[str, float]], shown: str) -> None:
    assert confident_beginning(kept(*tokens), 0, "balanced")[0] == shown


PIECES = st.sampled_from(["a", "be", "(", ")", '"', " ", "_x", ".", "\n"])


@given(st.lists(st.tuples(PIECES, st.floats(0.05, 1.0)), min_size=1), st.integers(0, 5))
def test_a_beginning_is_always_the_start_of_what_is_left(
    tokens: Sequence[tuple[str, float]], typed: int
) -> None:
    suggestion = kept(*tokens)
    typed = min(typed, len(suggestion.text))
    for eagerness in ("calm", "balanced", "eager"):
        text, chance = confident_beginning(suggestion, typed, eagerness)
        assert suggestion.text[typed:].startswith(text)
        assert 0.0 <= chance <= 1.0 + 1e-9
        assert "\n" not in text


def test_a_beginning_on_the_screen_stays_while_it_is_typed() -> None:
    text = "return self.h"
    suggestion = kept(("eight", 0.9), (".", 0.9), ("value", 0.7), (" *", 0.3), (" depth", 0.2))
    completion = LiveCompletion(None, AssistSettings(), language="python")
    completion.cache.put(text, "", suggestion)
    first = completion.answer(text, len(text))
    assert isinstance(first, ShownCompletion)
    assert first.text == "eight.value"
    for moment in range(8):  # a burst of keys
        completion.apply_edits((), moment * 0.03)
    for typed in range(1, len(first.text)):
        now = text + first.text[:typed]
        offer = completion.answer(now, len(now))
        assert isinstance(offer, ShownCompletion)
        assert offer.text == first.text[typed:]


# ── before a line is said to its end ──────────────────────────────────────────────────────────


def chunks(tokens: Sequence[tuple[str, float]]) -> list[Chunk]:
    """Steps of one token each, and the end."""
    said = [
        Chunk(piece, (0,), (TokenLogprob(0, math.log(chance)),), ends=(len(piece),))
        for piece, chance in tokens
    ]
    return [*said, Chunk("", (1,), (TokenLogprob(1, -0.1),), Finish.STOP, ends=(0,))]


def begun(before: str, after: str = "", **settings: Any) -> tuple[LiveCompletion, SuggestionStream]:
    completion = LiveCompletion(None, AssistSettings(**settings), language="python")
    return completion, completion.begin(before + after, len(before), Extent.REST)


def first_answer(
    completion: LiveCompletion, stream: SuggestionStream, steps: Sequence[Chunk], text: str, cursor: int
) -> tuple[int, ShownCompletion | WithheldCompletion]:
    """What is answered as soon as that is decided, and after how many steps."""
    for number, chunk in enumerate(steps, 1):
        stream.feed(chunk)
        answer = completion.answer(text, cursor, stream)
        if answer is not None:
            return number, answer
    raise AssertionError("an answer that has ended is answered")


LINE = [("eight", 0.99), (".", 0.95), ("value", 0.9), (" *", 0.2), (" depth", 0.4), (" +", 0.5), (" 1", 0.5)]


def test_a_beginning_is_shown_once_the_rest_cannot_change_it() -> None:
    text = "return self.h"
    completion, stream = begun(text)
    steps = chunks(LINE)
    after, offer = first_answer(completion, stream, steps, text, len(text))
    assert isinstance(offer, ShownCompletion)
    assert (offer.text, offer.partial, after) == ("eight.value", True, 4)
    assert not stream.done
    # Typing goes on from what is on the screen, also before the line is said to its end and afterwards.
    for typed in (1, 4):
        now = text + offer.text[:typed]
        answer = completion.answer(now, len(now), stream)
        assert isinstance(answer, ShownCompletion)
        assert (answer.text, answer.typed) == (offer.text[typed:], typed)
    for chunk in steps[after:]:
        stream.feed(chunk)
    completion.store(stream)
    now = text + "eigh"
    later = completion.answer(now, len(now))
    assert isinstance(later, ShownCompletion)
    assert later.text == "t.value"


@pytest.mark.parametrize("end", [" depth", " )"])  # the second would break the syntax
def test_a_beginning_shown_early_stays_while_it_is_typed_whatever_the_rest_becomes(end: str) -> None:
    text = "return self.h"
    # Once its first token is typed, all that is left is likely enough to be shown whole.
    steps = chunks([("ei", 0.55), ("ght", 0.99), (" *", 0.7), (end, 0.99), (" + 1", 0.99)])
    completion, stream = begun(text)
    after, offer = first_answer(completion, stream, steps, text, len(text))
    assert isinstance(offer, ShownCompletion)
    assert (offer.text, after) == ("eight", 3)

    def shown(typed: int) -> str | None:
        now = text + "eight"[:typed]
        answer = completion.answer(now, len(now), stream)
        return answer.text if isinstance(answer, ShownCompletion) else None

    assert [shown(typed) for typed in (1, 2, 3, 4)] == ["ight", "ght", "ht", "t"]
    completion.dismiss(text, "eight")
    assert [shown(typed) for typed in (1, 2)] == [None, None]
    completion.dismissed = DismissedSuggestions()
    for chunk in steps[after:]:
        stream.feed(chunk)
    for typed in (1, 2, 3, 4):
        left = shown(typed)
        assert left is not None
        assert left.startswith("eight"[typed:])


def test_who_asks_for_it_gets_the_whole_line() -> None:
    text = "return self.h"
    completion, stream = begun(text)
    for chunk in chunks(LINE)[:-1]:
        stream.feed(chunk)
        assert completion.answer(text, len(text), stream, invoked=True) is None


def test_what_a_larger_model_put_in_its_place_meanwhile_stays() -> None:
    text = "return self.h"
    completion, stream = begun(text)
    steps = chunks(LINE)
    after, _ = first_answer(completion, stream, steps, text, len(text))
    completion.cache.put(stream.before, stream.below, kept(("eight.better", 0.99)))
    for chunk in steps[after:]:
        stream.feed(chunk)
    completion.store(stream)
    found = completion.cache.find(text, len(text))
    assert found is not None
    assert found[0].text == "eight.better"


WORDS = st.sampled_from(["name", "va", "lue", "(", ")", '"', " ", ".", " = ", "self", ", ", "]"])
CHANCES = st.sampled_from([0.99, 0.95, 0.9, 0.7, 0.4, 0.1])


@given(
    st.lists(st.tuples(WORDS, CHANCES), min_size=1, max_size=12),
    st.sampled_from(["", ")", "\n    return name.value\n", '", 2)\n', "\nname(value)\n"]),
    st.sampled_from(["", "name", "name.value", "name(value)", "self.name = name"]),
    st.sampled_from(["calm", "balanced", "eager"]),
    st.booleans(),
)
@example([("name", 0.99), (".", 0.99), ("value", 0.1)], "\n    return name.value\n", "", "balanced", False)
@example([("name", 0.99), ("(", 0.99), ("value", 0.1), (")", 0.9)], "", "name(value)", "balanced", False)
@example([("name", 0.99), ("(", 0.99), ("value", 0.1), (")", 0.9)], ")", "", "balanced", False)
def test_what_is_shown_early_is_what_would_be_shown_in_the_end(
    tokens: list[tuple[str, float]], after: str, dismissed: str, eagerness: str, fast: bool
) -> None:
    text = f"    return {after}"
    cursor = len("    return ")
    answers = []
    for patient in (False, True):
        completion, stream = begun(text[:cursor], after, eagerness=eagerness)
        completion.dismiss(text[:cursor], dismissed)
        for moment in range(8 if fast else 0):
            completion.apply_edits((), moment * 0.03)
        steps = chunks(tokens)
        if patient:
            for chunk in steps[:-1]:
                stream.feed(chunk)
            steps = [] if stream.done else steps[-1:]
        answers.append(
            first_answer(completion, stream, steps, text, cursor)[1]
            if steps
            else completion.answer(text, cursor, stream)
        )
    assert answers[0] == answers[1]


def test_of_a_doubtful_body_the_sure_lines_are_shown() -> None:
    body = kept(
        ("x = 1\n", 0.99), ("    y = 2\n", 0.98), ("    z = other(", 0.1), ("9)", 0.2), extent=Extent.BLOCK
    )
    assert confident_lines(body, 0, 0.85)[0] == "x = 1\n    y = 2"
    assert confident_lines(body, 0, 0.999)[0] == ""
    offer = judged(body, "def f():\n    ")
    assert isinstance(offer, ShownCompletion)
    assert offer.text == "x = 1\n    y = 2"


# ── whole bodies ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("before", "after", "language", "floor"),
    [
        ("def f():", "", "python", 0),
        ("def f():\n    ", "", "python", 0),
        ("def f():\n    ret", "\n\nx = 1\n", "python", 0),
        ('class A:\n    def f(self):\n        """Say."""\n        ', "", "python", 4),
        ('def f():\n    """Say\n    more.\n    """\n    ', "", "python", 0),
        ("def f():\n    x = 1\n    ", "", "python", None),
        ("def f():\n    ", "\n    return 2\n", "python", None),
        ("x = 1\n", "", "python", None),
        ("function f() {\n  ", "\n}\n", "javascript", 0),
    ],
)
def test_an_empty_body_is_seen_from_its_first_line(
    before: str, after: str, language: str, floor: int | None
) -> None:
    text = before + after
    assert body_floor(text, len(before), language) == floor
    assert (extent_at(text, len(before), language) is Extent.BLOCK) == (floor is not None)


def model(says: str, languages: frozenset[str] | None = None) -> Model:
    engine = EchoEngine(lambda prompt: says)
    return Model("echo", engine, ByteTokenizer(SPECIAL, eos=EOS), languages=languages)


def test_an_empty_body_gets_the_whole_body_and_nothing_after_it() -> None:
    body = "a = 1\n\n    if a:\n        a = 2\n    return a"
    chosen = model(f"{body}\n\n\ndef other():\n    pass\n")
    completion = LiveCompletion(chosen, AssistSettings(), language="python")
    text = "def f():\n    "
    stream = completion.begin(text, len(text))
    with chosen.engine.session() as session:
        from keystroke.engine.generation import Generation

        for chunk in Generation(chosen, session, stream.prompt.tokens, stream.params()):
            stream.feed(chunk)
            if stream.done:
                break
    offer = completion.answer(text, len(text), stream)
    assert isinstance(offer, ShownCompletion)  # on an indented line of its own: Tab need not indent there
    assert offer.text == body


# ── loops and languages ───────────────────────────────────────────────────────────────────────


def test_a_completion_that_goes_in_circles_is_cut_to_its_first_round() -> None:
    chosen = model("first line\n" + "    again and again\n" * 200)
    with chosen.engine.session() as session:
        done = complete(chosen, session, "x = ", max_tokens=4000, lines=100)
    assert done.text.startswith("first line\n    again and again")
    assert done.text.count("again and again") <= 2
    assert done.stats is not None
    assert done.stats.tokens < 1000


def test_a_language_outside_the_training_is_said_and_not_babbled_in() -> None:
    chosen = model("x", frozenset({"python"}))
    go = LiveCompletion(chosen, AssistSettings(), path="a.go", language="go")
    assert go.answer("package main\n\nfunc ", 18) == WithheldCompletion(WithheldReason.UNTRAINED_LANGUAGE)
    assert LiveCompletion(chosen, AssistSettings(), language="python").answer("x = ", 4) is None
    assert LiveCompletion(chosen, AssistSettings(), path="notes", language=None).answer("x = ", 4) is None
    assert LiveCompletion(model("x"), AssistSettings(), language="go").answer("x = ", 4) is None


def test_a_language_it_follows_is_completed_calmly_while_the_project_is_at_hand() -> None:
    chosen = replace(model("x", frozenset({"python"})), conservative_languages=frozenset({"go"}))
    go = LiveCompletion(chosen, AssistSettings(eagerness="eager"), path="a.go", language="go")
    assert go.answer("package main\n\nfunc ", 18) is None
    assert go.eagerness == "calm"
    assert LiveCompletion(chosen, AssistSettings(eagerness="eager"), language="python").eagerness == "eager"
    alone = LiveCompletion(chosen, AssistSettings(project_text=False), path="a.go", language="go")
    assert alone.answer("package main\n\nfunc ", 18) == WithheldCompletion(WithheldReason.UNTRAINED_LANGUAGE)
    rust = LiveCompletion(chosen, AssistSettings(), path="a.rs", language="rust")
    assert rust.answer("fn ", 3) == WithheldCompletion(WithheldReason.UNTRAINED_LANGUAGE)


def test_a_learned_language_that_it_follows_is_completed_calmly_with_and_without_a_project() -> None:
    chosen = replace(model("x", frozenset({"python", "c"})), conservative_languages=frozenset({"c"}))
    for settings in (
        AssistSettings(eagerness="eager"),
        AssistSettings(eagerness="eager", project_text=False),
    ):
        c = LiveCompletion(chosen, settings, path="a.c", language="c")
        assert c.answer("int main(", 9) is None
        assert c.eagerness == "calm"


def test_a_card_names_languages_or_is_refused(tmp_path: Path) -> None:
    assert card_languages(tmp_path) is None
    (tmp_path / "keystroke.json").write_text('{"languages": ["Python", "go"]}')
    assert card_languages(tmp_path) == frozenset({"python", "go"})
    (tmp_path / "keystroke.json").write_text('{"languages": ["typescript"]}')
    assert card_languages(tmp_path) == frozenset({"typescript", "tsx"})  # so .tsx and .jsx are completed
    (tmp_path / "keystroke.json").write_text('{"languages": "python"}')
    with pytest.raises(ModelDamaged, match="must be a list"):
        card_languages(tmp_path)
