"""What a hostile, slow or departed client, a full disk, a jump of the clock or a kill may not do to the
rest."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from gateway_support import RunningServer, echo, last_user, scripted_model, serving
from test_websocket_conformance import Wire

from keystroke.config import NamedModel, ServerSettings
from keystroke.errors import ConfigError, Forbidden, QueueFull
from keystroke.gateway import app
from keystroke.gateway.access.keys import LOCAL, Caller, make_key
from keystroke.gateway.access.security import readable_files
from keystroke.gateway.record import tables, writer
from keystroke.gateway.record.store import Store, default_url
from keystroke.gateway.transport import http
from keystroke.gateway.transport.frames import FrameProtocol, WireLimits
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.service import Service
from keystroke.protocol.faults import PreviousResponseNotFound
from keystroke.protocol.items import Item
from keystroke.protocol.response import Response

QUICK = WireLimits(headers=0.3, body=0.3, stall=0.5, connections=8)


def response(name: str, previous: str | None = None, **fields: Any) -> Response:
    return Response(
        id=name, created_at=1, model="m", status="completed", previous_response_id=previous, **fields
    )


def raw(port: int, data: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port))
    made.sendall(data)
    made.settimeout(10)
    return made


def left(connection: socket.socket) -> bool:
    """Whether the server dropped it."""
    try:
        while connection.recv(65_536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that waits for nobody long."""
    monkeypatch.setattr(app, "WireLimits", lambda **_: QUICK)
    with serving(scripted_model(echo)) as running:
        yield running


# Connections


