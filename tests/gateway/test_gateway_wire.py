"""The wire in use and abuse: each request ends once, each refusal is typed, nobody else is touched."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke.config import NamedModel, ServerSettings
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate
from keystroke.gateway.access.keys import make_key
from keystroke.gateway.record.store import Store, default_url
from keystroke.gateway.transport.socket import SocketLimits

TERMINAL = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}


def script(prompt: str) -> str:
    said = last_user(prompt)
    if "endless" in said:
        return "z" * 100_000
    return f"You said: {said}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    limits = ServerSettings(max_frame_bytes=200_000)
    with serving(scripted_model(script, step_cost=0.001, context_length=4000), server=limits) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        assert request.getfixturevalue("server").settled(), "an answer or a session was left behind"


class Wire:
    """A raw client: JSON out, JSON in."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self.connection = connection

    async def send(self, **event: Any) -> None:
        await self.connection.send(json.dumps(event))

    async def create(self, text: str, **fields: Any) -> None:
        await self.send(type="response.create", input=text, store=False, **fields)

    async def receive(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await asyncio.wait_for(self.connection.recv(), 60))
        return event

    async def until(self, *kinds: str) -> dict[str, Any]:
        while True:
            event = await self.receive()
            if event["type"] in kinds or (not kinds and event["type"] in TERMINAL):
                return event

    async def quiet(self, seconds: float = 0.1) -> list[str]:
        """Everything that still comes within that time."""
        seen: list[str] = []
        try:
            async with asyncio.timeout(seconds):
                while True:
                    seen.append(json.loads(await self.connection.recv())["type"])
        except TimeoutError:
            return seen


@asynccontextmanager
async def wire(server: RunningServer, **options: Any) -> AsyncIterator[Wire]:
    async with websockets.connect(server.ws, compression=None, max_size=None, **options) as connection:
        yield Wire(connection)


def said(event: dict[str, Any]) -> str:
    return "".join(p["text"] for i in event["response"]["output"] for p in i.get("content", ()))


# Turns


async def test_turns_on_one_socket_send_only_what_is_new_and_reuse_the_rest(server: RunningServer) -> None:
    async with wire(server) as w:
        await w.create("first " * 50)
        one = (await w.until())["response"]
        await w.create("second", previous_response_id=one["id"])
        two = await w.until()
    assert said(two) == "You said: second"
    receipt = two["response"]["receipt"]
    assert receipt["reused_tokens"] >= one["usage"]["total_tokens"] - 2
    assert receipt["computed_tokens"] < 60


async def test_a_warm_up_is_answered_at_once_and_the_turn_after_it_is_warm(server: RunningServer) -> None:
    async with wire(server) as w:
        items = [{"role": "developer", "content": "rules " * 100}]
        await w.send(type="response.create", input=items, generate=False, store=False)
        warm = await w.until()
        assert warm["type"] == "response.completed"
        assert warm["response"]["output"] == []
        assert await asyncio.to_thread(server.settled)
        await w.create("hello", previous_response_id=warm["response"]["id"])
        turn = await w.until()
    assert said(turn) == "You said: hello"
    assert turn["response"]["receipt"]["reused_tokens"] > 500


async def test_lanes_run_side_by_side_and_echo_their_name(server: RunningServer) -> None:
    async with wire(server) as w:
        await w.create("endless", stream_id="long")
        await w.until("response.output_text.delta")
        await w.create("short", stream_id="quick")
        events = []
        while True:
            event = await w.receive()
            events.append(event)
            if event["type"] in TERMINAL:
                break
        assert event["stream_id"] == "quick"
        assert said(event) == "You said: short"
        assert {e["stream_id"] for e in events} == {"long", "quick"}


