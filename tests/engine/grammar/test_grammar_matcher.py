"""A matcher is a function of the tokens consumed: drafts, rollbacks and forks leave no trace."""

from __future__ import annotations

import random

import numpy as np
from grammar_languages import Language, languages
from grammar_models import bpe_tokenizer, matcher
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.engine.grammar.constraint import lark, regex
from keystroke.engine.grammar.matcher import Matcher


def allowed(held: Matcher) -> list[int]:
    """The tokens that may come next."""
    held.filter_draft((), 0)
    mask = held.row(0)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(t) for t in np.flatnonzero(bits)]


def standing(held: Matcher) -> tuple[list[int], tuple[int, ...], bool, bool]:
    return allowed(held), held.forced_tokens(), held.is_accepting, held.is_finished


def walk(held: Matcher, dice: random.Random, steps: int) -> list[int]:
    """Consume up to `steps` tokens at random out of those allowed, never the end."""
    taken: list[int] = []
    end = bpe_tokenizer().special("<end>")
    while len(taken) < steps and not held.is_finished:
        options = [t for t in allowed(held) if t != end]
        if not options:
            break
        token = dice.choice(options)
        assert held.advance([token]) == 1
        taken.append(token)
    return taken


@settings(max_examples=80)
@given(languages, st.integers(0, 10**6), st.integers(0, 25), st.integers(0, 25))
def test_a_rolled_back_matcher_stands_where_a_fresh_one_comes_to(
    language: Language, seed: int, kept: int, more: int
) -> None:
    held, fresh = matcher(language.constraint), matcher(language.constraint)
    dice = random.Random(seed)
    first = walk(held, dice, kept)
    gone = walk(held, dice, more)
    held.rollback(len(gone))
    fresh.advance(first)
    assert standing(held) == standing(fresh)
    again = walk(held, random.Random(seed + 1), 10)
    assert again == walk(fresh, random.Random(seed + 1), 10)


@settings(max_examples=60)
@given(languages, st.integers(0, 10**6), st.integers(0, 20))
def test_a_fork_goes_its_own_way(language: Language, seed: int, steps: int) -> None:
    held = matcher(language.constraint)
    taken = walk(held, random.Random(seed), steps)
    before = standing(held)
    other = held.fork()
    assert standing(other) == before
    walk(other, random.Random(seed), 10)
    assert standing(held) == before
    other.rollback(0)
    back = held.fork()
    back.rollback(len(taken))
    assert standing(back) == standing(matcher(language.constraint))


@settings(max_examples=80)
@given(languages, st.integers(0, 10**6), st.integers(0, 15), st.integers(0, 12))
def test_rows_of_a_draft_are_those_of_going_there(
    language: Language, seed: int, steps: int, size: int
) -> None:
    held, fresh = matcher(language.constraint), matcher(language.constraint)
    dice = random.Random(seed)
    fresh.advance(walk(held, dice, steps))
    ahead = walk(held.fork(), dice, size)
    draft, own = held.filter_draft([*ahead, 1, 2, 3], 32)
    assert draft[: len(ahead)] == ahead
    assert own >= len(ahead)
    order = [*range(len(draft) + 1), *(dice.randrange(len(draft) + 1) for _ in range(4))]
    rows = {index: held.row(index).copy() for index in order}
    for index in range(len(draft) + 1):
        assert np.array_equal(rows[index], _row(fresh))
        if index < len(draft):
            fresh.advance(draft[index : index + 1])


def _row(held: Matcher) -> np.ndarray:
    held.filter_draft((), 0)
    return held.row(0).copy()


def test_a_draft_is_cut_where_the_grammar_refuses_it_and_mended_where_it_forces() -> None:
    encode = bpe_tokenizer().encode
    held = matcher(regex("[ab]{3} value"))
    assert held.filter_draft(encode("ab"), 32)[0][:1] == encode("ab")[:1]
    draft, own = held.filter_draft([*encode("c"), *encode("a")], 32)
    assert (draft, own) == ([], 0)
    constant = matcher(lark('start: "name(value)"'))
    draft, own = constant.filter_draft(encode("xyz"), 32)
    assert (draft, own) == (encode("name(value)"), 0)
    assert constant.filter_draft(encode("xyz"), 2) == (encode("name(value)")[:2], 0)


def test_a_run_of_forced_tokens_is_the_same_however_steps_cut_it() -> None:
    whole = matcher(lark('start: "name(value): return value" /[ab]/'))
    run = whole.forced_tokens()
    assert len(run) > 3
    for cut in range(1, len(run)):
        held = matcher(lark('start: "name(value): return value" /[ab]/'))
        for at in range(0, len(run), cut):
            held.advance(run[at : at + cut])
        assert held.forced_tokens() == ()
        assert allowed(held) == allowed(_after(whole, run))


def _after(held: Matcher, tokens: tuple[int, ...]) -> Matcher:
    other = held.fork()
    other.advance(tokens)
    return other


def test_the_end_is_allowed_only_where_the_text_is_whole() -> None:
    end = bpe_tokenizer().special("<end>")
    held = matcher(regex("a(b)?"))
    assert end not in allowed(held)
    held.advance(bpe_tokenizer().encode("a"))
    assert end in allowed(held)
    held.advance(bpe_tokenizer().encode("b"))
    assert allowed(held) == [end]
    assert held.is_finished


def test_control_tokens_are_refused_unless_the_grammar_names_them() -> None:
    call = bpe_tokenizer().special("<call>")
    assert call not in allowed(matcher(regex("(?s:.)*")))
    assert matcher(lark('start: <call> "a"')).forced_tokens()[0] == call


def test_a_grammar_that_gives_up_leaves_only_the_end() -> None:
    held = matcher(lark('start: "a" start'))
    assert held.forced_tokens()[:1] or held.has_failed
    while not held.has_failed:
        held.advance(held.forced_tokens()[:500])
    assert held.failure
    assert allowed(held) == [bpe_tokenizer().special("<end>")]
    held.rollback(1)
