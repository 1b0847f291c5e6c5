"""A turn survives its connection: cut at every event, taken up again, each event exactly once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
import websockets
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke.clients.connection import Client, Restarted
from keystroke.gateway.api import replay
from keystroke.protocol import events

DELTA = "response.output_text.delta"
TERMINAL = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}


def script(prompt: str) -> str:
    said = last_user(prompt)
    return "and on " * 100_000 if "endless" in said else "ten words"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving(scripted_model(script, step_cost=0.002)) as running:
        yield running


@asynccontextmanager
async def socket(server: RunningServer) -> AsyncIterator[Any]:
    made = await websockets.connect(server.ws, compression=None, max_size=None)
    try:
        yield made
    finally:
        made.transport.abort()


async def read(wire: Any, most: int = 1000) -> list[dict[str, Any]]:
    """So many events, or up to the terminal one."""
    heard: list[dict[str, Any]] = []
    while len(heard) < most:
        heard.append(json.loads(await asyncio.wait_for(wire.recv(), 60)))
        if heard[-1]["type"] in TERMINAL or heard[-1]["type"] == "error":
            break
    return heard


async def create(wire: Any, text: str = "hi", **more: Any) -> None:
    body = {"type": "response.create", "input": text, "store": False, "on_disconnect": "continue", **more}
    await wire.send(json.dumps(body))


async def resume(wire: Any, heard: list[dict[str, Any]], **more: Any) -> None:
    identity = heard[0]["response"]["id"]
    after = heard[-1]["sequence_number"]
    body = {"type": "response.resume", "response_id": identity, "starting_after": after, **more}
    await wire.send(json.dumps(body))


def once(heard: list[dict[str, Any]]) -> list[str]:
    """What was heard, deltas of a text as one: a reader that is behind gets several in one event, under the
    last one's number. No number comes twice, and none goes back."""
    numbers = [event["sequence_number"] for event in heard]
    assert all(before < after for before, after in pairwise(numbers)), numbers
    kinds = [event["type"] for event in heard]
    return [kind for before, kind in pairwise(["", *kinds]) if not (kind == before == DELTA)]


def said(heard: list[dict[str, Any]]) -> str:
    return "".join(e["delta"] for e in heard if e["type"] == DELTA)


async def test_a_socket_cut_at_every_event_is_taken_up_with_each_event_once(server: RunningServer) -> None:
    async with socket(server) as wire:
        await create(wire)
        whole = await read(wire)
    for index in range(1, len(whole) + 1):
        async with socket(server) as wire:
            await create(wire, stream_id="s")
            heard = await read(wire, index)
        async with socket(server) as wire:
            await resume(wire, heard, stream_id="s")
            if heard[-1]["type"] not in TERMINAL:
                heard += await read(wire)
            assert once(heard) == once(whole)
            assert said(heard) == "ten words"
            await create(wire, "more", stream_id="s", previous_response_id=heard[0]["response"]["id"])
            assert (await read(wire))[-1]["type"] == "response.completed"  # the stream goes on from there
    assert server.settled()


async def test_a_stream_of_events_cut_at_every_index_is_taken_up_by_its_number(server: RunningServer) -> None:
    body = {"input": "hi", "store": False, "stream": True, "on_disconnect": "continue"}

    async def lines(answer: httpx.Response, most: int = 1000) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                heard.append(json.loads(line[6:]))
            if len(heard) == most:
                break
        return heard

    async with httpx.AsyncClient(base_url=server.url) as http:
        async with http.stream("POST", "/v1/responses", json=body) as answer:
            whole = await lines(answer)
        for index in range(1, len(whole)):
            async with http.stream("POST", "/v1/responses", json=body) as answer:
                heard = await lines(answer, index)
            where = f"/v1/responses/{heard[0]['response']['id']}"
            after = {"stream": "true", "starting_after": str(heard[-1]["sequence_number"])}
            async with http.stream("GET", where, params=after) as answer:
                assert answer.status_code == 200
                heard += await lines(answer)
            assert once(heard) == once(whole)
            assert said(heard) == "ten words"
        refused = await http.get(where, params={"stream": "true", "starting_after": "x"})
        assert refused.status_code == 400


