"""The application on a real local Ray: replicas are lost and replaced under load, and no turn is.

One Ray serves the whole file: starting one takes ten seconds on two cores.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("ray", reason="the [scale] extra is not installed")

from scale_support import HANG, Load, descendants, kill, replica_pids, settings_for, until, with_table

from keystroke.config import NamedModel, Settings
from keystroke.gateway.access.keys import Key, make_key
from keystroke.gateway.record.store import Store, default_url
from keystroke.scale.application import EchoLoader, application
from keystroke.scale.cluster import connect_ray
from keystroke.scale.rollout import deploy
from keystroke.scale.served_models import ECHO, NAME

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(3 * HANG)]

LIMIT = 240  # requests a minute and key
LONG = pytest.mark.skipif("TEST_SCALE" not in os.environ, reason="takes half a minute: make test-scale")


@pytest.fixture(scope="module")
def keys() -> list[tuple[Key, str]]:
    return [*(make_key(f"developer {at}") for at in range(10)), make_key("limited", monthly_tokens=20)]


@pytest.fixture(scope="module")
def settings(keys: list[tuple[Key, str]], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("scale")
    traces = str(folder / "traces")
    made = settings_for(folder, scale__gateways=3, scale__replicas=4, scale__traces=traces)
    with closing(Store(default_url(folder))) as store:
        for key, _ in keys:
            store.add_key(key)
    return with_table(made, ECHO, NamedModel(requests_per_minute=LIMIT))


@pytest.fixture(scope="module")
def serve(settings: Settings) -> Iterator[Any]:
    with connect_ray(settings) as module:
        deploy(module, application(settings, echo=EchoLoader(step_cost=0.004)), NAME)
        yield module
        started = [p for p, title in descendants() if "ray" in title or "gcs_server" in title]
    assert len(started) > 9  # head and replicas
    assert not psutil.wait_procs(started, timeout=HANG)[1]


@pytest.fixture
def url(serve: Any, settings: Settings) -> str:
    return f"http://127.0.0.1:{settings.server.port}"


def test_nothing_listens_beyond_loopback(url: str) -> None:
    own = psutil.Process().children(recursive=True)
    open_ports = [
        (p.name(), c.laddr)
        for p in own
        if p.is_running()
        for c in p.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert open_ports
    beyond = [where for where in open_ports if where[1].ip.removeprefix("::ffff:") != "127.0.0.1"]
    assert not beyond


def test_replicas_give_way_to_other_programs_no_more_than_the_command_does(url: str) -> None:
    pids = [*replica_pids("gateway"), *replica_pids("engine-echo")]
    assert {psutil.Process(pid).nice() for pid in pids} == {psutil.Process().nice()}


async def test_turns_of_a_conversation_find_their_prefix_on_the_replica_that_holds_it(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=HANG) as client:
        for who in range(6):
            previous, before = None, 0
            for turn in range(3):
                body = {"model": "auto", "input": f"{who}/{turn} " + "w " * 100}
                if previous:
                    body["previous_response_id"] = previous
                told = (await client.post("/v1/responses", json=body)).json()
                receipt = told["receipt"]
                assert receipt["reused_tokens"] >= before
                before, previous = receipt["input_tokens"], told["id"]


async def test_requests_with_the_turn_state_of_a_reply_reach_the_engine_that_made_it(url: str) -> None:
    """Through three gateways; without the state, each conversation has an engine of its own."""
    fresh = httpx.Limits(max_keepalive_connections=0)  # a connection each: the system deals them out
    async with httpx.AsyncClient(base_url=url, timeout=HANG, limits=fresh) as client:

        async def ask(text: str, state: str | None) -> tuple[str, int]:
            body = {"model": "auto", "instructions": "w " * 100, "input": text, "max_output_tokens": 1}
            sent = {"x-codex-turn-state": state} if state else {}
            told = await client.post("/v1/responses", json=body, headers=sent)
            return told.headers["x-codex-turn-state"], told.json()["receipt"]["reused_tokens"]

        state, _ = await ask("0", None)
        later = [await ask(f"{n}", state) for n in range(1, 9)]
    assert {repeated for repeated, _ in later} == {state}
    assert min(reused for _, reused in later) >= 200


async def test_losing_an_engine_and_a_gateway_under_load_loses_no_turn(
    url: str, settings: Settings, keys: list[tuple[Key, str]]
) -> None:
    load = Load(url, [token for _, token in keys[:8]])
    talking = [asyncio.create_task(load.converse(who)) for who in range(8)]
    async with asyncio.timeout(HANG):
        await load.reaches(10)
        kill(replica_pids("engine-echo")[0])
        await load.reaches(20)
        kill(replica_pids("gateway")[0])
        await load.reaches(35)
    load.stop = True
    await asyncio.gather(*talking)
    assert not load.failures
    assert set(load.terminal.values()) == {1}
    async with httpx.AsyncClient(base_url=url, timeout=HANG) as client:
        for name, asked in load.answered.items():
            stored = (await client.get(f"/v1/responses/{name}", headers=load.owner(asked))).json()
            assert stored["output"][0]["content"][0]["text"] == f"You said: {asked}"
    with until("a whole set of replicas") as wait:
        wait(lambda: len(replica_pids("engine-echo")) == 4 and len(replica_pids("gateway")) == 3)


def test_spans_of_gateway_router_and_engine_belong_together(url: str, settings: Settings) -> None:
    parent = "4bf92f3577b34da6a3ce929d0e0e4736"
    header = {"traceparent": f"00-{parent}-00f067aa0ba902b7-01"}
    answer = httpx.post(
        f"{url}/v1/responses", json={"model": "auto", "input": "hi"}, headers=header, timeout=HANG
    )
    assert answer.status_code == 200
    folder = Path(str(settings.scale.traces))

    def names() -> set[str]:
        lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
        return {httpx.Response(200, content=x.encode()).json()["name"] for x in lines if parent in x}

    with until("the spans") as wait:
        wait(lambda: {"gateway", "work", "route", "engine"} <= names())


@LONG
async def test_a_rolling_update_under_load_drops_no_turn(
    url: str, serve: Any, settings: Settings, keys: list[tuple[Key, str]]
) -> None:
    old = set(replica_pids("engine-echo") + replica_pids("gateway"))
    load = Load(url, [token for _, token in keys[:8]])
    talking = [asyncio.create_task(load.converse(who, words=40)) for who in range(6)]
    await asyncio.sleep(0.5)
    made = application(settings, echo=EchoLoader(step_cost=0.004))
    await asyncio.to_thread(deploy, serve, made, NAME)
    load.stop = True
    await asyncio.gather(*talking)
    assert not load.failures
    assert len(load.answered) > 20
    assert set(load.terminal.values()) == {1}
    with until("the end of the old replicas") as wait:
        wait(lambda: not old & set(replica_pids("engine-echo") + replica_pids("gateway")))


async def test_a_spent_budget_is_refused_by_every_gateway_and_only_for_its_key(
    url: str, keys: list[tuple[Key, str]]
) -> None:
    fresh = httpx.Limits(max_keepalive_connections=0)  # a connection each: the system deals them out
    async with httpx.AsyncClient(base_url=url, timeout=HANG, limits=fresh) as client:

        async def ask(who: int) -> str:
            body = {"model": "auto", "input": "x " * 20, "max_output_tokens": 1}
            told = await client.post(
                "/v1/responses", json=body, headers={"Authorization": f"Bearer {keys[who][1]}"}
            )
            return str(told.json()["error"]["code"]) if told.is_error else "answered"

        assert await ask(10) == "answered"
        async with asyncio.timeout(HANG):
            while {await ask(10) for _ in range(9)} != {"budget_exceeded"}:  # noqa: ASYNC110 - it is stored
                await asyncio.sleep(3)  # below the requests a minute of a key
        assert await ask(9) == "answered"


async def test_three_gateways_admit_exactly_one_quota(url: str, keys: list[tuple[Key, str]]) -> None:
    token = keys[8][1]
    with until("three gateways") as wait:
        wait(lambda: len(replica_pids("gateway")) == 3)
    loop = asyncio.get_running_loop()
    began = loop.time()
    # A connection each: the system deals them out to all three.
    each = httpx.Limits(max_connections=40, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, timeout=HANG, limits=each, headers=headers) as client:

        async def asked() -> int:
            body = {"model": "auto", "input": "x", "max_output_tokens": 1}
            return (await client.post("/v1/responses", json=body)).status_code

        codes: list[int] = []
        while 429 not in codes:  # a slow machine needs more: places come back meanwhile
            codes += await asyncio.gather(*(asked() for _ in range(LIMIT + 150)))
    refill = int((loop.time() - began) * LIMIT / 60) + 1
    assert set(codes) == {200, 429}
    assert LIMIT <= codes.count(200) <= LIMIT + refill


@pytest.mark.model
async def test_two_kinds_of_replicas_serve_one_name(serve: Any, tmp_path: Path) -> None:
    """As a team runs them: the small model completes code, and another one, with places for several answers
    in each replica, holds conversations. Clients ask for `auto`."""
    kinds = settings_for(tmp_path, scale__gateways=1)
    kinds = with_table(kinds, "embedded", NamedModel(role="fast"))
    kinds = with_table(kinds, ECHO, NamedModel(role="chat", replicas=2, cost_per_million_output=1.0))
    with closing(Store(default_url(tmp_path))):
        pass
    loaders = {ECHO: EchoLoader(max_batch=4)}
    deploy(serve, application(kinds, loaders=loaders), "kinds")
    try:
        parts = serve.status().applications["kinds"].deployments
        assert set(parts) == {"gateway", "engine-embedded", "engine-echo"}
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{kinds.server.port}", timeout=HANG
        ) as client:

            async def ghost() -> Any:
                body = {"model": "auto", "prompt": "def add(a, b):\n    return a", "max_tokens": 8}
                return (await client.post("/v1/completions", json=body)).json()

            async def chat(who: int) -> Any:
                return (
                    await client.post("/v1/responses", json={"model": "auto", "input": f"hi {who}"})
                ).json()

            ghosts, chats = await asyncio.gather(
                asyncio.gather(*(ghost() for _ in range(3))), asyncio.gather(*map(chat, range(6)))
            )
        assert {told["model"] for told in ghosts} == {"embedded"}
        assert len({told["choices"][0]["text"] for told in ghosts}) == 1
        assert {told["routing"]["model"] for told in chats} == {ECHO}
        said = [told["output"][0]["content"][0]["text"] for told in chats]
        assert said == [f"You said: hi {who}" for who in range(6)]
        assert all(told["receipt"]["cost"] > 0 for told in chats)
    finally:
        await asyncio.to_thread(serve.delete, "kinds")


@LONG
@pytest.mark.model
async def test_the_embedded_model_says_the_same_though_its_replica_is_killed(
    serve: Any, tmp_path: Path
) -> None:
    plain = settings_for(tmp_path, scale__gateways=1, scale__replicas=2)
    with closing(Store(default_url(tmp_path))):
        pass
    deploy(serve, application(plain), "embedded")
    body = {
        "model": "auto",
        "prompt": "import json\n\n\ndef read(path):\n",
        "max_tokens": 160,
        "stream": True,
    }
    address = f"http://127.0.0.1:{plain.server.port}"

    def worked(pid: int) -> float:
        """The one that has this prompt's prefix has worked more than the other."""
        return float(psutil.Process(pid).cpu_times().user)

    async def completed(killing: bool) -> str:
        said = ""
        async with (
            httpx.AsyncClient(base_url=address, timeout=HANG) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    told = json.loads(line[6:])
                    assert "error" not in told
                    said += told["choices"][0]["text"] if told["choices"] else ""
                    if killing and len(said) > 20:
                        killing = False
                        kill(max(replica_pids("engine-embedded"), key=worked))
        return said

    try:
        whole = await completed(False)
        assert len(whole) > 100
        assert await completed(True) == whole
    finally:
        await asyncio.to_thread(serve.delete, "embedded")
