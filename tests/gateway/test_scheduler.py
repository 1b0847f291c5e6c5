"""Who steps next: priorities, tiers, rotation, preemption, cancelling, batching."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway_support import scripted_model

from keystroke.engine.base import Step, StepRequest
from keystroke.engine.echo import EchoEngine, EchoSession
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.model import Model
from keystroke.errors import ContextOverflow, EngineError, Interrupted, QueueFull, Unavailable
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.scheduler import Job, Scheduler
from keystroke.gateway.work.ticket import (
    Superseded,
    Ticket,
    TicketEnded,
    TicketMoved,
    TicketStarted,
    TicketSteered,
)


@asynccontextmanager
async def scheduling(model: Model, **options: Any) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(model, **options)
    scheduler.start()
    try:
        yield scheduler
    finally:
        await scheduler.stop()
        assert not isinstance(model.engine, EchoEngine) or not model.engine.live, "a session leaked"


def job(text: str = "x", tokens: int = 10, **more: Any) -> Job:
    return Job(list(text.encode()), GenerationParams(tokens), **more)


async def everything(ticket: Ticket) -> list[Any]:
    return [item async for item in ticket]


def text_of(items: list[Any]) -> str:
    return "".join(i.text for i in items if isinstance(i, Chunk))


async def first_chunk(ticket: Ticket) -> None:
    """Wait until the ticket has begun to speak, without ending it."""
    for _ in range(2000):
        if ticket.timing.first:
            return
        await asyncio.sleep(0.002)
    raise AssertionError("the ticket never spoke")


async def test_a_ticket_gives_its_chunks_and_one_end() -> None:
    async with scheduling(scripted_model(lambda _p: "hello")) as s:
        items = await everything(s.submit(job(tokens=100)))
    assert isinstance(items[0], TicketStarted)
    assert text_of(items) == "hello"
    assert [type(i) for i in items].count(TicketEnded) == 1
    assert items[-1].error is None
    assert items[-2].finish is Finish.STOP


async def test_equals_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []  # as the engine made them: a reader who is woken late gets many at once
    async with scheduling(scripted_model(step_cost=0.001), concurrent=2) as s:
        post = s._post

        def noting(ticket: Ticket, item: Any) -> None:
            if isinstance(item, Chunk):
                order.append(bytes(ticket.job.prompt).decode())
            post(ticket, item)

        monkeypatch.setattr(s, "_post", noting)
        await asyncio.gather(*(everything(s.submit(job(name, 200))) for name in "ab"))
    steps = "".join(order)
    both = steps[steps.index("b") : steps.rindex("a")]  # while the two were there
    assert len(both) > 100
    assert "aa" not in both
    assert "bb" not in both


async def test_a_higher_lane_preempts_a_lower_one_between_steps_and_the_lower_resumes() -> None:
    model = scripted_model(lambda p: "c" * 300 if "chat" in p else "g" * 20, step_cost=0.001)
    async with scheduling(model, concurrent=1) as s:
        chat = s.submit(job("chat", 300), priority=Priority.CHAT)
        await first_chunk(chat)
        ghost = s.submit(job("ghost", 20), priority=Priority.GHOST)
        ghost_items = await everything(ghost)
        assert not chat.done
        chat_items = await everything(chat)
    assert text_of(ghost_items) == "g" * 20
    assert not any(isinstance(i, TicketMoved) for i in ghost_items), "it never waited"
    assert text_of(chat_items) == "c" * 300


async def test_a_long_prefill_yields_to_a_higher_lane_and_goes_on_from_there() -> None:
    model = scripted_model(lambda _p: "ok", prefill_cost=0.0005, chunk=64)
    engine = model.engine
    assert isinstance(engine, EchoEngine)
    async with scheduling(model, concurrent=1) as s:
        chat = s.submit(job("c" * 4000), priority=Priority.CHAT)
        for _ in range(500):
            if engine.prefilled > 300:
                break
            await asyncio.sleep(0.002)
        ghost = s.submit(job("g"), priority=Priority.GHOST)
        assert text_of(await everything(ghost)) == "ok"
        assert not chat.timing.first, "the ghost came first"
        assert text_of(await everything(chat)) == "ok"
    assert chat.preemptions == 1
    assert engine.prefilled < 4000 + 600, "what was computed before the preemption was kept"


async def test_a_question_does_not_wait_until_the_prompt_of_an_edit_is_read() -> None:
    model = scripted_model(
        lambda p: "a" * 300 if "why" in p else "ok", prefill_cost=0.0005, step_cost=0.003, chunk=64
    )
    engine = model.engine
    assert isinstance(engine, EchoEngine)
    async with scheduling(model, concurrent=2) as s:
        edit = s.submit(job("e" * 4000), priority=Priority.CHAT, tier=Tier.FLEX)
        for _ in range(500):
            if engine.prefilled > 300:
                break
            await asyncio.sleep(0.002)
        question = s.submit(job("why", 300), priority=Priority.CHAT)
        assert text_of(await everything(question)) == "a" * 300
        assert engine.prefilled < 3000, "nor does it stop in the middle of the answer"
        assert text_of(await everything(edit)) == "ok"
    assert edit.preemptions == 1


async def test_a_preempted_warm_up_leaves_its_work_to_the_turn_it_was_for() -> None:
    model = scripted_model(lambda _p: "ok", prefill_cost=0.0005, chunk=64)
    engine = model.engine
    assert isinstance(engine, EchoEngine)
    async with scheduling(model, concurrent=1) as s:
        s.submit(job("w" * 2000, warm=True), priority=Priority.BACKGROUND)
        for _ in range(500):
            if engine.prefilled > 300:
                break
            await asyncio.sleep(0.002)
        turn = s.submit(job("w" * 2000 + "?"), priority=Priority.CHAT)
        assert text_of(await everything(turn)) == "ok"
    assert turn.stats.reused >= 128


async def test_tiers_order_what_waits_inside_a_lane() -> None:
    model = scripted_model(step_cost=0.002)
    async with scheduling(model, concurrent=1) as s:
        busy = s.submit(job(tokens=30), tier=Tier.PRIORITY)
        await first_chunk(busy)
        flex = s.submit(job(tokens=2), tier=Tier.FLEX)
        default = s.submit(job(tokens=2), tier=Tier.DEFAULT)
        priority = s.submit(job(tokens=2), tier=Tier.PRIORITY)
        await asyncio.gather(*map(everything, (busy, flex, default, priority)))
    assert priority.timing.started < default.timing.started < flex.timing.started


async def test_waiting_tickets_are_told_their_position_as_it_changes() -> None:
    model = scripted_model(step_cost=0.002)
    async with scheduling(model, concurrent=1) as s:
        first = s.submit(job(tokens=10))
        await first_chunk(first)
        second, third = s.submit(job(tokens=2)), s.submit(job(tokens=2))
        items = await asyncio.gather(*map(everything, (first, second, third)))
    assert [[i.position for i in seen if isinstance(i, TicketMoved)] for seen in items] == [[], [1], [2, 1]]


async def test_the_queue_is_bounded() -> None:
    async with scheduling(scripted_model(step_cost=0.01), concurrent=1, max_queue=2) as s:
        busy = s.submit(job(tokens=1000))
        await first_chunk(busy)
        waiting = [s.submit(job()), s.submit(job())]
        with pytest.raises(QueueFull) as caught:
            s.submit(job())
        assert caught.value.retry_after > 0
        for ticket in (busy, *waiting):
            ticket.cancel()
        await asyncio.gather(*map(everything, (busy, *waiting)))


async def test_cancelling_stops_within_one_step_and_touches_nobody_else() -> None:
    model = scripted_model(lambda p: "y" * 60 if "other" in p else "x" * 10_000, step_cost=0.002)
    engine = model.engine
    assert isinstance(engine, EchoEngine)
    async with scheduling(model, concurrent=2) as s:
        doomed, other = s.submit(job("doomed", 10_000)), s.submit(job("other", 60))
        await first_chunk(doomed)
        doomed.cancel()
        before = doomed.stats.steps
        items = await everything(doomed)
        assert isinstance(items[-1].error, Interrupted)
        assert doomed.stats.steps <= before + 1
        assert text_of(await everything(other)) == "y" * 60


async def test_a_waiting_ticket_can_be_cancelled_and_frees_its_place() -> None:
    async with scheduling(scripted_model(step_cost=0.005), concurrent=1) as s:
        busy = s.submit(job(tokens=200))
        await first_chunk(busy)
        gone, next_ = s.submit(job(tokens=1)), s.submit(job(tokens=1))
        gone.cancel()
        items = await everything(gone)
        assert isinstance(items[-1].error, Interrupted)
        assert not any(isinstance(i, TicketStarted) for i in items)
        busy.cancel()
        assert (await everything(next_))[-1].error is None


async def test_newer_work_for_a_buffer_supersedes_the_older() -> None:
    async with scheduling(scripted_model(step_cost=0.005)) as s:
        old = s.submit(job(tokens=1000), priority=Priority.GHOST, supersedes="file.py")
        elsewhere = s.submit(job(tokens=3), priority=Priority.GHOST, supersedes="other.py")
        await first_chunk(old)
        new = s.submit(job(tokens=3), priority=Priority.GHOST, supersedes="file.py")
        assert isinstance((await everything(old))[-1].error, Superseded)
        assert (await everything(new))[-1].error is None
        assert (await everything(elsewhere))[-1].error is None


async def test_a_paused_ticket_takes_no_step_until_it_is_resumed() -> None:
    model = scripted_model(step_cost=0.002)
    async with scheduling(model, concurrent=2) as s:
        slow, other = s.submit(job(tokens=200)), s.submit(job(tokens=30))
        await first_chunk(slow)
        slow.pause()
        await asyncio.sleep(0.02)
        steps = slow.stats.steps
        await everything(other)
        assert slow.stats.steps == steps
        slow.resume()
        assert (await everything(slow))[-1].error is None


async def test_a_paused_ticket_can_still_be_cancelled() -> None:
    async with scheduling(scripted_model(step_cost=0.002)) as s:
        ticket = s.submit(job(tokens=500))
        await first_chunk(ticket)
        ticket.pause()
        ticket.cancel()
        assert isinstance((await everything(ticket))[-1].error, Interrupted)


async def test_an_answer_whose_reader_is_behind_gives_its_place_away_and_gets_the_next_one() -> None:
    model = scripted_model(step_cost=0.001)
    async with scheduling(model, concurrent=1) as s:
        undisturbed = text_of(await everything(s.submit(job("slow", 200))))
        slow = s.submit(job("slow", 200))
        await first_chunk(slow)
        slow.pause()
        other, waiting = s.submit(job("other", 100_000)), s.submit(job("waiting", 1))
        await first_chunk(other)
        slow.resume()
        other.cancel()
        items, _, _ = await asyncio.gather(*map(everything, (slow, other, waiting)))
    assert text_of(items) == undisturbed
    assert [type(item) for item in items].count(TicketStarted) == 1
    assert slow.timing.ended <= waiting.timing.started


async def test_an_answer_that_gave_its_place_away_can_be_cancelled() -> None:
    async with scheduling(scripted_model(step_cost=0.001), concurrent=1) as s:
        slow = s.submit(job("slow", 200))
        await first_chunk(slow)
        slow.pause()
        other = s.submit(job("other", 100_000))
        await first_chunk(other)
        slow.cancel()
        assert isinstance((await everything(slow))[-1].error, Interrupted)
        assert not other.done
        other.cancel()
        await everything(other)


async def test_a_redirect_keeps_what_was_generated_and_goes_on() -> None:
    model = scripted_model(lambda p: "after" if p.endswith("!") else "b" * 400, step_cost=0.002)
    async with scheduling(model) as s:
        ticket = s.submit(job("start", 1000))
        await first_chunk(ticket)
        ticket.redirect("steer_1", list(b" now this!"))
        items = await everything(ticket)
    (steered,) = [i for i in items if isinstance(i, TicketSteered)]
    at = items.index(steered)
    before, after = text_of(items[:at]), text_of(items[at:])
    assert set(before) == {"b"}
    assert after == "after"
    assert steered.kept_tokens == len("start") + len(before)
    assert steered.length == steered.kept_tokens + len(" now this!")


class BatchingEngine(EchoEngine):
    """Counts the sessions of each joint step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[int] = []

    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]:
        self.batches.append(len(requests))
        return super().step_many(requests)