async def test_our_own_client_takes_a_turn_up_again_wherever_it_was_cut(server: RunningServer) -> None:
    async with Client(server.url) as client:
        whole = [event async for event in await client.respond("hi")]
        for index in range(len(whole)):
            stream = await client.respond("hi")
            heard: list[Any] = []
            async for event in stream:
                if len(heard) == index:
                    assert client._socket is not None
                    client._socket._transport.abort()  # type: ignore[union-attr]
                heard.append(event)
            assert Restarted not in map(type, heard)
            assert "".join(e.delta for e in heard if isinstance(e, events.TextDelta)) == "ten words"


async def test_a_client_whose_server_forgot_the_turn_begins_anew(server: RunningServer) -> None:
    async with Client(server.url) as client:
        stream = await client.respond("hi")
        heard: list[Any] = []
        async for event in stream:
            heard.append(event)
            if isinstance(event, events.TextDelta) and not any(isinstance(e, Restarted) for e in heard):
                replays = server.gateway.endpoints.responses.replays
                replays._by_id.clear()  # as a restart of the server would
                client._socket._transport.abort()  # type: ignore[union-attr]
        assert sum(isinstance(event, Restarted) for event in heard) == 1
        assert stream.response is not None
        assert stream.response.status == "completed"


async def test_a_steered_turn_is_taken_up_with_its_successor(server: RunningServer) -> None:
    async with socket(server) as wire:
        await create(wire, "endless")
        heard = await read(wire, 8)
        steer = {
            "type": "response.steer",
            "previous_response_id": heard[0]["response"]["id"],
            "input": "stop",
        }
        await wire.send(json.dumps(steer))
        heard += await read(wire, 1)
    async with socket(server) as wire:
        await resume(wire, heard)
        heard += await read(wire)
        assert heard[-1]["type"] == "response.incomplete"
        once(heard)
        successor = await read(wire)
        once(successor)
        assert said(successor) == "ten words"


async def test_a_client_that_takes_its_leave_or_never_comes_back_stops_its_turn(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "WINDOW", 0.2)
    polite = await websockets.connect(server.ws, compression=None)
    await create(polite, "endless")
    await read(polite, 5)
    await polite.close()
    assert await asyncio.to_thread(server.settled)
    async with socket(server) as wire:
        await create(wire, "endless")
        heard = await read(wire, 5)
    assert await asyncio.to_thread(server.settled)
    await asyncio.sleep(0.5)
    async with socket(server) as wire:
        await resume(wire, heard)
        assert (await read(wire))[0]["error"]["code"] == "response_not_found"
    assert server.gateway.endpoints.responses.replays.bytes == 0


async def test_without_the_wish_a_broken_connection_stops_the_turn_at_once(server: RunningServer) -> None:
    async with socket(server) as wire:
        await create(wire, "endless", on_disconnect="cancel")
        heard = await read(wire, 5)
    assert await asyncio.to_thread(server.settled)
    async with socket(server) as wire:
        await resume(wire, heard)
        assert (await read(wire))[0]["status"] == 404


async def test_another_key_cannot_take_up_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYSTROKE_API_KEY", "mine,yours")
    with serving(scripted_model(script, step_cost=0.002)) as server:

        def connect(key: str) -> Any:
            return websockets.connect(server.ws, additional_headers={"Authorization": f"Bearer {key}"})

        async with connect("mine") as wire, connect("yours") as other:
            await create(wire, "endless")
            heard = await read(wire, 3)
            await resume(other, heard)
            assert (await read(other))[0]["error"]["code"] == "response_not_found"
            assert (await read(wire, 3))[-1]["type"] != "error"


async def test_a_reader_that_comes_back_before_its_old_connection_is_missed_takes_its_place(
    server: RunningServer,
) -> None:
    async with socket(server) as old, socket(server) as new:
        await create(old, "endless")
        heard = await read(old, 5)
        await resume(new, heard)
        more = await read(new, 5)
        old.transport.abort()
        more += await read(new, 5)
        once(heard + more)
        assert ("and on " * 50).startswith(said(heard + more))
