"""Whatever sessions do to one another, in any order and with little memory: each goes on as if it were
alone, and every byte is accounted for."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keystroke.engine.base import Interrupt
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.onnx.convert import convert_model
from keystroke.engine.onnx.engine import PREFILL_CHUNK, OnnxEngine, OnnxGraph, OnnxOptions, OnnxSession
from keystroke.engine.onnx.kv import FIRST_CAPACITY, NARROW_ROOM
from keystroke.errors import Interrupted, NotEnoughMemory

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_models import saved

VOCAB, CONTEXT = 96, 1024
TEXTS = [[(7 * i * (seed + 1) + i // 5) % VOCAB for i in range(CONTEXT)] for seed in range(3)]


def made(folder: Path, blocks: int) -> OnnxEngine:
    """An engine whose budget is `blocks` sessions of the smallest size."""
    saved(folder, "llama", max_position_embeddings=CONTEXT)
    with open_checkpoint(folder) as checkpoint:
        model = convert_model(checkpoint, precision="fp32", cache=folder / "cache")
        engine = OnnxEngine(OnnxGraph(model, checkpoint.spec, "fp32"), OnnxOptions(threads=1))
    engine.pool.budget = engine.pool.bytes_for(FIRST_CAPACITY * blocks)
    engine.cache.budget = engine.pool.budget // 2
    return engine


def check_accounts(engine: OnnxEngine) -> None:
    """Owners are those who hold; bytes used are those of what is held."""
    held = [session.buffers for session in engine.live if session.buffers is not None]
    held += [entry.payload for entry in engine.cache._entries]
    owners = Counter(id(buffers) for buffers in held)
    assert {id(buffers): buffers.owners for buffers in held} == owners
    assert engine.pool.used == sum({id(buffers): buffers.nbytes for buffers in held}.values())
    assert engine.pool.used <= engine.pool.budget


class InterruptAfter(Interrupt):
    """Throws itself at the n-th look."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def check(self) -> None:
        self._looks -= 1
        if self._looks < 0:
            self.set()
        super().check()


class Sessions(RuleBasedStateMachine):
    engine: OnnxEngine
    alone: OnnxEngine
    answers: dict[tuple[int, ...], int] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[OnnxSession] = []

    def teardown(self) -> None:
        for session in self.sessions:
            session.close()
        check_accounts(self.engine)
        self.engine.cache.clear()
        assert self.engine.pool.used == 0
        assert not self.engine.live

    def chosen(self, pick: int) -> OnnxSession:
        return self.sessions[pick % len(self.sessions)]

    def expected(self, tokens: tuple[int, ...]) -> int:
        """The next token after `tokens`, from a session that never saw anything else."""
        if tokens not in self.answers:
            self.alone.cache.clear()
            with self.alone.session() as session:
                session.extend(tokens)
                self.answers[tokens] = session.step().tokens[0]
        return self.answers[tokens]

    @precondition(lambda self: len(self.sessions) < 5)
    @rule()
    def open(self) -> None:
        self.sessions.append(self.engine.session())

    @precondition(lambda self: self.sessions)
    @rule(
        pick=st.integers(0, 4),
        text=st.integers(0, 2),
        length=st.sampled_from([0, 1, 15, 40, 150, 255, 300, 500, 700]),
        own=st.sampled_from([0, 0, 20, 130]),
        looks=st.sampled_from([None, None, None, 0, 1, 2]),
    )
    def extend(self, pick: int, text: int, length: int, own: int, looks: int | None) -> None:
        session = self.chosen(pick)
        wanted = [*session.tokens[:own], *TEXTS[text][own:length]]
        try:
            session.extend(wanted, None if looks is None else InterruptAfter(looks))
        except (NotEnoughMemory, Interrupted):
            assert list(session.tokens) == wanted[: session.length]
            assert session.length == min(session._resident + 1, len(wanted))
        else:
            assert list(session.tokens) == wanted

    @precondition(lambda self: any(session.length for session in self.sessions))
    @rule(pick=st.integers(0, 4), text=st.integers(0, 2), draft=st.sampled_from([0, 0, 1, 3, 40]))
    def step(self, pick: int, text: int, draft: int) -> None:
        session = self.chosen(pick)
        if not session.length:
            return
        before = tuple(session.tokens)
        right = self.expected(before)
        try:
            step = session.step(([right] if draft % 2 else []) + TEXTS[text][:draft])
        except NotEnoughMemory:
            assert tuple(session.tokens) == before
        else:
            assert step.tokens[0] == right
            assert tuple(session.tokens) == before + step.tokens

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 4), part=st.floats(0, 1))
    def rollback(self, pick: int, part: float) -> None:
        session = self.chosen(pick)
        kept = list(session.tokens[: int(session.length * part)])
        session.rollback(len(kept))
        assert list(session.tokens) == kept

    @precondition(lambda self: 0 < len(self.sessions) < 5)
    @rule(pick=st.integers(0, 4))
    def fork(self, pick: int) -> None:
        session = self.chosen(pick)
        self.sessions.append(session.fork())
        assert self.sessions[-1].tokens == session.tokens

    @precondition(lambda self: self.sessions)
    @rule(pick=st.integers(0, 4))
    def close(self, pick: int) -> None:
        self.sessions.pop(pick % len(self.sessions)).close()

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        check_accounts(self.engine)
        for session in self.sessions:
            assert session._held[: session._resident] == list(session.tokens[: session._resident])
            assert session._resident < max(session.length, 1)
            assert len(session._held) <= (session.buffers.capacity if session.buffers else 0)


