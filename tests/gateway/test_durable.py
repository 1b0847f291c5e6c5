"""Whoever is told that a stored response has ended finds it stored, or is told that it is not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_support import RunningServer, echo, scripted_model, serving
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from keystroke.gateway.record import tables

ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with serving(scripted_model(echo, step_cost=0.005), folder=tmp_path) as running:
        yield running


def stored(folder: Path, response_id: str) -> bool:
    """As another process sees it."""
    other = sqlite3.connect(folder / "gateway.db")
    try:
        found = other.execute("SELECT response FROM responses WHERE id = ?", (response_id,)).fetchone()
        return found is not None and b'"status":"in_progress"' not in found[0]
    finally:
        other.close()


def test_a_streamed_response_is_stored_when_its_end_arrives(server: RunningServer, tmp_path: Path) -> None:
    for turn in range(5):
        body = {"model": "auto", "input": f"turn {turn}", "stream": True}
        kinds = []
        with httpx.stream("POST", f"{server.url}/v1/responses", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    kinds.append(event["type"])
                    if event["type"] in ENDS:
                        assert stored(tmp_path, event["response"]["id"])
        assert [kind for kind in kinds if kind in ENDS] == ["response.completed"]
        assert kinds[-1] == "response.completed"


def test_a_whole_response_is_stored_when_it_is_given(server: RunningServer, tmp_path: Path) -> None:
    told = httpx.post(f"{server.url}/v1/responses", json={"model": "auto", "input": "hello"}).json()
    assert told["status"] == "completed"
    assert stored(tmp_path, told["id"])


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BUSY_TIMEOUT_MS", 50)  # of every connection that is made from now on


@pytest.mark.usefixtures("impatient")
def test_what_cannot_be_committed_is_not_called_stored(server: RunningServer, tmp_path: Path) -> None:
    def answer() -> dict[str, Any]:
        body = {"model": "auto", "input": "hello", "store": True}
        given: dict[str, Any] = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
        return given

    assert answer()["store"] is True
    other = sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        locked = answer()
        assert locked["status"] == "completed"
        assert locked["store"] is False
        assert "cannot be stored" in answer()["error"]["message"]
    finally:
        other.execute("ROLLBACK")
        other.close()
    for _ in range(600):
        if (again := answer()).get("store"):
            break
    assert stored(tmp_path, again["id"])


async def test_a_steered_turn_and_its_successor_each_end_once_and_in_order(
    server: RunningServer, tmp_path: Path
) -> None:
    async with connect(server.ws) as socket:
        heard: list[Any] = []
        await socket.send(
            json.dumps({"type": "response.create", "model": "auto", "input": "a long word " * 20})
        )
        steered = False
        async with asyncio.timeout(60):
            async for frame in socket:
                event = json.loads(frame)
                heard.append(event)
                if event["type"] == "response.output_text.delta" and not steered:
                    steered = True
                    first = heard[0]["response"]["id"]
                    steer = {"type": "response.steer", "previous_response_id": first, "input": "shorter"}
                    await socket.send(json.dumps(steer))
                if event["type"] == "response.completed":
                    break
        ends = [event for event in heard if event["type"] in ENDS]
        assert [event["type"] for event in ends] == ["response.incomplete", "response.completed"]
        assert stored(tmp_path, ends[1]["response"]["id"])
        # The next turn on the same socket is answered as any other.
        last = ends[1]["response"]["id"]
        again = {"type": "response.create", "model": "auto", "input": "on", "previous_response_id": last}
        await socket.send(json.dumps(again))
        async with asyncio.timeout(60):
            async for frame in socket:
                event = json.loads(frame)
                if event["type"] in ENDS:
                    assert event["type"] == "response.completed"
                    assert stored(tmp_path, event["response"]["id"])
                    return


async def test_a_socket_that_is_handed_over_ends_its_turn_first(server: RunningServer) -> None:
    async with connect(server.ws) as socket:
        await socket.send(json.dumps({"type": "response.create", "model": "auto", "input": "word " * 10}))
        kinds: list[str] = []
        with contextlib.suppress(ConnectionClosed):
            while True:
                kinds.append(json.loads(await socket.recv())["type"])
                if kinds[-1] == "response.output_text.delta" and kinds.count(kinds[-1]) == 1:
                    for reader in tuple(server.gateway._readers.values()):
                        reader.close_when_idle()
        assert kinds[-1] == "response.completed"
        assert socket.close_code == 1012
