"""A model whose chat template came from elsewhere is served like any other, and holds up nobody."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import httpx
import pytest
from gateway_support import TEMPLATE, scripted_model, serving
from test_resume import create, read, said, script, socket

from keystroke.engine import templates
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate

HOSTILE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def foreign(template: str) -> Model:
    model = scripted_model(script, step_cost=0.002)
    return dataclasses.replace(model, chat=ChatTemplate(template, foreign=True))


async def test_an_answer_is_steered_with_input_that_only_the_template_can_join() -> None:
    with serving(foreign(TEMPLATE)) as server:
        async with socket(server) as wire:
            await create(wire, "endless")
            heard = await read(wire, 8)
            steer = {"type": "response.steer", "previous_response_id": heard[0]["response"]["id"]}
            await wire.send(json.dumps({**steer, "input": "stop <now> "}))
            heard += await read(wire)
            assert heard[-1]["response"]["incomplete_details"] == {"reason": "steered"}
            assert said(await read(wire)) == "ten words"
        assert server.settled()


async def test_a_hostile_template_fails_its_own_requests_and_stalls_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "SECONDS", 1.5)
    with serving(foreign(HOSTILE)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            asked = asyncio.create_task(http.post("/v1/responses", json={"input": "hi"}))
            served = 0
            while not asked.done():
                assert (await http.get("/health")).status_code == 200
                served += 1
                await asyncio.sleep(0.05)
            assert served > 5, "others were not served meanwhile"
            failed = asked.result()
            assert (failed.status_code, failed.json()["error"]["code"]) == (500, "model_damaged")