async def test_background_work_reports_on_its_own_lane_while_turns_go_on(server: RunningServer) -> None:
    async with wire(server) as w:
        await w.send(type="response.create", input="endless", background=True)
        background = await w.until("response.created")
        assert background["stream_id"].startswith("background_")
        await w.create("quick one")
        turn = await w.until()
        assert "stream_id" not in turn
        assert said(turn) == "You said: quick one"
        await w.send(type="response.cancel", response_id=background["response"]["id"])
        ended = await w.until()
        assert (ended["type"], ended["stream_id"]) == ("response.cancelled", background["stream_id"])


async def test_queued_responses_are_told_their_position(tmp_path: Path) -> None:
    with serving(scripted_model(script, step_cost=0.002), concurrent=1) as server:
        async with wire(server) as w:
            await w.create("endless", stream_id="a")
            first = await w.until("response.created")
            await w.create("b", stream_id="b")
            await w.create("c", stream_id="c")
            positions: dict[str, list[int]] = {"b": [], "c": []}
            ended = 0
            while ended < 2:
                event = await w.receive()
                if event["type"] == "response.queued":
                    positions[event["stream_id"]].append(event["response"]["queue_position"])
                    if positions == {"b": [1], "c": [2]}:
                        await w.send(type="response.cancel", response_id=first["response"]["id"])
                elif event["type"] == "response.completed":
                    ended += 1
        assert positions == {"b": [1], "c": [2, 1]}


# Stopping


async def test_a_cancel_event_ends_the_response_once_within_a_step(server: RunningServer) -> None:
    engine = server.engines["echo"]
    async with wire(server) as w:
        await w.create("endless")
        created = await w.until("response.created")
        await w.until("response.output_text.delta")
        await w.send(type="response.cancel", response_id=created["response"]["id"])
        ended = await w.until()
        steps = engine.steps
        assert ended["type"] == "response.cancelled"
        assert ended["response"]["status"] == "cancelled"
        assert not set(await w.quiet()) & TERMINAL
        assert engine.steps <= steps + 1
        await w.create("still here")
        assert said(await w.until()) == "You said: still here"


async def test_http_cancel_stops_a_stream_of_another_connection(server: RunningServer) -> None:
    async with wire(server) as w, httpx.AsyncClient(base_url=server.url) as http:
        await w.create("endless")
        created = await w.until("response.created")
        answer = await http.post(f"/v1/responses/{created['response']['id']}/cancel")
        assert answer.json()["status"] == "cancelled"
        assert (await w.until())["type"] == "response.cancelled"


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_socket_that_goes_away_stops_its_answers_and_no_others(
    server: RunningServer, how: str
) -> None:
    async with wire(server) as other:
        await other.create("endless")
        await other.until("response.output_text.delta")
        async with wire(server) as w:
            await w.create("endless", stream_id="a")
            await w.create("endless", stream_id="b")
            await w.until("response.output_text.delta")
            assert len(server.gateway.service.active_work) == 3
            if how == "abort":
                w.connection.transport.abort()  # no close frame: how Codex leaves
        for _ in range(400):
            if len(server.gateway.service.active_work) == 1:
                break
            await asyncio.sleep(0.005)
        assert len(server.gateway.service.active_work) == 1
        assert (await other.receive())["type"] == "response.output_text.delta"


async def test_closing_an_sse_stream_stops_its_answer(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        body = {"input": "endless", "stream": True}
        async with http.stream("POST", "/v1/responses", json=body) as answer:
            async for line in answer.aiter_lines():
                if "output_text.delta" in line:
                    break
    assert server.settled()


async def test_hanging_up_on_a_plain_request_stops_its_answer(server: RunningServer) -> None:
    engine = server.engines["echo"]
    before = engine.steps
    async with httpx.AsyncClient(base_url=server.url) as http:
        with pytest.raises(httpx.ReadTimeout):
            await http.post("/v1/responses", json={"input": "endless"}, timeout=0.2)
    assert server.settled()
    assert engine.steps > before


async def test_a_slow_reader_pauses_only_itself(server: RunningServer) -> None:
    """It reads nothing while the server has megabytes to say: its answer waits, others run."""
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"model": "echo", "input": "endless", "stream": True, "store": False}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    raw.sendall(head + body)
    async with wire(server) as w:
        for turn in range(5):
            await w.create(f"turn {turn}")
            assert said(await w.until()) == f"You said: turn {turn}"
    raw.close()


