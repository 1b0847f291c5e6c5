"""A turn that its gateway did not finish is taken up by another one, by its id, with the same text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import websockets
from gateway_support import RunningServer, scripted_model, serving

from keystroke.clients.connection import Client, Restarted
from keystroke.errors import Restarting
from keystroke.gateway.record import turns
from keystroke.gateway.record.turns import TURNS, TurnJournal
from keystroke.protocol import events

DELTA = "response.output_text.delta"
ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "error")
ASKED = {"input": "tell me", "temperature": 0.9, "seed": 7, "max_output_tokens": 150}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunningServer]]:
    """Two gateways over one database."""
    monkeypatch.setattr(turns, "INTERVAL", 0.05)
    with ExitStack() as stack:
        made = []
        for _ in range(2):
            server = stack.enter_context(serving(scripted_model(step_cost=0.004), folder=tmp_path))
            store = server.gateway.store
            assert store is not None
            journal = TurnJournal(store.engine)
            stack.callback(journal.close)
            server.gateway.endpoints.responses.journal = journal
            made.append(server)
        yield made


def rows(server: RunningServer) -> list[Any]:
    assert server.gateway.store is not None
    with server.gateway.store.engine.connect() as connection:
        return list(connection.execute(sa.select(TURNS)))


async def read(wire: Any, deltas: int = 100_000) -> list[dict[str, Any]]:
    heard: list[dict[str, Any]] = []
    while sum(e["type"] == DELTA for e in heard) < deltas:
        heard.append(json.loads(await asyncio.wait_for(wire.recv(), 60)))
        if heard[-1]["type"] in ENDS:
            break
    return heard


def said(heard: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in heard if e["type"] == DELTA)


async def abandon(server: RunningServer) -> None:
    """As a gateway does that lost its cluster head."""
    scheduler = server.gateway.service.registry.entries["echo"].scheduler
    loop = scheduler._loop  # type: ignore[attr-defined]
    ending = server.gateway.abandon(Restarting("The server starts again."))
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ending, loop))


async def whole_text(server: RunningServer) -> str:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answer = (await client.post("/v1/responses", json=ASKED)).json()
    text: str = answer["output"][0]["content"][0]["text"]
    assert len(text) > 50
    return text


async def begin(server: RunningServer, wire: Any) -> list[dict[str, Any]]:
    """The first events of a turn whose beginning is written."""
    body = {"type": "response.create", "on_disconnect": "continue", **ASKED}
    await wire.send(json.dumps(body))
    heard = await read(wire, deltas=12)
    async with asyncio.timeout(30):
        while not any(row.tokens for row in rows(server)):  # noqa: ASYNC110 - written by a thread
            await asyncio.sleep(0.02)
    return heard


async def test_a_turn_of_one_gateway_is_continued_by_another(pair: list[RunningServer]) -> None:
    first, second = pair
    whole = await whole_text(first)
    async with websockets.connect(first.ws) as wire:
        heard = await begin(first, wire)
        identity = heard[0]["response"]["id"]
        async with websockets.connect(second.ws) as other:
            resume = {"type": "response.resume", "response_id": identity, "starting_after": 5}
            await other.send(json.dumps(resume))
            taken = await read(other)
        assert taken[0]["type"] == "response.created"
        assert taken[0]["response"]["id"] == identity
        assert said(taken) == whole
        left = await read(wire)  # the former owner stops
        assert left[-1]["type"] == "response.cancelled"
    async with asyncio.timeout(30):
        while rows(second):  # noqa: ASYNC110 - written by a thread
            await asyncio.sleep(0.02)
    async with httpx.AsyncClient(base_url=second.url, timeout=60) as client:
        stored = (await client.get(f"/v1/responses/{identity}")).json()
    assert stored["output"][0]["content"][0]["text"] == whole


async def test_an_abandoned_turn_ends_with_a_resumable_error_and_is_fetched_by_id(
    pair: list[RunningServer],
) -> None:
    first, second = pair
    whole = await whole_text(first)
    async with websockets.connect(first.ws) as wire:
        heard = await begin(first, wire)
        await abandon(first)
        heard += await read(wire)
    assert heard[-1]["type"] == "response.failed"
    assert heard[-1]["response"]["error"]["code"] == "server_restarting"
    identity = heard[0]["response"]["id"]
    async with (
        httpx.AsyncClient(base_url=second.url, timeout=60) as client,
        client.stream("GET", f"/v1/responses/{identity}?stream=true") as stream,
    ):
        lines = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]
    assert said(lines) == whole
    async with asyncio.timeout(30):
        while rows(second):  # noqa: ASYNC110 - written by a thread
            await asyncio.sleep(0.02)


async def test_a_turn_of_another_key_is_not_taken_up(pair: list[RunningServer]) -> None:
    first, second = pair
    async with websockets.connect(first.ws) as wire:
        heard = await begin(first, wire)
        journal = second.gateway.endpoints.responses.journal
        assert journal is not None
        assert journal.take(heard[0]["response"]["id"], "somebody else") is None
        assert journal.take("resp_unknown", "local") is None


async def test_the_client_takes_its_turn_up_where_the_server_restarted(
    pair: list[RunningServer],
) -> None:
    first, second = pair
    whole = await whole_text(first)
    async with Client(first.url) as client:
        stream = await client.respond("tell me", **{k: v for k, v in ASKED.items() if k != "input"})
        text, seen = "", 0
        async for event in stream:
            if isinstance(event, Restarted):
                text = ""
            elif isinstance(event, events.TextDelta):
                text, seen = text + event.delta, seen + 1
                if seen == 12:
                    client._url = client._url.replace(str(first.port), str(second.port))
                    await abandon(first)
        assert stream.response is not None
    assert text == whole
