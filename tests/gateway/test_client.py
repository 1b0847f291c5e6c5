"""The Python client: streams, cancels, steers, and comes back when the connection is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import websockets
from gateway_support import RunningServer, last_user, scripted_model, serving

from keystroke import Client
from keystroke.clients.connection import RemoteError, Restarted
from keystroke.clients.gateway_socket import GatewaySocket
from keystroke.errors import Unauthorized, Unavailable, UsageError
from keystroke.gateway.transport.socket import SocketLimits
from keystroke.protocol import events
from keystroke.protocol.requests import ResponseCancel
from keystroke.protocol.response import Response


def script(prompt: str) -> str:
    said = last_user(prompt)
    if "endless" in said:
        return "z" * 50_000
    if match := re.search(r"count (\d+)", said):
        return " ".join(map(str, range(int(match[1]))))
    return f"You said: {said}"


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving(scripted_model(script, step_cost=0.001)) as running:
        yield running
        assert running.settled()


def words(response: Response | None) -> str:
    assert response is not None
    return "".join(part.text for item in response.output for part in getattr(item, "content", ()))


async def drop(client: Client) -> None:
    """Cut the connection as a network would, and let the client notice."""
    assert isinstance(client._socket, GatewaySocket)
    assert client._socket._transport is not None
    client._socket._transport.abort()
    await asyncio.sleep(0)


async def test_text_streams_and_the_whole_response_is_there_at_the_end(server: RunningServer) -> None:
    async with Client(server.url) as client:
        stream = await client.respond("hello")
        assert "".join([t async for t in stream.text()]) == "You said: hello"
        assert words(stream.response) == "You said: hello"


async def test_more_streams_than_lanes_all_end(server: RunningServer) -> None:
    async with Client(server.url) as client:
        answers = await asyncio.gather(*(client.ask(f"q{n}") for n in range(60)))
    assert [words(a) for a in answers] == [f"You said: q{n}" for n in range(60)]


async def test_a_stream_is_cancelled_and_another_steered(server: RunningServer) -> None:
    async with Client(server.url) as client:
        stream = await client.respond("endless")
        async for event in stream:
            if isinstance(event, events.TextDelta):
                await stream.cancel()
        assert stream.response is not None
        assert stream.response.status == "cancelled"
        steered = await client.respond("endless")
        sent = False
        async for event in steered:
            if isinstance(event, events.TextDelta) and not sent:
                sent = True
                await steered.steer("do something else")
        assert words(steered.response) == "You said: do something else"


async def test_a_cancel_that_comes_too_late_is_no_fault_of_the_next_stream(server: RunningServer) -> None:
    async with Client(server.url) as client:
        stream = await client.respond("hello")
        await stream.result()
        client._send(ResponseCancel(response_id=stream.id))
        assert words(await client.ask("again")) == "You said: again"


async def test_what_had_said_nothing_is_asked_again_unseen() -> None:
    with serving(scripted_model(script, prefill_cost=0.001, chunk=16)) as server:
        async with Client(server.url) as client:
            stream = await client.respond("a longer question " * 30)
            await asyncio.sleep(0.1)
            await drop(client)
            kinds = [type(event) async for event in stream]
        assert Restarted not in kinds
        assert words(stream.response).startswith("You said: a longer question")


async def test_what_was_in_the_middle_says_restarted_and_begins_anew(server: RunningServer) -> None:
    async with Client(server.url) as client:
        stream = await client.respond("count 200")
        text, dropped = "", False
        async for event in stream:
            if isinstance(event, Restarted):
                text = ""
            elif isinstance(event, events.TextDelta):
                text += event.delta
                if len(text) > 50 and not dropped:
                    dropped = True
                    await drop(client)
        assert dropped
        assert text == script("[user]\ncount 200")


async def test_a_conversation_survives_a_lost_connection(server: RunningServer) -> None:
    async with Client(server.url) as client:
        talk = client.conversation(store=False)
        await talk.ask("one")
        await drop(client)
        await asyncio.sleep(0.05)
        response = await talk.ask("two")
    assert words(response) == "You said: two"
    assert response.usage is not None
    assert response.usage.input_tokens > 40, "the first turn was sent again"


async def test_when_the_server_is_gone_for_good_the_error_says_so() -> None:
    with serving(scripted_model(script, step_cost=0.001)) as server:
        client = Client(server.url, attempts=2)
        await client._connect()
        stream = await client.respond("endless")
        async for event in stream:
            if isinstance(event, events.TextDelta):
                break
    with pytest.raises(Unavailable):
        await stream.result()
    await client.close()


async def test_nobody_at_the_address_is_one_clear_sentence() -> None:
    with pytest.raises(Unavailable, match="keystroke serve"):
        async with Client("http://127.0.0.1:9"):
            pass
    with pytest.raises(UsageError, match="address"):
        Client("localhost:8012")


async def test_a_refused_key_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYSTROKE_API_KEY", "right")
    with serving(scripted_model(script)) as server:
        monkeypatch.setenv("KEYSTROKE_API_KEY", "wrong")
        with pytest.raises(Unauthorized):
            await Client(server.url).ask("x")
        async with Client(server.url, api_key="right") as client:
            assert words(await client.ask("x")) == "You said: x"


async def test_errors_carry_the_servers_code_and_the_connection_lives_on(server: RunningServer) -> None:
    async with Client(server.url) as client:
        with pytest.raises(RemoteError) as caught:
            await client.ask("x", model="nope")
        assert (caught.value.code, caught.value.status) == ("model_not_found", 404)
        assert words(await client.ask("y")) == "You said: y"


async def test_an_unknown_event_is_ignored(server: RunningServer) -> None:
    async with Client(server.url) as client:
        client._on_frame(b'{"type":"response.from.the.future","sequence_number":1}')
        client._on_frame(b"not json")
        assert words(await client.ask("y")) == "You said: y"


async def test_closing_ends_every_stream(server: RunningServer) -> None:
    client = Client(server.url)
    stream = await client.respond("endless")
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(Unavailable):
        await stream.result()
    with pytest.raises(Unavailable):
        await client.ask("x")


async def test_warm_then_ask(server: RunningServer) -> None:
    async with Client(server.url) as client:
        warm = await client.warm("rules " * 50)
        assert warm.output == []
        answer: Any = await client.ask("go", previous_response_id=warm.id)
    assert words(answer) == "You said: go"


# Networks without WebSockets


@contextlib.asynccontextmanager
async def without_websockets(server: RunningServer, refusal: bytes) -> AsyncIterator[str]:
    """A proxy in front of the server that answers every upgrade with `refusal` and hangs up."""
    upgrades = 0

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal upgrades
        head = await reader.readuntil(b"\r\n\r\n")
        if b"upgrade: websocket" in head.lower():
            upgrades += 1
            writer.write(refusal)
            writer.close()
            return
        there, back = await asyncio.open_connection("127.0.0.1", server.port)
        back.write(head)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(pipe(reader, back), pipe(there, writer))

    proxy = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        assert upgrades == 1, "tried once, then never again"
    finally:
        proxy.close()


REFUSALS = {
    "upgrade required": b"HTTP/1.1 426 Upgrade Required\r\ncontent-length: 0\r\n\r\n",
    "not found": b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    "a page": b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
    "hangs up": b"",
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_without_websockets_the_client_goes_on_over_http(server: RunningServer, refusal: bytes) -> None:
    async with without_websockets(server, refusal) as url, Client(url) as client:
        stream = await client.respond("count 20")
        assert "".join([t async for t in stream.text()]) == script("[user]\ncount 20")
        answers = await asyncio.gather(*(client.ask(f"q{n}") for n in range(5)))
        assert [words(a) for a in answers] == [f"You said: q{n}" for n in range(5)]
        talk = client.conversation()
        await talk.ask("one")
        response = await talk.ask("two")
        assert response.previous_response_id is not None
        assert words(response) == "You said: two"
        with pytest.raises(RemoteError) as caught:
            await client.ask("x", model="nope")
        assert (caught.value.code, caught.value.status) == ("model_not_found", 404)
        warm = await client.warm("rules " * 50)
        assert warm.output == []
        assert words(await client.ask("go", previous_response_id=warm.id)) == "You said: go"


async def test_over_http_a_stream_is_cancelled_and_steering_says_what_it_needs(server: RunningServer) -> None:
    async with without_websockets(server, REFUSALS["not found"]) as url, Client(url) as client:
        stream = await client.respond("endless")
        failed: list[events.SteerFailed] = []
        steered = False
        async for event in stream:
            if isinstance(event, events.SteerFailed):
                failed.append(event)
                await stream.cancel()
            elif isinstance(event, events.TextDelta) and not steered:
                steered = True
                await stream.steer("something else")
        assert stream.response is not None
        assert stream.response.status == "cancelled"
        assert "WebSocket" in failed[0].error.message


# The age of a connection


class MovableClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def aged(clock: MovableClock) -> SocketLimits:
    return SocketLimits(clock=clock, tick=0.005)  # the lifetime is the usual hour


async def test_a_turn_goes_on_when_its_connection_reaches_an_hour() -> None:
    clock = MovableClock()
    with serving(scripted_model(script, step_cost=0.001), socket_limits=aged(clock)) as server:
        async with Client(server.url) as client:
            clock.now = 3590
            assert words(await client.ask("young")) == "You said: young"
            first = client._socket
            stream = await client.respond("endless")
            numbers, after = [], 0
            async for event in stream:
                assert not isinstance(event, Restarted | events.ErrorEvent), "nothing is said twice"
                numbers.append(event.sequence_number)
                if isinstance(event, events.TextDelta):
                    clock.now = 3601
                    after += client._socket is not None and client._socket is not first
                    if after == 20:  # deltas that came over the next connection
                        await stream.cancel()
            assert numbers == list(range(len(numbers)))
            assert words(await client.ask("old")) == "You said: old"
        assert server.settled()


async def test_an_old_connection_without_a_turn_is_replaced_unseen() -> None:
    clock = MovableClock()
    with serving(scripted_model(script), socket_limits=aged(clock)) as server:
        async with Client(server.url) as client:
            talk = client.conversation(store=False)
            for turn in range(4):
                assert words(await talk.ask(f"turn {turn}")) == f"You said: turn {turn}"
                first = client._socket
                clock.now += 3601
                for _ in range(2000):
                    if client._socket is not first:
                        break
                    await asyncio.sleep(0.005)
                assert client._socket is None  # closed by the server, and not needed until the next turn


async def test_an_answer_that_cannot_be_resumed_ends_before_its_old_connection_does() -> None:
    """As for Codex, which asks for no resumption: the answer ends, then the connection; what is asked in
    between is refused with the code that makes clients connect again."""
    clock = MovableClock()
    with serving(scripted_model(script, step_cost=0.002), socket_limits=aged(clock)) as server:
        async with websockets.connect(server.ws) as socket:
            await socket.send('{"type":"response.create","input":"count 100","stream_id":"a"}')
            kinds: list[str] = []
            async for frame in socket:
                event = json.loads(frame)
                kinds.append(event["type"] if event["type"] != "error" else event["error"]["code"])
                if kinds.count("response.output_text.delta") == 3 and clock.now == 0:
                    clock.now = 3601
                    await asyncio.sleep(0.05)
                    await socket.send('{"type":"response.create","input":"late","stream_id":"b"}')
                if event["type"] == "error" and len(kinds) > 2:
                    assert event["status"] == 400
        limit = "websocket_connection_limit_reached"
        assert kinds.count("response.completed") == 1
        assert kinds.count("response.created") == 1
        assert kinds.count(limit) == 2  # for the late request, and at the end
        assert kinds[-1] == limit
        assert server.settled()