async def test_a_reader_that_stands_still_is_let_go() -> None:
    model = scripted_model(lambda _p: "z" * 3_000_000, context_length=4_000_000)
    with serving(model, socket_limits=SocketLimits(patience=0.4)) as server:
        # Nobody answers its farewell: it need not wait for that.
        async with websockets.connect(
            server.ws, compression=None, max_queue=1, close_timeout=0.1
        ) as connection:
            sock = connection.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            body = {"type": "response.create", "input": "x", "max_output_tokens": 2_000_000}
            await connection.send(json.dumps(body))
            assert json.loads(await connection.recv())["type"] == "response.created"
            assert await asyncio.to_thread(server.settled, 30.0)


# Steering


async def test_a_steer_splices_in_and_the_successor_reuses_the_cache(server: RunningServer) -> None:
    async with wire(server) as w:
        await w.create("endless", stream_id="s")
        created = await w.until("response.created")
        await w.until("response.output_text.delta")
        await w.send(
            type="response.steer", previous_response_id=created["response"]["id"], input="stop, say hi"
        )
        accepted = await w.until("response.steer.accepted")
        old = await w.until()
        successor = await w.until("response.created")
        new = await w.until()
    assert accepted["steer"]["previous_response_id"] == created["response"]["id"]
    assert old["response"]["incomplete_details"] == {"reason": "steered"}
    assert successor["response"]["previous_response_id"] == old["response"]["id"]
    assert said(new) == "You said: stop, say hi"
    receipt = new["response"]["receipt"]
    assert receipt["reused_tokens"] == old["response"]["usage"]["total_tokens"]
    assert receipt["computed_tokens"] < 60
    assert {e["stream_id"] for e in (accepted, old, successor, new)} == {"s"}


async def test_the_turn_after_a_steer_continues_from_the_successor(server: RunningServer) -> None:
    async with wire(server) as w:
        await w.create("endless")
        created = await w.until("response.created")
        await w.until("response.output_text.delta")
        await w.send(type="response.steer", previous_response_id=created["response"]["id"], input="now this")
        await w.until("response.incomplete")
        new = await w.until()
        await w.create("and then", previous_response_id=new["response"]["id"])
        last = await w.until()
    assert said(last) == "You said: and then"
    assert last["response"]["receipt"]["reused_tokens"] >= new["response"]["usage"]["total_tokens"] - 2