HALVES = {
    "nothing": b"",
    "headers": b"GET /health HTTP/1.1\r\nHost: 127",
    "body": b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{",
}


@pytest.mark.parametrize("half", HALVES)
def test_half_a_request_is_waited_for_a_while_only(quick: RunningServer, half: str) -> None:
    assert left(raw(quick.port, HALVES[half]))


def test_headers_that_come_byte_by_byte_have_one_time_for_all(quick: RunningServer) -> None:
    connection = raw(quick.port, b"")
    try:
        for _ in range(100):
            connection.sendall(b"G")
            time.sleep(0.02)
    except ConnectionError:
        return
    pytest.fail("a byte now and then held the connection")


def test_a_second_request_on_a_kept_connection_is_served_and_half_of_a_third_is_not(
    quick: RunningServer,
) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    connection = raw(quick.port, b"")
    for _ in range(2):
        connection.sendall(request)
        answer = HTTPResponse(connection)
        answer.begin()
        assert (answer.status, bool(answer.read())) == (200, True)
    connection.sendall(b"GET /hea")
    assert left(connection)


async def test_a_websocket_that_is_silent_for_long_is_kept(quick: RunningServer) -> None:
    """A prompt may be read for minutes and an editor may rest: only half a request has a time to end in."""
    for path, asked, answered in (
        ("/v1/responses", {"type": "response.create", "input": "there?"}, "response.created"),
        ("/v1/live", {"type": "buffer.open", "buffer": "b", "text": "", "version": 1}, "ready"),
    ):
        # With room for the rest of the answer: nobody reads it, and the end of the connection is behind it.
        async with websockets.connect(f"ws://127.0.0.1:{quick.port}{path}", max_queue=None) as socket:
            await asyncio.sleep(3 * max(QUICK.headers, QUICK.body))
            await socket.send(json.dumps(asked))
            assert json.loads(await socket.recv())["type"] == answered


def test_open_connections_are_counted_and_no_more_are_taken_than_there_is_room_for(
    quick: RunningServer,
) -> None:
    held = [raw(quick.port, b"") for _ in range(QUICK.connections)]
    time.sleep(0.1)
    assert left(raw(quick.port, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
    assert all(left(connection) for connection in held)
    assert httpx.get(f"{quick.url}/health").status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads_is_dropped(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(app, "WireLimits", lambda **_: QUICK)
    # An answer repeats its instructions, a stream three times: more than the system's buffers hold.
    size = 6_000_000
    words = "word " * (size // 5 // (3 if stream else 1))
    asked = {"input": "x", "instructions": words, "store": False, "stream": stream, "max_output_tokens": 100}
    body = json.dumps(asked).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    with serving(scripted_model(echo, context_length=2 * size)) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect(("127.0.0.1", server.port))
        deaf.sendall(head + body)
        assert peeked(deaf) == b"HTTP/1.1 200"
        deadline = time.monotonic() + 60
        while connections(server):
            assert time.monotonic() < deadline, "the connection stayed"
            time.sleep(0.05)
        assert server.settled()
        heard = 0
        with suppress(ConnectionError):
            while part := deaf.recv(1 << 16):
                heard += len(part)
        assert heard < size


COUNTED = "".join(f"{number}\n" for number in range(1_500))


def count_up(prompt: str) -> str:
    """Counts, and goes on where an answer broke off; without the word, a short answer."""
    question, _, counted = prompt.partition("count:")
    return "ok" if question == prompt else COUNTED[len(counted) :]


def ask_to_count(port: int) -> socket.socket:
    """A connection on which a long answer comes, more than the system's buffers hold; nobody reads it yet."""
    asked = {"prompt": "count:", "stream": True, "logprobs": 20, "max_tokens": len(COUNTED)}
    body = json.dumps(asked).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    return connection


def counted_text(connection: socket.socket) -> str:
    """The text of the whole stream."""
    answer = HTTPResponse(connection)
    answer.begin()
    events = [line[6:] for line in answer.read().splitlines() if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def test_readers_that_stop_give_their_places_to_others_and_lose_nothing() -> None:
    model = scripted_model(count_up)
    with serving(model, concurrent=1) as server, ExitStack() as stack:
        stopped = [stack.enter_context(ask_to_count(server.port)) for _ in range(2)]
        deadline = time.monotonic() + 60
        while sum(work.ticket.paused for work in server.gateway.service.active_work) < len(stopped):
            assert time.monotonic() < deadline, "an answer that nobody reads kept the only place"
            time.sleep(0.02)
        tickets = [work.ticket for work in server.gateway.service.active_work]
        asked = {"prompt": "there?", "priority": "chat"}
        reply = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
        assert reply["choices"][0]["text"] == "ok"
        assert len(tickets) == len(stopped)
        assert all(ticket.paused and not ticket.done for ticket in tickets), "it waited for one of them"
        assert len(server.engines[model.name].live) <= 1, "those without a place hold no memory of the engine"
        with ThreadPoolExecutor() as readers:
            assert list(readers.map(counted_text, stopped)) == [COUNTED] * len(stopped)
        assert server.settled()


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system has no such option")
def test_the_system_holds_little_for_a_reader_that_stops() -> None:
    with app.listen(ServerSettings(port=0)) as listening, socket.socket() as client:
        listening.listen()
        client.connect(listening.getsockname())
        with listening.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == app._UNSENT


def test_a_reader_that_stops_for_long_is_dropped_with_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http, "STALL_TIMEOUT", 1.0)
    with serving(scripted_model(count_up)) as server, ask_to_count(server.port) as stopped:
        assert peeked(stopped) == b"HTTP/1.1 200"
        assert server.settled()
        assert "a client was dropped: The client read nothing for 1 s." in caplog.text
        assert left(stopped)


def peeked(connection: socket.socket) -> bytes:
    """The first bytes of an answer, left to be read."""
    return connection.recv(12, socket.MSG_PEEK | socket.MSG_WAITALL)


def connections(server: RunningServer) -> int:
    import psutil

    here = psutil.Process().net_connections()
    return sum(c.laddr.port == server.port and c.status == "ESTABLISHED" for c in here)


def test_a_client_that_only_asks_is_not_read_faster_than_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames of a megabyte that are answered with as much, and a client that reads nothing."""
    held: list[int] = []
    taken = FrameProtocol.data_received

    def noted(protocol: FrameProtocol, data: bytes) -> None:
        taken(protocol, data)
        waiting: Any = protocol.queue
        held.append(len(protocol._backlog) + sum(len(m.get("text", "")) for m in waiting._queue))

    monkeypatch.setattr(FrameProtocol, "data_received", noted)
    with serving(scripted_model(echo)) as server:
        wire = Wire(server.port, "/v1/responses")
        steer = {"type": "response.steer", "previous_response_id": "resp_x", "input": "x" * 1_000_000}
        frame = json.dumps(steer).encode()
        with suppress(OSError):  # dropped, once too much is owed to it
            for _ in range(200):
                wire.send(1, frame, key=bytes(4))
            pytest.fail("the client was not let go")
    assert max(held) < 4_000_000


# Keys


def test_one_key_does_not_take_all_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYSTROKE_API_KEY", "greedy,other")
    limits = ServerSettings(max_connections=8, max_connections_per_key=3)

    async def run(server: RunningServer) -> None:
        def connect(key: str, path: str = "responses") -> Any:
            address = f"ws://127.0.0.1:{server.port}/v1/{path}"
            return websockets.connect(address, additional_headers={"Authorization": f"Bearer {key}"})

        held = [await connect("greedy"), await connect("greedy"), await connect("greedy", "live")]
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect("greedy")
        assert refused.value.response.status_code == 429
        async with connect("other"):
            pass
        await held.pop().close()
        async with connect("greedy"):
            pass
        for one in held:
            await one.close()

    with serving(scripted_model(echo), server=limits) as server:
        asyncio.run(run(server))


def test_a_key_needs_the_right_to_go_before_others() -> None:
    plain, allowed = Caller("k", "k"), Caller("p", "p", priority=True)
    for caller in (allowed, LOCAL):
        assert Service.priority_and_tier(caller, "ghost", Priority.CHAT, "priority") == (
            Priority.GHOST,
            Tier.PRIORITY,
        )
    for wanted, tier in (("ghost", None), ("edit", None), (None, "priority")):
        with pytest.raises(Forbidden, match="--priority"):
            Service.priority_and_tier(plain, wanted, Priority.CHAT, tier)
    assert Service.priority_and_tier(plain, None, Priority.GHOST) == (
        Priority.GHOST,
        Tier.DEFAULT,
    )  # infill's own
    assert Service.priority_and_tier(plain, "background", Priority.CHAT, "flex") == (
        Priority.BACKGROUND,
        Tier.FLEX,
    )
    assert Service.priority_and_tier(plain, "chat", Priority.BACKGROUND)[0] is Priority.CHAT
    for tier in ("fast", "ultrafast", "warp-9"):  # a client's setting for everything it sends
        assert Service.priority_and_tier(plain, None, Priority.CHAT, tier)[1] is Tier.DEFAULT
    assert Service.priority_and_tier(LOCAL, None, Priority.CHAT, "ultrafast")[1] is Tier.ULTRAFAST
    assert Service.priority_and_tier(LOCAL, None, Priority.CHAT, "fast")[1] is Tier.PRIORITY


def test_the_right_is_kept_with_the_key(tmp_path: Path) -> None:
    store = Store(default_url(tmp_path))
    for name, right in (("plain", False), ("hasty", True)):
        store.add_key(make_key(name, priority=right)[0])
    assert {key.name: key.priority for key in tuple(store.keys())} == {"plain": False, "hasty": True}
    store.close()


async def test_keys_take_turns_and_none_takes_the_whole_queue() -> None:
    from keystroke.engine.generation import GenerationParams
    from keystroke.gateway.work.scheduler import Job, Scheduler

    scheduler = Scheduler(scripted_model(echo, step_cost=0.001), concurrent=1, max_queue=8)
    job = Job([65] * 4, GenerationParams(max_tokens=3))
    tickets = {name: [] for name in "ab"}  # type: ignore[var-annotated]
    for _ in range(4):
        tickets["a"].append(scheduler.submit(job, key="a"))
    with pytest.raises(QueueFull, match="of this key"):
        scheduler.submit(job, key="a")
    for _ in range(2):
        tickets["b"].append(scheduler.submit(job, key="b"))
    order = ["ab"[ticket in tickets["b"]] for ticket in scheduler._waiting]
    assert order == ["a", "b", "a", "b", "a", "a"]
    assert [t for t in scheduler._waiting if t.key == "a"] == tickets["a"]
    for _ in range(8):
        scheduler.submit(job, key="local") if len(scheduler._waiting) < 8 else None  # alone on its machine
    scheduler.start()
    for ticket in (*tickets["a"], *tickets["b"]):
        async for _item in ticket:
            pass
    await scheduler.stop()


async def test_keys_take_turns_at_a_server_elsewhere_too() -> None:
    from keystroke.engine.generation import GenerationParams
    from keystroke.engine.remote import Endpoint, RemoteModel
    from keystroke.gateway.work.remote import RemoteJob, RemoteScheduler

    order: list[str] = []

    def heard(prompt: str) -> str:
        order.append(last_user(prompt))
        return "yes"

    with serving(scripted_model(heard, "elsewhere")) as server:
        model = RemoteModel(Endpoint(f"{server.url}/v1"), "elsewhere")
        scheduler = RemoteScheduler(model, "far", concurrent=1, max_queue=8)

        def ask(key: str, number: int) -> Any:
            said = [{"role": "user", "content": f"{key}{number}"}]
            return scheduler.submit(RemoteJob(GenerationParams(), messages=said), key=key)

        tickets = [ask("a", number) for number in range(4)]
        with pytest.raises(QueueFull, match="of this key"):
            ask("a", 4)
        tickets += [ask("b", number) for number in range(2)]
        for ticket in tickets:
            async for _item in ticket:
                pass
        await scheduler.stop()
    assert order == ["a0", "b0", "a1", "b1", "a2", "a3"]


async def test_more_ghost_text_than_one_types_waits_like_chats() -> None:
    from keystroke.engine.generation import GenerationParams
    from keystroke.gateway.work.registry import ModelRegistry, local_entry
    from keystroke.gateway.work.scheduler import Job
    from keystroke.gateway.work.service import MAX_URGENT_PER_KEY

    entry = local_entry("echo", scripted_model(echo), named=NamedModel(concurrent=1))
    service = Service(ModelRegistry([entry]), None, speculation=False)
    job = Job([65] * 4, GenerationParams(max_tokens=3))
    made = [
        service.submit(entry, job, Caller("k", "k"), priority=Priority.GHOST).ticket.priority
        for _ in range(MAX_URGENT_PER_KEY + 2)
    ]
    assert made == [Priority.GHOST] * MAX_URGENT_PER_KEY + [Priority.CHAT] * 2
    assert not job.drafts  # speculation is off, so nobody drafts


# Origins and roots


def test_a_browser_is_told_that_an_allowed_page_may_ask_and_another_is_not() -> None:
    server = ServerSettings(origins=("https://ok.example",))
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serving(scripted_model(echo), server=server) as running, httpx.Client(base_url=running.url) as http:
        allowed = http.options("/v1/responses", headers={**asks, "Origin": "https://ok.example"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://ok.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
        other = http.options("/v1/responses", headers={**asks, "Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        answer = http.get("/v1/models", headers={"Origin": "https://ok.example"})
        assert answer.headers["access-control-allow-origin"] == "https://ok.example"
        assert http.get("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403


def test_tasks_are_for_programs_and_for_pages_of_the_server_or_allowed_by_name() -> None:
    with serving(scripted_model(echo), server=ServerSettings(origins=("https://ok.example",))) as running:
        own = f"http://127.0.0.1:{running.port}"
        statuses = {
            origin: httpx.get(
                f"{running.url}/v1/tasks", headers={"Origin": origin} if origin else {}
            ).status_code
            for origin in ("", own, "https://ok.example", "http://localhost:3000", "http://[")
        }
    assert statuses == {
        "": 200,
        own: 200,
        "https://ok.example": 200,
        "http://localhost:3000": 403,
        "http://[": 403,
    }


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),  # an image or a link of another site sends no Origin
        ({"Sec-Fetch-Site": "cross-site", "Origin": "https://ok.example"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_requests_that_a_page_of_another_site_causes_are_refused(
    headers: dict[str, str], status: int
) -> None:
    with serving(scripted_model(echo), server=ServerSettings(origins=("https://ok.example",))) as running:
        assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "text/plain;charset=utf-8"]
)
def test_a_page_cannot_send_a_body_that_its_browser_does_not_ask_about(media: str) -> None:
    body = b'{"input": "x", "max_output_tokens": 2}'
    with serving(scripted_model(echo)) as running:
        own = {"Origin": f"http://127.0.0.1:{running.port}"}
        statuses = [
            httpx.post(
                f"{running.url}/v1/responses", content=body, headers={"Content-Type": kind, **more}
            ).status_code
            for kind, more in ((media, {}), (media, own), (media, {"Sec-Fetch-Site": "same-origin"}),
                               ("application/json", own))
        ]  # fmt: skip
    assert statuses == [200, 403, 403, 200]  # a program, such as curl, may say what it likes


def test_a_page_in_an_editor_needs_a_key_for_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    page = {"Origin": "vscode-webview://abc"}
    with serving(scripted_model(echo)) as running:
        assert httpx.get(f"{running.url}/v1/models", headers=page).status_code == 200
        assert httpx.get(f"{running.url}/v1/tasks", headers=page).status_code == 403
        guessed = {**page, "Authorization": "Bearer anything"}
        assert httpx.get(f"{running.url}/v1/tasks", headers=guessed).status_code == 403
    monkeypatch.setenv("KEYSTROKE_API_KEY", "secret")
    with serving(scripted_model(echo)) as running:
        known = {**page, "Authorization": "Bearer secret"}
        assert httpx.get(f"{running.url}/v1/tasks", headers=known).status_code == 200


def test_health_tells_strangers_that_it_runs_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYSTROKE_API_KEY", "secret")
    with serving(scripted_model(echo)) as running, httpx.Client(base_url=running.url) as http:
        assert http.get("/health").json() == {"status": "ok"}
        known = http.get("/health", headers={"Authorization": "Bearer secret"}).json()
        assert known == {"status": "ok", "models": ["echo"]}


def test_files_are_read_for_programs_of_this_machine_inside_the_opened_folders(tmp_path: Path) -> None:
    inside, outside = tmp_path / "work", tmp_path / "other"
    for folder in (inside, outside):
        folder.mkdir()
    (inside / "link").symlink_to(outside)
    some = readable_files(ServerSettings(workspaces=(str(inside),)), None)
    assert some(str(inside / "a.py"))
    assert not some(str(outside / "a.py"))
    assert not some(str(inside / "link" / "a.py"))
    anywhere = readable_files(ServerSettings(), None)
    assert anywhere(str(outside))
    assert not anywhere("/")
    for origin in ("http://localhost:3000", "https://ok.example", "http://["):
        assert not readable_files(ServerSettings(origins=(origin,)), origin)(str(inside))
    assert readable_files(ServerSettings(), "vscode-webview://abc")(str(inside))
    assert not readable_files(ServerSettings(host="0.0.0.0"), None)(str(inside))


# What is kept


async def test_a_conversation_is_not_shortened_in_silence(tmp_path: Path) -> None:
    store = Store(default_url(tmp_path))
    store.save_response("k", [], response("c", previous="b"))
    store.save_response("k", [], response("a"))
    with pytest.raises(PreviousResponseNotFound, match="whole input"):
        await store.chain("c")
    store.save_response("k", [], response("b", previous="a"))
    assert [s.response.id for s in await store.chain("c")] == ["a", "b", "c"]
    with pytest.raises(PreviousResponseNotFound):
        await store.chain("c", longest=2)
    assert await store.chain("z") == []
    store.close()


def test_after_a_restart_a_turn_whose_ancestor_was_not_stored_is_refused(tmp_path: Path) -> None:
    def turn(http: httpx.Client, text: str, **more: Any) -> httpx.Response:
        return http.post("/v1/responses", json={"input": text, **more})

    with serving(scripted_model(echo), folder=tmp_path) as server, httpx.Client(base_url=server.url) as http:
        first = turn(http, "my name is Ann").json()["id"]
        unkept = turn(http, "two", previous_response_id=first, store=False)
        # a turn that is not stored can be continued on a socket only; over HTTP it is unknown already
        second = turn(http, "two", previous_response_id=first).json()["id"]
        assert unkept.status_code == 200
    database = sqlite3.connect(tmp_path / "gateway.db")
    database.execute("DELETE FROM responses WHERE id = ?", (first,))
    database.commit()
    with serving(scripted_model(echo), folder=tmp_path) as server, httpx.Client(base_url=server.url) as http:
        refused = turn(http, "three", previous_response_id=second)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_locked_database_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BUSY_TIMEOUT_MS", 50)
    store = Store(default_url(tmp_path))
    lock = sqlite3.connect(tmp_path / "gateway.db")
    lock.execute("BEGIN EXCLUSIVE")
    store.save_response("k", [Item(role="user", content="hi")], response("kept"))
    assert (await store.response("kept")) is not None  # read from memory
    assert not await store.flush()
    lock.rollback()
    for _ in range(200):
        if await store.flush():
            break
        await asyncio.sleep(0.05)
    assert not store._writer.pending
    store.close()
    again = Store(default_url(tmp_path))
    assert (await again.response("kept")) is not None
    again.close()


def test_what_cannot_be_kept_is_not_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LAST_TRIES", 0.0)
    with serving(scripted_model(echo), folder=tmp_path) as server, httpx.Client(base_url=server.url) as http:
        assert server.gateway.store is not None
        monkeypatch.setattr(
            server.gateway.store._writer, "_commit", lambda _batch: False
        )  # as on a full disk
        assert http.post("/v1/responses", json={"input": "hi", "store": False}).status_code == 200
        assert not server.gateway.store._writer.flush()
        plain = http.post("/v1/responses", json={"input": "hi"})
        assert (plain.status_code, plain.json()["store"]) == (200, False)
        for asked in ({"store": True}, {"background": True}):
            refused = http.post("/v1/responses", json={"input": "hi", **asked})
            assert (refused.status_code, refused.json()["error"]["param"]) == (503, "store")


def test_a_background_response_that_a_kill_cut_off_is_known_and_incomplete(tmp_path: Path) -> None:
    slow = scripted_model(lambda _prompt: "on and on " * 10_000, step_cost=0.01)
    with serving(slow, folder=tmp_path) as server, httpx.Client(base_url=server.url) as http:
        made = http.post("/v1/responses", json={"input": "long", "background": True}).json()["id"]
        assert server.gateway.store is not None
        server.gateway.store._writer.flush()
        rows = sqlite3.connect(tmp_path / "gateway.db").execute("SELECT * FROM responses").fetchall()
    database = sqlite3.connect(tmp_path / "gateway.db")  # as a kill would have left it
    database.execute("DELETE FROM responses")
    database.executemany(f"INSERT INTO responses VALUES ({','.join('?' * len(rows[0]))})", rows)
    database.commit()
    with serving(scripted_model(echo), folder=tmp_path) as server, httpx.Client(base_url=server.url) as http:
        found = http.get(f"/v1/responses/{made}").json()
        assert found["status"] == "incomplete"
        assert found["incomplete_details"] == {"reason": "server_restarted"}


def test_a_running_response_that_is_deleted_stays_away(tmp_path: Path) -> None:
    slow = scripted_model(lambda _prompt: "on and on " * 10_000, step_cost=0.005)
    with serving(slow, folder=tmp_path) as server, httpx.Client(base_url=server.url) as http:
        made = http.post("/v1/responses", json={"input": "long", "background": True}).json()["id"]
        assert http.delete(f"/v1/responses/{made}").json()["deleted"] is True
        assert server.settled()
        assert http.get(f"/v1/responses/{made}").status_code == 404


async def test_a_key_over_its_quota_loses_its_oldest_and_nobody_elses(tmp_path: Path) -> None:
    store = Store(default_url(tmp_path), quota_mb=1)
    big = [Item(role="user", content="x" * 300_000)]
    store.save_response("other", big, response("theirs"))
    for number in range(6):
        store.save_response("k", big, response(f"r{number}"))
        await store.flush()
    kept = [n for n in range(6) if await store.response(f"r{n}") is not None]
    assert kept == [3, 4, 5]
    assert await store.response("theirs") is not None
    store.save_response("k", [Item(role="user", content="x" * 2_000_000)], response("huge"))
    await store.flush()
    assert await store.response("huge") is None
    assert [n for n in range(6) if await store.response(f"r{n}") is not None] == kept
    store.close()


def test_items_that_no_prompt_holds_are_not_kept(tmp_path: Path) -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x" * 100_000}]}
    with serving(scripted_model(echo), folder=tmp_path) as server, httpx.Client(base_url=server.url) as http:
        body = {"input": [thought, {"role": "user", "content": "hi"}]}
        made = http.post("/v1/responses", json=body).json()["id"]
        turn = server.gateway.endpoints.responses.conversations._turns[made][1]
        assert [item.type for item in turn.items if item.role == "user"] == ["message"]
    assert (tmp_path / "gateway.db").stat().st_size < 200_000
    (size,) = sqlite3.connect(tmp_path / "gateway.db").execute("SELECT size FROM responses").fetchone()
    assert size < 5000


def test_large_metadata_is_refused_with_its_place() -> None:
    with serving(scripted_model(echo)) as server:
        for metadata in ({"a": "b" * 513}, {str(n): "v" for n in range(17)}):
            refused = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", "metadata": metadata})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "metadata")


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_the_database_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    before = os.umask(0)
    try:
        store = Store(default_url(folder))
        store.save_response("k", [], response("a"))
        store._writer.flush()
        modes = {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        assert modes == {0o600}
        store.close()
        (folder / "gateway.db").chmod(0o644)  # as an earlier version left it
        Store(default_url(folder)).close()
        assert stat.S_IMODE((folder / "gateway.db").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match="everybody may write"):
            Store(default_url(folder))
    finally:
        os.umask(before)


async def test_a_clock_that_jumps_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(default_url(tmp_path), retention_days=30)
    store.save_response("k", [], response("a"))
    await store.flush()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 400 * 86_400)
    assert not store._recently_used()  # a start after the jump waits
    assert not store._clock.ran_evenly()  # a jump in the middle is seen
    assert store._clock.ran_evenly()  # and once it runs evenly again, that is the time
    assert await store.response("a") is not None
    store.close()


# Malformed requests

TOOLS = [{"type": "function", "name": "f"}]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Origin": "http://["}, {}, 403),
        ({"Host": "["}, {}, 403),
        ({}, {"text": {"format": "json"}}, 400),
        ({}, {"tools": TOOLS, "tool_choice": {"type": "function", "name": {}}}, 400),
        ({}, {"tools": TOOLS, "tool_choice": {"name": []}}, 400),
        ({}, {"tools": TOOLS, "tool_choice": {"type": "function"}}, 400),
        ({}, {"tools": TOOLS, "tool_choice": {"type": 1}}, 400),
        ({}, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, 400),
        ({}, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [1]}}, 400),
        ({}, {"tools": TOOLS, "tool_choice": [1]}, 400),
        ({}, {"tool_choice": {"name": []}}, 400),
        ({}, {"tool_choice": "sometimes"}, 400),
        ({}, {"tool_choice": {"type": "web_search"}}, 200),
        ({}, {"reasoning": {"effort": {}}}, 400),
        ({}, {"reasoning": {"effort": "none"}}, 200),
    ],
)
def test_nothing_malformed_is_a_fault_of_the_server(
    headers: dict[str, str], body: dict[str, Any], status: int
) -> None:
    with serving(scripted_model(echo)) as server:
        answer = httpx.post(f"{server.url}/v1/responses", json={"input": "hi", **body}, headers=headers)
    assert answer.status_code == status