async def test_an_engine_that_batches_steps_its_sessions_together_with_the_same_text() -> None:
    plain = scripted_model()
    engine = BatchingEngine(max_batch=4)
    model = Model("echo", engine, plain.tokenizer, plain.chat, plain.fim)
    prompts = ["one", "two", "three", "four", "five"]
    async with scheduling(model) as s:
        tickets = [s.submit(job(p, 12 + i)) for i, p in enumerate(prompts)]
        together = [text_of(i) for i in await asyncio.gather(*map(everything, tickets))]
    async with scheduling(plain, concurrent=1) as s:
        alone = [text_of(await everything(s.submit(job(p, 12 + i)))) for i, p in enumerate(prompts)]
    assert together == alone
    assert max(engine.batches) > 1


@pytest.mark.parametrize("slows", [False, True])
async def test_where_company_slows_a_step_only_equals_are_joined(slows: bool) -> None:
    plain = scripted_model()
    engine = BatchingEngine(max_batch=4, step_cost=0.001)
    engine.batch_slows = slows
    model = Model("echo", engine, plain.tokenizer, plain.chat, plain.fim)
    async with scheduling(model) as s:
        chats = [s.submit(job(f"chat {i}", 400), priority=Priority.CHAT) for i in range(2)]
        for chat in chats:
            await first_chunk(chat)
        ghost = s.submit(job("ghost", 20), priority=Priority.GHOST)
        await everything(ghost)
        assert 2 in engine.batches
        assert (3 in engine.batches) != slows
        for chat in chats:
            chat.cancel()