def test_sessions_in_any_order_and_little_memory_never_disturb_one_another(tmp_path: Path) -> None:
    with made(tmp_path, 7) as engine, made(tmp_path, 64) as alone:
        Sessions.engine, Sessions.alone = engine, alone
        run_state_machine_as_test(
            Sessions,
            settings=settings(
                max_examples=60,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                derandomize=True,
            ),
        )


def test_one_session_may_use_nearly_the_whole_budget(tmp_path: Path) -> None:
    with made(tmp_path, 4) as engine, engine.session() as session:
        for length in (100, 300, 500, 700, 4 * FIRST_CAPACITY - NARROW_ROOM - 8):
            session.extend(TEXTS[0][:length])
            session.step()
            check_accounts(engine)


def test_what_is_kept_for_reuse_gives_way_to_a_session_that_grows(tmp_path: Path) -> None:
    with made(tmp_path, 4) as engine, engine.session() as growing:
        for text in (0, 1):
            with engine.session() as session:
                session.extend(TEXTS[text][:200])
                session.step()
        assert engine.stats().cached_tokens == 400
        growing.extend(TEXTS[2][:700])
        growing.step()
        assert engine.stats().cached_tokens == 200
        check_accounts(engine)


def test_lending_a_prefix_costs_the_lender_nothing(tmp_path: Path) -> None:
    with made(tmp_path, 2) as engine, engine.session() as lender, engine.session() as borrower:
        lender.extend(TEXTS[0][:200])
        lender.step()
        borrower.extend(TEXTS[0][:150])
        memory = lender.buffers
        lender.step()
        assert lender.buffers is memory


def test_an_answer_too_long_to_keep_does_not_displace_what_is_kept(tmp_path: Path) -> None:
    with made(tmp_path, 5) as engine:
        with engine.session() as short:
            short.extend(TEXTS[0][:100])
            short.step()
        kept = engine.stats().cached_tokens
        assert kept
        with engine.session() as long:
            long.extend(TEXTS[1][: 4 * PREFILL_CHUNK + 200])
            long.step()
        assert engine.stats().cached_tokens == kept


@pytest.mark.parametrize("rows", [1, 3, 64, 65, 70])
def test_the_logits_of_many_rows_agree_with_single_rows(tmp_path: Path, rows: int) -> None:
    with made(tmp_path, 8) as engine, engine.session() as session:
        tokens = TEXTS[0][:100]
        many = session._forward(tokens, 0, rows, None).copy()
        for row in range(rows):
            one = session._forward(tokens[: 100 - rows + row + 1], 0, 1, None)
            assert (one.argmax() == many[row].argmax()).all()