SHOUTING = (
    "{% for m in messages %}[{{ m.role }}]\n"
    "{{ m.content | upper if m.role == 'assistant' else m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


def unjoinable(script: Any, **costs: Any) -> Model:
    """A model whose template changes what the assistant said, so that nothing can be spliced in after it."""
    plain = scripted_model(script, **costs)
    return Model("echo", plain.engine, plain.tokenizer, ChatTemplate(SHOUTING), plain.fim)


async def test_a_steer_that_cannot_be_spliced_becomes_a_successor_at_the_end() -> None:
    model = unjoinable(lambda p: "ok" if "then" in last_user(p) else "slow " * 60, step_cost=0.001)
    with serving(model) as server:
        async with wire(server) as w:
            await w.create("first", stream_id="s")
            created = await w.until("response.created")
            target = created["response"]["id"]
            await w.send(type="response.steer", previous_response_id=target, input="then this")
            await w.until("response.steer.accepted")
            first = await w.until()
            successor = await w.until("response.created")
            second = await w.until()
            await w.create("and then", stream_id="s", previous_response_id=second["response"]["id"])
            assert said(await w.until()) == "ok"
        assert (first["type"], said(first)) == ("response.completed", "slow " * 60)
        assert successor["response"]["previous_response_id"] == target
        assert (second["type"], said(second)) == ("response.completed", "ok")
        assert server.settled()


async def test_a_steer_waits_for_the_tool_results_the_client_owes() -> None:
    def calling(prompt: str) -> str:
        if "[tool]" in prompt:
            return f"seen: {'be kind' in prompt}"
        return "thinking " * 20 + '<tool_call>{"name":"look","arguments":{}}</tool_call>'

    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    with serving(unjoinable(calling, step_cost=0.001)) as server:
        async with wire(server) as w:
            await w.create("go", tools=tools)
            created = await w.until("response.created")
            target = created["response"]["id"]
            await w.send(type="response.steer", previous_response_id=target, input="be kind")
            done = await w.until()
            pending = await w.until("response.steer.pending")
            call = done["response"]["output"][-1]
            assert pending["required_input"] == [
                {"type": "function_call_output", "call_id": call["call_id"], "name": "look"}
            ]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
            await w.send(
                type="response.create", input=[output], tools=tools, store=False, previous_response_id=target
            )
            assert said(await w.until()) == "seen: True"
        assert server.settled()


@pytest.mark.parametrize("when", ["ended", "unknown", "bad input"])
async def test_a_steer_that_cannot_be_used_is_given_back(server: RunningServer, when: str) -> None:
    async with wire(server) as w:
        target, content = "resp_nowhere", "x"
        code = "response_not_found"
        if when != "unknown":
            await w.create("endless" if when == "bad input" else "hi")
            kind = "response.output_text.delta" if when == "bad input" else "response.completed"
            created = await w.until("response.created")
            await w.until(kind)
            target = created["response"]["id"]
            code = "response_already_completed"
        if when == "bad input":
            code = "invalid_input"
            items = [{"type": "message", "role": "assistant", "content": "no"}]
            await w.send(type="response.steer", previous_response_id=target, input=items)
        else:
            await w.send(type="response.steer", previous_response_id=target, input=content)
        failed = await w.until("response.steer.failed")
        assert failed["error"]["code"] == code
        assert failed["steer"]["input"]


# What is refused, and how

WIRE_ERRORS: list[tuple[str, Any, int, str]] = [
    ("malformed JSON", "{nope", 400, "invalid_json"),
    ("not an object", "[1]", 400, "invalid_input"),
    ("no type", "{}", 400, "unknown_event"),
    ("unknown event", {"type": "session.update"}, 400, "unknown_event"),
    ("unknown model", {"type": "response.create", "input": "x", "model": "gpt-99"}, 404, "model_not_found"),
    ("no input", {"type": "response.create"}, 400, "invalid_input"),
    ("empty input", {"type": "response.create", "input": []}, 400, "invalid_input"),
    ("bad field", {"type": "response.create", "input": "x", "top_p": 0}, 400, "invalid_input"),
    ("context too long", {"type": "response.create", "input": "x" * 5000}, 400, "context_length_exceeded"),
    ("oversize frame", {"type": "response.create", "input": "x" * 250_000}, 413, "request_too_large"),
    (
        "wrong priority",
        {"type": "response.create", "input": "x", "stream_id": "a b"},
        400,
        "invalid_stream_id",
    ),
    (
        "unknown previous response",
        {"type": "response.create", "input": "x", "store": False, "previous_response_id": "resp_x"},
        400,
        "previous_response_not_found",
    ),
    ("unknown cancel", {"type": "response.cancel", "response_id": "resp_x"}, 404, "response_not_found"),
    (
        "images",
        {"type": "response.create", "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        400,
        "invalid_input",
    ),
    ("conversation", {"type": "response.create", "input": "x", "conversation": "c"}, 400, "invalid_input"),
    (
        "structured output",
        {"type": "response.create", "input": "x", "text": {"format": {"type": "json_schema"}}},
        400,
        "invalid_input",
    ),
    ("half a surrogate", '{"type":"response.create","input":"\\ud800"}', 400, "invalid_json"),
]


@pytest.mark.parametrize(("name", "frame", "status", "code"), WIRE_ERRORS, ids=[e[0] for e in WIRE_ERRORS])
async def test_a_bad_frame_gets_a_typed_error_and_the_connection_is_kept(
    server: RunningServer, name: str, frame: Any, status: int, code: str
) -> None:
    async with wire(server) as w:
        await w.connection.send(frame if isinstance(frame, str) else json.dumps(frame))
        error = await w.receive()
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", status, code)
        assert error["error"]["message"].endswith(".")
        assert "Traceback" not in error["error"]["message"]
        await w.create("fine")
        assert said(await w.until()) == "You said: fine"


async def test_a_binary_frame_is_refused_and_a_giant_one_closes(server: RunningServer) -> None:
    async with wire(server) as w:
        await w.connection.send(b"\x00\x01")
        assert (await w.receive())["error"]["code"] == "protocol_error"
        await w.connection.send("x" * 500_000)
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await w.until("nothing")
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_a_refused_continuation_forgets_what_it_continued(server: RunningServer) -> None:
    async with wire(server) as w:
        await w.create("one")
        one = await w.until()
        previous = one["response"]["id"]
        await w.create("x" * 5000, previous_response_id=previous)
        assert (await w.receive())["error"]["code"] == "context_length_exceeded"
        await w.create("two", previous_response_id=previous)
        assert (await w.receive())["error"]["code"] == "previous_response_not_found"


async def test_lanes_and_waiting_requests_are_bounded(server: RunningServer) -> None:
    async with wire(server) as w:
        for priority in range(33):
            await w.create("x", stream_id=f"priority{priority}")
        seen: list[str] = []
        ended = 0
        while ended < 32:
            event = await w.receive()
            if event["type"] == "error":
                seen.append(event["error"]["code"])
            ended += event["type"] in TERMINAL
    assert seen == ["websocket_stream_limit_reached"]


def _kind(event: dict[str, Any]) -> str:
    return str(event["error"]["code"] if event["type"] == "error" else event["type"])


async def test_a_connection_ends_with_a_typed_error_when_its_time_is_over() -> None:
    limits = SocketLimits(lifetime=0.3, handover=0.2)
    with serving(scripted_model(script, step_cost=0.001), socket_limits=limits) as server:
        async with wire(server) as w:
            await w.create("endless")
            kinds = [_kind(json.loads(frame)) async for frame in w.connection]
        assert "websocket_connection_limit_reached" in kinds
        assert sum(k in TERMINAL for k in kinds) == 1
        assert server.settled()


HTTP_ERRORS: list[tuple[str, str, str, Any, int, str]] = [
    ("malformed", "POST", "/v1/responses", b"{", 400, "invalid_json"),
    ("empty", "POST", "/v1/responses", b"", 400, "invalid_json"),
    ("unknown model", "POST", "/v1/chat/completions",
     {"model": "x", "messages": [{"role": "user", "content": "q"}]}, 404, "model_not_found"),
    ("no messages", "POST", "/v1/chat/completions", {"messages": []}, 400, "invalid_input"),
    ("many choices", "POST", "/v1/completions", {"prompt": "x", "n": 9}, 400, "invalid_input"),
    ("best of", "POST", "/v1/completions", {"prompt": "x", "best_of": 2}, 400, "invalid_input"),
    ("too large", "POST", "/v1/responses", {"input": "x" * 300_000}, 413, "request_too_large"),
    ("too long", "POST", "/v1/completions", {"prompt": "x" * 5000}, 400, "context_length_exceeded"),
    ("no such response", "GET", "/v1/responses/resp_x", None, 404, "response_not_found"),
    ("cancel nothing", "POST", "/v1/responses/resp_x/cancel", None, 404, "response_not_found"),
    ("no such address", "GET", "/v1/nothing", None, 404, "not_found"),
    ("wrong method", "PUT", "/v1/responses", None, 405, "protocol_error"),
    ("unstored background", "POST", "/v1/responses",
     {"input": "x", "background": True, "store": False}, 403, "forbidden"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "method", "path", "body", "status", "code"), HTTP_ERRORS, ids=[e[0] for e in HTTP_ERRORS]
)
def test_a_bad_request_gets_a_status_and_a_typed_body(
    server: RunningServer, name: str, method: str, path: str, body: Any, status: int, code: str
) -> None:
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    answer = httpx.request(method, server.url + path, content=content)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert set(answer.json()["error"]) == {"type", "code", "message", "param"}


def test_a_body_without_a_length_is_cut_off_at_the_limit(server: RunningServer) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    try:
        answer = httpx.post(f"{server.url}/v1/responses", content=endless())
        assert answer.status_code == 413
    except httpx.WriteError:
        pass  # the server hung up while the rest was being sent, which is as good


# Limits and keys


async def test_rate_limits_are_per_model_and_tell_when_to_come_back() -> None:
    tables = {"small": NamedModel(requests_per_minute=2), "large": NamedModel()}
    models = (scripted_model(script, "small"), scripted_model(script, "large"))
    with serving(*models, roles={"large": "deep"}, tables=tables) as server:
        async with httpx.AsyncClient(base_url=server.url) as http:
            ok = [await http.post("/v1/responses", json={"model": "small", "input": "x"}) for _ in range(2)]
            assert [a.status_code for a in ok] == [200, 200]
            assert ok[1].headers["x-ratelimit-remaining-requests"] == "0"
            refused = await http.post("/v1/responses", json={"model": "small", "input": "x"})
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
            assert (
                await http.post("/v1/responses", json={"model": "large", "input": "x"})
            ).status_code == 200
        async with wire(server) as w:
            await w.create("x", model="small")
            error = await w.receive()
            assert (error["status"], error["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(error["headers"]["retry-after"]) >= 1


async def test_a_key_over_its_share_is_refused_while_others_are_served() -> None:
    tables = {"echo": NamedModel(concurrent=8, concurrent_per_key=1)}
    with serving(scripted_model(script, step_cost=0.001), tables=tables) as server:
        async with wire(server) as w:
            await w.create("endless", stream_id="a")
            created = await w.until("response.created")
            await w.create("more", stream_id="b")
            error = await w.until("error")
            assert (error["status"], error["stream_id"]) == (429, "b")
            await w.send(type="response.cancel", response_id=created["response"]["id"])
            await w.until()
            await w.create("now", stream_id="b")
            assert said(await w.until()) == "You said: now"


async def test_a_full_queue_refuses_with_429_and_recovers() -> None:
    settings = ServerSettings(max_queue=1)
    with serving(scripted_model(script, step_cost=0.002), server=settings, concurrent=1) as server:
        async with wire(server) as w:
            for priority in "abc":
                await w.create("endless", stream_id=priority)
            error = await w.until("error")
            assert (error["status"], error["error"]["code"], error["stream_id"]) == (429, "queue_full", "c")
            await w.send(type="response.cancel")
            await w.until()
            await w.until()
            await w.create("again")
            assert said(await w.until()) == "You said: again"


def test_beyond_loopback_every_door_needs_a_key(tmp_path: Path) -> None:
    key, token = make_key("bob")
    store = Store(default_url(tmp_path))
    store.add_key(key)
    store.close()
    settings = ServerSettings(host="0.0.0.0")
    with serving(scripted_model(script), server=settings, folder=tmp_path) as server:
        body = {"input": "x"}
        for headers in ({}, {"authorization": "Bearer wrong"}):
            for method, path in (("POST", "/v1/responses"), ("GET", "/v1/models"), ("GET", "/metrics")):
                answer = httpx.request(method, server.url + path, json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert token not in answer.text
            with pytest.raises(websockets.InvalidStatus) as refused:
                asyncio.run(_connect(server.ws, headers))
            assert refused.value.response.status_code == 401
        good = {"authorization": f"Bearer {token}"}
        answer = httpx.post(f"{server.url}/v1/responses", json=body, headers=good)
        assert answer.status_code == 200
        asyncio.run(_connect(server.ws, good))
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/v1/responses/{answer.json()['id']}", headers=good).status_code == 200


async def _connect(url: str, headers: dict[str, str]) -> None:
    async with websockets.connect(url, additional_headers=headers):
        pass


def test_a_page_of_another_site_may_not_open_a_socket(server: RunningServer) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        asyncio.run(_connect(server.ws, {"Origin": "https://evil.example"}))
    assert refused.value.response.status_code == 403
    asyncio.run(_connect(server.ws, {"Origin": f"http://127.0.0.1:{server.port}"}))
    answer = httpx.post(
        f"{server.url}/v1/responses", json={"input": "x"}, headers={"origin": "https://evil.example"}
    )
    assert answer.status_code == 403


def test_one_key_does_not_see_what_another_said(tmp_path: Path) -> None:
    keys = [make_key(name) for name in ("bob", "eve")]
    store = Store(default_url(tmp_path))
    for key, _ in keys:
        store.add_key(key)
    store.close()
    with serving(scripted_model(script), folder=tmp_path) as server:
        bob, eve = ({"authorization": f"Bearer {token}"} for _, token in keys)
        made = httpx.post(f"{server.url}/v1/responses", json={"input": "secret"}, headers=bob).json()["id"]
        for request in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
            answer = httpx.request(request[0], f"{server.url}/v1/responses/{made}{request[1]}", headers=eve)
            assert answer.status_code == 404
        body = {"input": "x", "previous_response_id": made}
        stolen = httpx.post(f"{server.url}/v1/responses", json=body, headers=eve)
        assert stolen.json()["error"]["code"] == "previous_response_not_found"


# Sampling and drafts


def test_the_same_seed_gives_the_same_text(server: RunningServer) -> None:
    body = {"prompt": "x", "max_tokens": 40, "temperature": 1.5, "seed": 7}
    model = scripted_model()
    with serving(model) as plain:
        texts = [
            httpx.post(f"{plain.url}/v1/completions", json=body).json()["choices"][0]["text"]
            for _ in range(2)
        ]
        other = httpx.post(f"{plain.url}/v1/completions", json={**body, "seed": 8}).json()["choices"][0][
            "text"
        ]
    assert texts[0] == texts[1]
    assert other != texts[0]


def test_a_prediction_is_drafted_and_never_changes_the_text() -> None:
    body: dict[str, Any] = {"input": "The quick brown fox jumps over the lazy dog, again and again."}
    with serving(scripted_model(script), speculation=True) as server:
        plain = httpx.post(f"{server.url}/v1/responses", json=body).json()
        text = plain["output"][0]["content"][0]["text"]
        predicted = {"prediction": {"type": "content", "content": text}}
        drafted = httpx.post(f"{server.url}/v1/responses", json={**body, **predicted}).json()
        assert server.settled()
    with serving(scripted_model(script)) as server:
        undrafted = httpx.post(f"{server.url}/v1/responses", json={**body, **predicted}).json()
    assert drafted["output"][0]["content"][0]["text"] == text
    assert undrafted["output"][0]["content"][0]["text"] == text
    assert undrafted["receipt"]["drafted_tokens"] == 0
    assert drafted["receipt"]["accepted_tokens"] > 10
    assert drafted["receipt"]["steps"] < undrafted["receipt"]["steps"]


def test_metrics_count_what_happened(server: RunningServer) -> None:
    httpx.post(f"{server.url}/v1/responses", json={"input": "x"})
    page = httpx.get(f"{server.url}/metrics").text
    assert 'keystroke_responses_total{model="echo",priority="chat",status="completed"}' in page
    assert "keystroke_first_token_seconds_bucket" in page


def test_infill_answers_the_way_llama_vim_expects(server: RunningServer) -> None:
    body = {
        "input_prefix": "def add(a, b):\n",
        "input_suffix": "\n\nprint(add(1, 2))\n",
        "input_extra": [{"filename": "util.py", "text": "def sub(a, b): ...", "time": 1}],
        "prompt": "    return ",
        "n_predict": 16,
        "n_indent": 4,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 2000,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "response_fields": ["content", "timings"],
    }
    first = httpx.post(f"{server.url}/infill", json=body).json()
    assert len(first["content"]) == 16
    assert first["timings"]["predicted_n"] == 16
    timings = first["timings"]
    assert timings["prompt_ms"] > timings["predicted_ms"] / 32  # with the step that gives the first token
    assert timings["prompt_per_second"] == pytest.approx(
        timings["prompt_n"] / timings["prompt_ms"] * 1e3, 0.01
    )
    again = httpx.post(f"{server.url}/infill", json=body).json()
    assert again["content"] == first["content"]
    assert again["tokens_cached"] > 50
    warm = httpx.post(f"{server.url}/infill", json={**body, "n_predict": 0, "t_max_predict_ms": 1})
    assert warm.status_code == 200


def test_infill_stops_when_its_time_is_over(server: RunningServer) -> None:
    body = {"input_prefix": "[user]\nendless\n[assistant]", "n_predict": 100_000, "t_max_predict_ms": 60}
    began = time.perf_counter()
    answer = httpx.post(f"{server.url}/infill", json=body, timeout=90)
    assert answer.status_code == 200
    assert 0 < len(answer.json()["content"]) < 4000
    assert time.perf_counter() - began < 60


def test_a_failure_in_the_middle_of_a_stream_is_told_on_the_stream() -> None:
    def breaking(prompt: str) -> str:
        raise ZeroDivisionError

    with serving(scripted_model(breaking)) as server:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        lines = httpx.post(f"{server.url}/v1/chat/completions", json=body).text.split("\n\n")
        assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "engine_error"
        assert lines[-2] == "data: [DONE]"
        plain = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": False})
        assert (plain.status_code, plain.json()["error"]["type"]) == (500, "server_error")
        events = httpx.post(f"{server.url}/v1/responses", json={"input": "x", "stream": True}).text
        assert events.count("event: response.failed") == 1
        assert server.settled()


def test_a_key_cannot_tell_what_another_has_asked(tmp_path: Path) -> None:
    """How many tokens of a guess were found already computed would spell out the secret."""
    with serving(scripted_model(script), folder=tmp_path) as server:
        store = server.gateway.store
        assert store is not None
        tokens = []
        for name in ("alice", "mallory"):
            key, token = make_key(name)
            store.add_key(key)
            tokens.append(token)
        server.gateway.keys.required = True
        server.gateway.keys.set_stored_keys(store.keys())
        said = {"input": "the secret number is 4711"}
        reused = []
        for token in (tokens[0], tokens[1], tokens[0]):
            headers = {"authorization": f"Bearer {token}"}
            answer = httpx.post(f"{server.url}/v1/responses", json=said, headers=headers).json()
            reused.append(answer["receipt"]["reused_tokens"])
        assert reused[:2] == [0, 0]
        assert reused[2] > 0


async def test_a_revoked_key_loses_its_open_sockets(tmp_path: Path) -> None:
    with serving(scripted_model(script), folder=tmp_path) as server:
        store = server.gateway.store
        assert store is not None
        key, token = make_key("bob")
        store.add_key(key)
        server.gateway.keys.required = True
        server.gateway.keys.set_stored_keys(store.keys())
        headers = {"authorization": f"Bearer {token}"}
        address = f"ws://127.0.0.1:{server.port}"
        async with (
            websockets.connect(f"{address}/v1/responses", additional_headers=headers) as turns,
            websockets.connect(f"{address}/v1/live", additional_headers=headers) as live,
        ):
            await asyncio.to_thread(store.revoke_key, key.id)
            for open_one in (turns, live):
                with pytest.raises(websockets.ConnectionClosed):
                    await asyncio.wait_for(open_one.recv(), 60)
                assert open_one.close_code == 1008