async def test_a_failing_engine_ends_its_ticket_with_one_sentence_and_serves_the_next() -> None:
    def script(prompt: str) -> str:
        if "bad" in prompt:
            raise ZeroDivisionError("secret detail")
        return "fine"

    async with scheduling(scripted_model(script)) as s:
        error = (await everything(s.submit(job("bad"))))[-1].error
        assert isinstance(error, EngineError)
        assert "secret" not in error.message
        assert text_of(await everything(s.submit(job("good")))) == "fine"


async def test_a_prompt_beyond_the_context_fails_alone() -> None:
    async with scheduling(scripted_model(context_length=50)) as s:
        error = (await everything(s.submit(job("x" * 100))))[-1].error
        assert isinstance(error, ContextOverflow)
        assert (await everything(s.submit(job("x", 3))))[-1].error is None


async def test_stopping_ends_every_ticket_with_a_terminal_item() -> None:
    scheduler = Scheduler(scripted_model(step_cost=0.005), concurrent=1)
    scheduler.start()
    tickets = [scheduler.submit(job(tokens=1000)) for _ in range(3)]
    await first_chunk(tickets[0])
    readers = [asyncio.create_task(everything(t)) for t in tickets]
    await asyncio.sleep(0)
    await scheduler.stop()
    for items in await asyncio.gather(*readers):
        assert isinstance(items[-1].error, Unavailable)
    with pytest.raises(Unavailable):
        scheduler.submit(job())


