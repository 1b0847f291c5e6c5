"""A gateway whose engines are elsewhere: editors notice neither that nor the loss of one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

from gateway_support import scripted_model, serving

from keystroke.clients.live_connection import LiveClient
from keystroke.config import NamedModel
from keystroke.gateway.record.shared_limits import SharedLimits
from keystroke.gateway.work.registry import ModelRegistry, ServedModel, local_entry
from keystroke.protocol import live_messages as live
from keystroke.scale.call import ReplicaCall, ReplicaReply, Splice
from keystroke.scale.engine_replica import EngineReplica
from keystroke.scale.engine_stub import stub_entry
from keystroke.scale.replica_queue import ReplicaLost, ReplicaQueue
from keystroke.text import Edit


def completing() -> ServedModel:
    """Says `one` after `value = `, also where it is taken up in the middle of it."""

    def script(prompt: str) -> str:
        _, found, begun = prompt.rpartition("value = ")
        begun = begun.replace("<fim_middle>", "")
        return "one\n".removeprefix(begun) if found and "one\n".startswith(begun) else ""

    return local_entry("echo", scripted_model(script, step_cost=0.002))


class Pool:
    """One replica at a time; every third call is lost after its first reply, and its replica with it."""

    def __init__(self) -> None:
        self.replica = EngineReplica(completing, "0")
        self.calls: list[ReplicaCall] = []
        self.losses = 0

    async def generate(self, call: ReplicaCall) -> AsyncGenerator[ReplicaReply, None]:
        self.calls.append(call)
        breaks = len(self.calls) % 3 == 0
        async for reply in self.replica.generate(call):
            yield reply
            if breaks:
                self.losses += 1
                self.replica = EngineReplica(completing, str(self.losses))
                raise ReplicaLost("killed")

    async def splice(self, wanted: Splice) -> bool:
        return await self.replica.splice(wanted)


def registry(pool: Pool, table: NamedModel) -> ModelRegistry:
    side = asyncio.run(pool.replica.describe())
    return ModelRegistry([stub_entry(side, ReplicaQueue(pool, "echo"), table)])


def test_a_gateway_knows_the_languages_of_a_model_that_is_elsewhere() -> None:
    known, calm = frozenset({"python", "c"}), frozenset({"c"})

    def load() -> ServedModel:
        said = replace(scripted_model(lambda _: ""), languages=known, conservative_languages=calm)
        return local_entry("echo", said)

    pool = Pool()
    pool.replica = EngineReplica(load, "0")
    side = asyncio.run(pool.replica.describe())
    model = stub_entry(side, ReplicaQueue(pool, "echo"), NamedModel()).model
    assert model is not None
    assert (model.languages, model.conservative_languages) == (known, calm)


async def typed(url: str, files: int) -> list[live.Suggestion | live.NotShown]:
    answers = []
    async with LiveClient(url) as client:
        for at in range(files):
            name = f"{at}.py"
            client.open(name, "value = ", path=name)
            answers.append(await client.complete(name, 8))
            client.change(name, 1, [Edit(8, 8, "o")], cursor=9)
            answers.append(await client.complete(name, 9))
    return answers


def test_ghost_text_comes_though_replicas_are_lost() -> None:
    pool = Pool()
    with serving(registry=registry(pool, NamedModel())) as server:
        answers = asyncio.run(typed(server.url, 4))
    assert [a.text if isinstance(a, live.Suggestion) else a for a in answers] == ["one", "ne"] * 4
    assert pool.losses
    assert {call.affinity for call in pool.calls} == {f"local/live/{at}.py" for at in range(4)}


def test_a_live_buffer_asks_the_budget_that_all_gateways_share(tmp_path: Path) -> None:
    pool = Pool()
    with serving(registry=registry(pool, NamedModel(requests_per_minute=1)), folder=tmp_path) as server:
        assert server.gateway.store is not None
        server.gateway.service.shared = SharedLimits(server.gateway.store.engine)
        answers = asyncio.run(typed(server.url, 3))
    # One request was admitted, the warming of the first file; who asks after it is told, not kept waiting.
    assert len(answers) == 6
    assert len([call for call in pool.calls if not call.generated]) <= 2
    assert any(isinstance(answer, live.NotShown) for answer in answers)
