"""Turns over replicas that go away: what the reader gets is what one engine that stayed would have said."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from functools import reduce
from typing import Any

import pytest

from keystroke.config import NamedModel
from keystroke.engine.base import Sampling
from keystroke.engine.echo import END_OF_TURN, EOS, SPECIAL, EchoEngine
from keystroke.engine.generation import Chunk, GenerationParams, GenerationStats
from keystroke.engine.grammar.constraint import json_schema
from keystroke.engine.model import Model
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.errors import QueueFull, Unavailable
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel, local_entry
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import (
    Superseded,
    Ticket,
    TicketEnded,
    TicketMoved,
    TicketStarted,
    TicketSteered,
)
from keystroke.scale import engine_replica
from keystroke.scale.call import ReplicaCall, ReplicaReply, Splice
from keystroke.scale.engine_replica import EngineReplica
from keystroke.scale.replica_queue import ReplicaLost, ReplicaQueue
from keystroke.scale.ring import Ring

TOKENIZER = ByteTokenizer(SPECIAL, eos=EOS, vocab_size=320)


def entry(script: Any = None, **costs: Any) -> ServedModel:
    return local_entry("echo", Model("echo", EchoEngine(script, **costs), TOKENIZER), named=NamedModel())


class ShakyPool:
    """Replicas in this process. `breaks` says after how many replies each call in turn is lost; None: never.
    Every loss takes the replica with it, and a fresh one with an empty cache comes in its place."""

    def __init__(self, make: Any, breaks: list[int | None], size: int = 2) -> None:
        self.make, self.breaks = make, breaks
        self.replicas = {str(i): EngineReplica(make, str(i)) for i in range(size)}
        self.calls: list[ReplicaCall] = []

    async def generate(self, call: ReplicaCall) -> AsyncGenerator[ReplicaReply, None]:
        self.calls.append(call)
        left = self.breaks.pop(0) if self.breaks else None
        name = next(Ring(self.replicas).order(call.affinity))
        async with aclosing(self.replicas[name].generate(call)) as replies:  # type: ignore[type-var]
            async for reply in replies:
                if left == 0:
                    lost = self.replicas.pop(name)
                    self.replicas[name + "'"] = EngineReplica(self.make, name + "'")
                    await lost.close()
                    raise ReplicaLost("killed")
                left = None if left is None else left - 1
                yield reply

    async def splice(self, wanted: Splice) -> bool:
        replica = self.replicas.get(wanted.replica)
        return replica is not None and await replica.splice(wanted)

    async def close(self) -> None:
        for replica in self.replicas.values():
            await replica.close()


@asynccontextmanager
async def queue_over(make: Any, breaks: list[int | None] | None = None, **more: Any) -> Any:
    pool = ShakyPool(make, breaks or [])
    queue = ReplicaQueue(pool, "echo", **more)
    queue.start()
    try:
        yield queue, pool
    finally:
        await queue.stop()
        await pool.close()


async def read(ticket: Ticket) -> tuple[str, list[Any]]:
    items = [item async for item in ticket]
    return "".join(i.text for i in items if isinstance(i, Chunk)), items


PROMPT = TOKENIZER.encode("def answer():\n    return ")


@pytest.mark.parametrize("seed", range(6))
async def test_a_turn_that_loses_replicas_says_what_an_unbroken_one_says(seed: int) -> None:
    chance = random.Random(seed)
    params = GenerationParams(60, Sampling(temperature=0.9, seed=seed), stop=("zq",))
    async with queue_over(entry) as (queue, _):
        whole, _ = await read(queue.submit(Job(PROMPT, params)))
    # Steps that take a while come one by one; otherwise a whole answer may be one reply.
    breaks: list[int | None] = [
        chance.randrange(0, 4),
        *(chance.randrange(0, 12) for _ in range(chance.randrange(0, 3))),
    ]
    async with queue_over(lambda: entry(step_cost=0.003), breaks) as (queue, pool):
        ticket = queue.submit(Job(PROMPT, params))
        broken, items = await read(ticket)
        assert broken == whole
        assert len(pool.calls) > 1
        assert sum(isinstance(i, TicketEnded) for i in items) == 1
        assert items[-1].error is None
        assert sum(isinstance(i, TicketStarted) for i in items) == 1
        assert TOKENIZER.decode(items[-1].tokens[len(PROMPT) :]).startswith(whole)
        assert ticket.stats.tokens == len(items[-1].tokens) - len(PROMPT)
        assert ticket.stats.computed <= len(PROMPT)
        assert ticket.preemptions == len(pool.calls) - 1


async def test_half_a_character_is_finished_by_the_next_replica() -> None:
    said = "schön äöü é " * 3

    def go_on(prompt: str) -> list[int]:
        """What is left of it: a half character, which a text cannot hold, is one byte of two."""
        begun = prompt[len(PROMPT) :]
        return list(said.encode()[len(begun.replace("\ufffd", "").encode()) + begun.count("\ufffd") :])

    for first in range(1, 12):
        async with queue_over(lambda: entry(go_on), [first, 9, 11]) as (queue, _):
            text, items = await read(queue.submit(Job(PROMPT, GenerationParams())))
        assert text == said
        assert items[-1].error is None


async def test_an_answer_held_to_a_grammar_stays_held_when_its_replica_is_lost() -> None:
    shape = json_schema({"type": "object", "properties": {"n": {"enum": ["aa", "ab"]}}, "required": ["n"]})
    params = GenerationParams(64, constraint=shape)
    async with queue_over(entry) as (queue, _):
        whole, _ = await read(queue.submit(Job(PROMPT, params)))
    for cut in range(1, 4):
        async with queue_over(entry, [cut]) as (queue, _):
            broken, _ = await read(queue.submit(Job(PROMPT, params)))
        assert broken == whole


async def test_input_is_spliced_in_once_though_the_replica_goes() -> None:
    steer = tuple(TOKENIZER.encode(" // steered: "))
    for cut in (3, 6, 30):
        make = lambda: entry(step_cost=0.004)  # noqa: E731
        async with queue_over(make, [cut]) as (queue, _):
            ticket = queue.submit(Job(PROMPT, GenerationParams(60)))
            items: list[Any] = []
            async for item in ticket:
                items.append(item)
                if isinstance(item, Chunk) and sum(isinstance(i, Chunk) for i in items) == 5:
                    ticket.redirect("s1", steer)
        steered = [i for i in items if isinstance(i, TicketSteered)]
        assert len(steered) == 1
        held = list(items[-1].tokens)
        at = len(steered[0].tokens)
        assert tuple(held[at : at + len(steer)]) == steer
        chunks = [t for i in items if isinstance(i, Chunk) for t in i.tokens]
        assert held == [*PROMPT, *chunks[: at - len(PROMPT)], *steer, *chunks[at - len(PROMPT) :]]
        assert len(chunks) == 60


async def test_cancelling_ends_at_once_with_its_reason_and_stops_the_engine() -> None:
    async with queue_over(lambda: entry(step_cost=0.01)) as (queue, pool):
        ticket = queue.submit(Job(PROMPT, GenerationParams(10_000)))
        seen: list[Any] = []
        async for item in ticket:
            seen.append(item)
            if isinstance(item, Chunk):
                ticket.cancel(Unavailable("enough"))
        assert isinstance(seen[-1], TicketEnded)
        assert isinstance(seen[-1].error, Unavailable)
        assert queue.running == queue.waiting == 0
        for _ in range(200):
            if not any(r._tickets for r in pool.replicas.values()):
                break
            await asyncio.sleep(0.01)
        assert not any(r._tickets for r in pool.replicas.values())


async def test_newer_work_of_a_buffer_takes_the_place_of_older() -> None:
    async with queue_over(lambda: entry(step_cost=0.01)) as (queue, _):
        old = queue.submit(Job(PROMPT, GenerationParams(1000)), priority=Priority.GHOST, supersedes="b")
        new = queue.submit(Job(PROMPT, GenerationParams(3)), priority=Priority.GHOST, supersedes="b")
        (_, first), (_, second) = await asyncio.gather(read(old), read(new))
        assert isinstance(first[-1].error, Superseded)
        assert second[-1].error is None


async def test_a_turn_fails_only_after_its_patience() -> None:
    async with queue_over(entry, [0] * 50, patience=0.2) as (queue, pool):
        _, items = await read(queue.submit(Job(PROMPT, GenerationParams(5))))
        assert isinstance(items[-1].error, Unavailable)
        assert len(pool.calls) > 1


async def test_more_than_may_wait_is_refused_with_nothing_left_behind() -> None:
    async with queue_over(lambda: entry(step_cost=0.05), waiting_at_most=2) as (queue, _):
        tickets = [queue.submit(Job(PROMPT, GenerationParams(2))) for _ in range(2)]
        with pytest.raises(QueueFull):
            queue.submit(Job(PROMPT, GenerationParams(2)))
        ended = await asyncio.gather(*map(read, tickets))
        assert [items[-1].error for _, items in ended] == [None, None]


async def test_one_key_leaves_half_of_the_places_to_others() -> None:
    async with queue_over(lambda: entry(step_cost=0.02), waiting_at_most=6) as (queue, _):
        mine = [queue.submit(Job([*PROMPT, i], GenerationParams(2)), key="busy") for i in range(3)]
        with pytest.raises(QueueFull, match="3 requests of this key"):
            queue.submit(Job(PROMPT, GenerationParams(2)), key="busy")
        others = [queue.submit(Job([*PROMPT, i], GenerationParams(2)), key=f"other{i}") for i in range(3)]
        ended = await asyncio.gather(*map(read, mine + others))
        assert [items[-1].error for _, items in ended] == [None] * 6
        _, items = await read(queue.submit(Job(PROMPT, GenerationParams(2)), key="busy"))
        assert items[-1].error is None  # its places are free again


async def test_keys_take_turns_in_a_replica() -> None:
    async with queue_over(lambda: entry(step_cost=0.01)) as (queue, pool):
        del pool.replicas["1"]
        order: list[str] = []

        async def noted(ticket: Ticket) -> None:
            await read(ticket)
            order.append(ticket.key)

        busy = [queue.submit(Job([*PROMPT, i], GenerationParams(3)), key="busy") for i in range(4)]
        await asyncio.sleep(0)  # they are there first
        late = queue.submit(Job(PROMPT, GenerationParams(3)), key="late")
        await asyncio.gather(*map(noted, [*busy, late]))
        assert order.index("late") <= 2  # behind the two that may run already, before the busy key's others


async def test_a_turn_that_was_begun_is_not_refused_by_a_full_replica() -> None:
    class Crowded(ShakyPool):
        """The second call finds a replica whose queue is full."""

        async def generate(self, call: ReplicaCall) -> AsyncGenerator[ReplicaReply, None]:
            if len(self.calls) == 1:
                self.calls.append(call)
                yield ReplicaReply((TicketEnded(QueueFull("full", retry_after=1.0)),), GenerationStats())
                return
            async with aclosing(super().generate(call)) as replies:
                async for reply in replies:
                    yield reply

    pool = Crowded(entry, [0])
    queue = ReplicaQueue(pool, "echo")
    _, items = await read(queue.submit(Job(PROMPT, GenerationParams(30, ignore_eos=True))))
    assert items[-1].error is None
    assert sum(len(i.tokens) for i in items if isinstance(i, Chunk)) == 30
    assert len(pool.calls) == 3
    await queue.stop()
    await pool.close()


async def test_a_replica_that_shuts_down_hands_its_turns_over() -> None:
    async with queue_over(lambda: entry(step_cost=0.005)) as (queue, pool):
        ticket = queue.submit(Job(PROMPT, GenerationParams(80)))
        items: list[Any] = []
        async for item in ticket:
            items.append(item)
            if isinstance(item, Chunk) and sum(isinstance(i, Chunk) for i in items) == 5:
                name = next(Ring(pool.replicas).order(pool.calls[0].affinity))
                leaving = pool.replicas.pop(name)
                closing = asyncio.create_task(leaving.close())
        await closing
        assert items[-1].error is None
        assert sum(len(i.tokens) for i in items if isinstance(i, Chunk)) == 80
        assert len(pool.calls) == 2


async def test_ghost_text_is_stepped_before_batch_work_in_a_replica() -> None:
    replica = EngineReplica(lambda: entry(step_cost=0.004, max_batch=4), "r")
    pool_calls: list[str] = []

    class One:
        async def generate(self, call: ReplicaCall) -> AsyncGenerator[ReplicaReply, None]:
            pool_calls.append(call.id)
            async for reply in replica.generate(call):
                yield reply

        async def splice(self, wanted: Splice) -> bool:
            return await replica.splice(wanted)

    queue = ReplicaQueue(One(), "echo")
    batch = [
        queue.submit(Job([*PROMPT, i], GenerationParams(60, ignore_eos=True)), priority=Priority.BACKGROUND)
        for i in range(4)
    ]
    await asyncio.sleep(0.05)
    ghost = queue.submit(Job(PROMPT, GenerationParams(8)), priority=Priority.GHOST)
    _, items = await read(ghost)
    assert items[-1].error is None
    assert not any(t.done for t in batch)  # all four were under way, and the newcomer did not wait for one
    assert not any(type(i).__name__ == "Moved" for i in items)
    ended = await asyncio.gather(*map(read, batch))
    assert all(items[-1].error is None for _, items in ended)
    await queue.stop()
    await replica.close()


async def test_end_of_turn_is_kept_when_the_replica_dies_after_the_last_chunk() -> None:
    def one() -> ServedModel:
        return entry(lambda prompt: [*b"done"[len(prompt) - len(PROMPT) :], END_OF_TURN])

    async with queue_over(one) as (queue, pool):
        whole, items = await read(queue.submit(Job(PROMPT, GenerationParams())))
        replies = len(items)
    assert whole == "done"
    for cut in range(1, replies):
        async with queue_over(one, [cut]) as (queue, pool):
            text, items = await read(queue.submit(Job(PROMPT, GenerationParams())))
            assert (text, items[-1].error) == ("done", None)
            assert pool.calls


async def test_a_call_is_repeated_as_resumed_only_where_it_had_begun() -> None:
    params = GenerationParams(40, Sampling())
    cases = [([0], [False, False]), ([2], [False, True]), ([2, 0, 1], [False, True, True, True])]
    for breaks, resumed in cases:
        async with queue_over(lambda: entry(step_cost=0.003), list(breaks)) as (queue, pool):
            await read(queue.submit(Job(PROMPT, params)))
            assert [call.resumed for call in pool.calls] == resumed


async def test_conversations_beside_each_other_share_replies_and_ghost_text_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held for ever, so that nothing depends on the machine's speed: only what cannot wait is sent."""
    monkeypatch.setattr(engine_replica, "_REPLY_SHARE", 3600.0)
    monkeypatch.setattr(engine_replica, "_LONGEST_HOLD", 3600.0)
    params = GenerationParams(60, Sampling(), ignore_eos=True)
    prompts = [[*PROMPT, i] for i in range(4)]

    async def chunks_of(make: Any, priority: Priority) -> list[list[Chunk]]:
        async with queue_over(make) as (queue, pool):
            del pool.replicas["1"]
            tickets = [queue.submit(Job(p, params), priority=priority) for p in prompts]
            ended = await asyncio.gather(*map(read, tickets))
        assert all(items[-1].error is None for _, items in ended)
        return [[i for i in items if isinstance(i, Chunk)] for _, items in ended]

    apart = await chunks_of(lambda: entry(max_batch=4), Priority.GHOST)
    assert all(len(chunk.tokens) == 1 for chunks in apart for chunk in chunks)
    joined = await chunks_of(lambda: entry(max_batch=4), Priority.CHAT)
    assert sum(map(len, joined)) < sum(map(len, apart)) / 2
    assert all(len(chunks[0].tokens) == 1 for chunks in joined)  # a first token waits for nothing
    assert [reduce(Chunk.join, c) for c in joined] == [reduce(Chunk.join, c) for c in apart]


async def test_a_call_that_waits_is_told_its_first_position_at_once_and_others_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_replica, "_PROGRESS_INTERVAL", 3600.0)
    async with queue_over(lambda: entry(step_cost=0.001)) as (queue, pool):
        del pool.replicas["1"]
        tickets = [queue.submit(Job([*PROMPT, i], GenerationParams(2))) for i in range(30)]
        ended = await asyncio.gather(*map(read, tickets))
    told = [[i.position for i in items if isinstance(i, TicketMoved)] for _, items in ended]
    assert max(map(len, told)) <= 2
    assert all(positions == sorted(positions, reverse=True) for positions in told)
