"""The contract of `engine.base`, held by the engine that everything else is tested with."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.engine.base import GREEDY, ExtendResult, Interrupt, Sampling
from keystroke.engine.echo import END_OF_TURN, EchoEngine
from keystroke.errors import ContextOverflow, Interrupted, SessionClosed, UsageError

PROMPT = list(b"def add(a, b):\n    return")


def plain(prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    with EchoEngine() as engine, engine.session() as session:
        session.extend(prompt)
        return [session.step((), sampling).tokens[0] for _ in range(count)]


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 255), max_size=6), max_size=8),
    st.sampled_from([GREEDY, Sampling(temperature=1.0, seed=7)]),
)
def test_drafts_never_change_the_text(prompt: list[int], drafts: list[list[int]], sampling: Sampling) -> None:
    with EchoEngine() as engine, engine.session() as session:
        session.extend(prompt)
        got: list[int] = []
        for draft in drafts:
            step = session.step(draft, sampling)
            assert len(step.tokens) == step.accepted + 1
            got += step.tokens
        assert got == plain(prompt, len(got), sampling)


def test_a_right_draft_is_accepted_whole() -> None:
    expected = plain(PROMPT, 6)
    with EchoEngine() as engine, engine.session() as session:
        session.extend(PROMPT)
        assert session.step(expected[:5]).tokens == tuple(expected)
        assert engine.steps == 1


def test_extending_keeps_the_common_prefix() -> None:
    with EchoEngine() as engine, engine.session() as session:
        assert session.extend(PROMPT * 4) == ExtendResult(reused=0, computed=len(PROMPT) * 4)
        session.step()
        again = session.extend([*PROMPT * 4, 65])
        assert again.reused == len(PROMPT) * 4


def test_content_outlives_the_session_that_made_it() -> None:
    with EchoEngine() as engine:
        with engine.session() as first:
            first.extend(PROMPT * 4)
            first.step()
        with engine.session() as second:
            assert second.extend(PROMPT * 4).reused == len(PROMPT) * 4 - 1


def test_rollback_and_going_on_gives_the_same_text() -> None:
    with EchoEngine() as engine, engine.session() as session:
        session.extend(PROMPT)
        first = [session.step().tokens[0] for _ in range(8)]
        session.rollback(len(PROMPT))
        assert [session.step().tokens[0] for _ in range(8)] == first


def test_a_fork_goes_its_own_way() -> None:
    with EchoEngine() as engine, engine.session() as session:
        session.extend(PROMPT)
        with session.fork() as branch:
            branch.extend([*PROMPT, 33])
            branch.step()
        assert list(session.tokens) == PROMPT
        assert session.step().tokens[0] == plain(PROMPT, 1)[0]


def test_the_script_answers_and_ends() -> None:
    with EchoEngine(lambda prompt: prompt.upper()) as engine, engine.session() as session:
        session.extend(list(b"abc"))
        assert [session.step().tokens[0] for _ in range(4)] == [*b"ABC", END_OF_TURN]


def test_an_interrupt_ends_a_prefill_and_the_session_goes_on_from_there() -> None:
    with EchoEngine(prefill_cost=0.002, chunk=8) as engine, engine.session() as session:
        interrupt = Interrupt()
        threading.Timer(0.05, interrupt.set).start()
        with pytest.raises(Interrupted):
            session.extend(PROMPT * 40, interrupt)
        done = session.length
        assert 0 < done < len(PROMPT) * 40
        engine.prefill_cost = 0.0
        assert session.extend(PROMPT * 40).reused == done - 1


def test_an_interrupt_ends_a_step_and_changes_nothing() -> None:
    with EchoEngine(step_cost=30.0) as engine, engine.session() as session:
        session.extend(PROMPT)
        interrupt = Interrupt()
        threading.Timer(0.02, interrupt.set).start()
        began = time.monotonic()
        with pytest.raises(Interrupted):
            session.step(interrupt=interrupt)
        assert time.monotonic() - began < 15  # the step itself would take thirty seconds
        assert list(session.tokens) == PROMPT


def test_too_long_a_prompt_is_refused_and_nothing_is_lost() -> None:
    with EchoEngine(context_length=30) as engine, engine.session() as session:
        session.extend(PROMPT)
        with pytest.raises(ContextOverflow, match="31 tokens"):
            session.extend([1] * 31)
        assert list(session.tokens) == PROMPT


def test_the_context_can_be_filled_to_its_last_token_and_no_further() -> None:
    with EchoEngine(context_length=10) as engine, engine.session() as session:
        session.extend([1] * 8)
        session.step([2] * 9)
        assert session.length <= 10
        while session.length < 10:
            session.step()
        with pytest.raises(ContextOverflow):
            session.step()


def test_misuse_is_said_in_a_sentence() -> None:
    engine = EchoEngine()
    session = engine.session()
    with pytest.raises(UsageError, match="at least one token"):
        session.step()
    session.extend(PROMPT)
    with pytest.raises(UsageError, match="cannot roll back"):
        session.rollback(len(PROMPT) + 1)
    session.close()
    session.close()
    with pytest.raises(SessionClosed):
        session.extend(PROMPT)
    assert engine.stats().sessions == 0


def test_a_callback_on_a_thrown_switch_is_called_at_once_and_only_once() -> None:
    interrupt, calls = Interrupt(), []
    interrupt.add_callback(lambda: calls.append("early"))
    interrupt.set()
    interrupt.set()
    interrupt.add_callback(lambda: calls.append("late"))
    assert calls == ["early", "late"]
