"""An answer held to begin with given text says it in whatever tokens it likes, and then goes on freely."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.engine.base import Mixture, Sampling, TokenLogprob
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.speculative import FileDrafter
from keystroke.engine.token_healing import TokenHealing, TokenIndex, renormalise
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer


class Pieces(ByteTokenizer):
    """Bytes, and a few longer tokens after the special ones."""

    WORDS = (b" return", b" ret", b"urn", b" result", b".height")

    def __init__(self) -> None:
        super().__init__(SPECIAL, eos=EOS, vocab_size=300 + len(self.WORDS))

    def token_bytes(self, token: int) -> bytes:
        return self.WORDS[token - 300] if token >= 300 else super().token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token < 300 and super().is_special(token)


def test_tokens_agree_from_either_side() -> None:
    found = TokenIndex(Pieces()).compatible(b" retu").tolist()
    assert {Pieces.WORDS[token - 300] for token in found if token >= 300} == {b" return", b" ret"}
    assert found == sorted(found)
    assert ord(" ") in TokenIndex(Pieces()).compatible(b" retu")
    assert not [t for t in TokenIndex(Pieces()).compatible(b" x") if t >= 300]


@given(st.text(min_size=1, max_size=12))
def test_whatever_the_beginning_the_answer_begins_with_it_and_goes_on(begin: str) -> None:
    model = Model("echo", EchoEngine(lambda _: "something else entirely"), ByteTokenizer(SPECIAL, eos=EOS))
    with model.engine.session() as session:
        params = GenerationParams(max_tokens=60, begin=begin)
        drafter = FileDrafter(model.tokenizer.encode("another text"))
        generation = Generation(model, session, [65], params, drafter=drafter)
        list(generation)
    assert generation.text.startswith(begin)
    rest = generation.text[len(begin) :]
    assert "something else entirely"[len(begin.encode()) :] == rest


def test_without_a_beginning_nothing_changes() -> None:
    model = Model("echo", EchoEngine(lambda _: "free"), ByteTokenizer(SPECIAL, eos=EOS))
    with model.engine.session() as session:
        generation = Generation(model, session, [65], GenerationParams(sampling=Sampling(logprobs=2)))
        chunks = list(generation)
    assert generation.text == "free"
    assert all(len(p.top) == 2 for chunk in chunks for p in chunk.logprobs)


def test_chances_are_told_among_what_was_possible() -> None:
    healing = TokenHealing(" ret", Pieces())
    first, then = healing.restrict([], None), healing.restrict([300], None)
    third = math.log(0.3)
    told = TokenLogprob(300, math.log(0.1), ((7, third), (301, third), (300, math.log(0.1))))
    among = renormalise(told, first, 1)
    assert among.logprob == pytest.approx(math.log(0.1 / 0.4))
    assert among.top == ((7, third),)
    assert renormalise(told, then, 1) == TokenLogprob(300, math.log(0.1), ((7, third),))


def test_each_position_of_a_draft_is_held_to_what_is_left_there() -> None:
    index, healing = TokenIndex(Pieces()), TokenHealing(" return", Pieces())
    draft, mixture = (301, 302, 65), Mixture(0.5, {301: 1.0})
    rows = [healing.restrict(draft[:row], None if row else mixture) for row in range(4)]
    held = [None if row is None or row.only is None else row.only.tolist() for row in rows]
    assert held == [index.compatible(b" return").tolist(), index.compatible(b"urn").tolist(), None, None]
    assert rows[0] is not None
    assert rows[0].weight == 0.5
    assert [healing.remaining(draft) for draft in ((), (301,), (300,), (65,))] == [" return", "urn", "", ""]


def test_text_that_no_token_can_say_is_given_up() -> None:
    class Silent(Pieces):
        def token_bytes(self, token: int) -> bytes:
            return b"" if token < 256 else super().token_bytes(token)

    beginning = TokenHealing("xyz", Silent())
    assert not beginning.begin_step()
    assert beginning.remaining() == ""