async def test_leaving_the_iterator_early_cancels_the_work() -> None:
    model = scripted_model(step_cost=0.002)
    async with scheduling(model) as s:
        ticket = s.submit(job(tokens=10_000))
        async for item in ticket:
            if isinstance(item, Chunk):
                break
        await asyncio.sleep(0.05)
        assert s.running == 0


async def test_a_question_during_an_edit_begins_before_the_edit_ends() -> None:
    """On an engine that steps one answer at a time, with the default settings."""
    async with scheduling(scripted_model(lambda prompt: "word " * 2000, step_cost=0.002)) as scheduler:
        edit = scheduler.submit(job("edit", 1500), priority=Priority.EDIT)
        await first_chunk(edit)
        question = scheduler.submit(job("why?", 5), priority=Priority.CHAT)
        await first_chunk(question)
        assert not edit.finish
        same = scheduler.submit(job("and?", 5), priority=Priority.CHAT)
        await first_chunk(same)
        edit.cancel()
        await everything(edit)
        await everything(question)
        await everything(same)


async def test_a_resumed_answer_goes_before_those_that_wait_and_beside_those_that_run() -> None:
    endless = scripted_model(lambda _prompt: "x" * 100_000, step_cost=0.001)
    async with scheduling(endless, concurrent=1, max_queue=1) as s:
        running = s.submit(job(tokens=100_000))
        await first_chunk(running)
        waiting = s.submit(job(tokens=1))
        with pytest.raises(QueueFull):
            s.submit(job())
        resumed = s.submit(job(tokens=3), resumed=True)
        assert text_of(await everything(resumed)) == "xxx"
        assert not running.done
        assert not waiting.timing.started
        running.cancel()
        assert text_of(await everything(waiting)) == "x"
        await everything(running)


async def test_a_warm_up_asks_for_all_of_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[int] = []
    monkeypatch.setattr(EchoSession, "warm", lambda session, _interrupt: warmed.append(session.length))
    async with scheduling(scripted_model(lambda _p: "ok")) as s:
        await everything(s.submit(job("w" * 40, warm=True)))
        await everything(s.submit(job("w" * 30)))
    assert warmed == [40]


async def test_a_warm_up_may_fill_the_context() -> None:
    model = scripted_model(lambda _p: "ok", context_length=200)
    async with scheduling(model) as s:
        ended = (await everything(s.submit(job("w" * 200, warm=True))))[-1]
    assert isinstance(ended, TicketEnded)
    assert ended.error is None
