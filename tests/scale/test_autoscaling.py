"""Replicas are added as load rises and taken away as it falls, by Ray's own autoscaler."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="the [scale] extra is not installed")

from scale_support import HANG, settings_for, with_table

from keystroke.config import NamedModel
from keystroke.scale import application as applications
from keystroke.scale.application import EchoLoader, application
from keystroke.scale.cluster import connect_ray
from keystroke.scale.rollout import deploy
from keystroke.scale.served_models import ECHO, NAME

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.timeout(3 * HANG),
    pytest.mark.skipif("TEST_SCALE" not in os.environ, reason="takes minutes: make test-scale"),
]


def engines(serve: Any) -> int:
    states = serve.status().applications[NAME].deployments[f"engine-{ECHO}"].replica_states
    return int(states.get("RUNNING", 0))


async def test_replicas_follow_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applications, "RISE", 2.0)
    monkeypatch.setattr(applications, "FALL", 4.0)
    table = NamedModel(replicas=1, max_replicas=3)
    settings = with_table(settings_for(tmp_path, scale__gateways=1), ECHO, table)
    url = f"http://127.0.0.1:{settings.server.port}"
    statuses: list[str] = []
    quiet = asyncio.Event()

    async def asks(client: httpx.AsyncClient, who: int) -> None:
        while not quiet.is_set():
            body = {"model": "auto", "input": f"{who} " + "word " * 40}
            answer = (await client.post("/v1/responses", json=body)).json()
            statuses.append(answer.get("status") or str(answer))

    async def becomes(serve: Any, wanted: int) -> None:
        async with asyncio.timeout(HANG):
            while await asyncio.to_thread(engines, serve) != wanted:  # noqa: ASYNC110 - Ray tells nobody
                await asyncio.sleep(1)

    with connect_ray(settings) as serve:
        deploy(serve, application(settings, echo=EchoLoader(step_cost=0.02)), NAME)
        assert engines(serve) == 1
        async with httpx.AsyncClient(base_url=url, timeout=HANG) as client:
            load = [asyncio.create_task(asks(client, who)) for who in range(9)]
            await becomes(serve, 3)
            quiet.set()
            await asyncio.gather(*load)
            await becomes(serve, 1)
            assert (await client.post("/v1/responses", json={"model": "auto", "input": "still"})).is_success
    assert set(statuses) == {"completed"}
