"""Every request ends in exactly one terminal event, in every interleaving of what a client may send.

A state machine drives a real connection (sans-I/O session, runs, scheduler thread, echo engine) over a socket
made of two lists; the rules are a client's possible messages and the passing of time.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from gateway_support import last_user, scripted_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keystroke.config import NamedModel
from keystroke.gateway.access.keys import LOCAL
from keystroke.gateway.api.responses import Responses
from keystroke.gateway.api.responses_socket import ResponsesConnection
from keystroke.gateway.transport.outbox import FULL
from keystroke.gateway.transport.socket import Socket, SocketConnection
from keystroke.gateway.work.registry import ModelRegistry, local_entry
from keystroke.gateway.work.service import Service
from keystroke.protocol.faults import SlowClient

TERMINAL = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
LARGE = "x" * 20_000  # a prompt this long is made off the event loop


def script(prompt: str) -> str:
    said = last_user(prompt)
    return "and on " * (400 if "long" in said else 3)


class Client:
    """What one client sent, and what it was told."""

    def __init__(self) -> None:
        model = scripted_model(script, step_cost=0.0002)
        entry = local_entry("echo", model, named=NamedModel(concurrent=4))
        self.service = Service(ModelRegistry([entry]), None, speculation=False)
        self.inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.heard: list[dict[str, Any]] = []
        self.created: Counter[str] = Counter()  # requests by stream
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.service.registry.start()

        async def send(message: Any) -> None:
            if message["type"] == "websocket.send":
                self.heard.append(json.loads(message["text"]))

        connection = ResponsesConnection(Responses(self.service), LOCAL, Socket(self.inbox.get, send))
        self.task = asyncio.create_task(connection.serve())

    async def say(self, **event: Any) -> None:
        event["type"] = event.pop("kind")
        await self.inbox.put({"type": "websocket.receive", "text": json.dumps(event)})

    @property
    def responses(self) -> list[str]:
        return [e["response"]["id"] for e in self.heard if e["type"] == "response.created"]

    @property
    def ended(self) -> Counter[str]:
        return Counter(e["response"]["id"] for e in self.heard if e["type"] in TERMINAL)

    async def quiet(self) -> None:
        """Until nothing runs, waits or is about to be said."""
        still = 0
        for _ in range(3000):
            calm = not self.service.active_work and self.inbox.empty()
            still = still + 1 if calm and set(self.responses) == set(self.ended) else 0
            if still > 20:
                return
            await asyncio.sleep(0.002)

    async def stop(self) -> None:
        await self.inbox.put({"type": "websocket.disconnect"})
        assert self.task is not None
        await asyncio.wait_for(self.task, 60)
        await self.service.registry.stop()


class Turns(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.unheeded: list[str] = []  # what failed where nobody looked
        self.loop.set_exception_handler(lambda _, about: self.unheeded.append(repr(about)))
        self.client = Client()
        self.run(self.client.start())
        self.gone = False

    def run(self, step: Any) -> None:
        self.loop.run_until_complete(step)

    @initialize()
    def begin(self) -> None:
        self.run(self.client.say(kind="response.create", input="first"))
        self.client.created[""] += 1

    @rule(
        stream=st.sampled_from(["", "a", "b"]),
        text=st.sampled_from(["short", "long", LARGE]),
        background=st.booleans(),
        warm=st.booleans(),
    )
    def create(self, stream: str, text: str, background: bool, warm: bool) -> None:
        more: dict[str, Any] = {"stream_id": stream} if stream else {}
        if background:
            more["background"] = True
        elif warm:
            more["generate"] = False
        self.run(self.client.say(kind="response.create", input=text, **more))
        self.client.created[stream] += 1

    @rule(stream=st.sampled_from(["", "a", "b"]))
    def create_what_is_refused(self, stream: str) -> None:
        """The next of its stream begins while this one is still being refused."""
        more: dict[str, Any] = {"stream_id": stream} if stream else {}
        self.run(self.client.say(kind="response.create", input="x", previous_response_id="resp_none", **more))
        self.client.created[stream] += 1

    @rule(back=st.integers(0, 3))
    def steer(self, back: int) -> None:
        known = self.client.responses
        if known:
            chosen = known[-1 - min(back, len(known) - 1)]
            self.run(self.client.say(kind="response.steer", previous_response_id=chosen, input="other"))

    @rule(back=st.integers(0, 3))
    def cancel(self, back: int) -> None:
        known = self.client.responses
        if known:
            chosen = known[-1 - min(back, len(known) - 1)]
            self.run(self.client.say(kind="response.cancel", response_id=chosen))

    @rule()
    def cancel_all(self) -> None:
        self.run(self.client.say(kind="response.cancel"))

    @rule(pause=st.sampled_from([0.0, 0.001, 0.005, 0.03]))
    def wait(self, pause: float) -> None:
        self.run(asyncio.sleep(pause))

    @invariant()
    def nothing_ends_twice(self) -> None:
        assert all(count == 1 for count in self.client.ended.values())

    def teardown(self) -> None:
        client = self.client
        try:
            self.run(client.say(kind="response.cancel"))
            self.run(client.quiet())
            assert Counter(client.responses) == client.ended  # each created one ended, once
            asked = sum(client.created.values())
            # A request is answered by a response of its own or by an error; steering makes further ones.
            first = {
                e["response"]["id"]
                for e in client.heard
                if e["type"] == "response.created" and not e["response"].get("previous_response_id")
            }
            refused = [
                e for e in client.heard if e["type"] == "error" and e["error"]["code"] != "response_not_found"
            ]
            assert len(first) + len(refused) == asked
            accepted = [e for e in client.heard if e["type"] == "response.steer.accepted"]
            assert len({e["steer"]["id"] for e in accepted}) == len(accepted)
            # And the connection is alive: a turn on every stream that was used still ends.
            for stream in client.created:
                more = {"stream_id": stream} if stream else {}
                before = len(client.ended)
                self.run(client.say(kind="response.create", input="again", **more))
                self.run(client.quiet())
                assert len(client.ended) == before + 1
        finally:
            self.run(client.stop())
            self.loop.close()
        assert self.unheeded == []


Turns.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestTurns = Turns.TestCase


async def test_a_request_behind_a_refused_one_can_be_cancelled() -> None:
    client = Client()
    unheeded: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: unheeded.append(about))
    await client.say(kind="response.create", input="x", previous_response_id="resp_none")
    await client.say(kind="response.create", input="long " + LARGE)
    await client.start()
    for _ in range(2000):
        if any(event["type"] == "error" for event in client.heard):
            break
        await asyncio.sleep(0.001)
    await client.say(kind="response.cancel")  # while the prompt of the second is being made, or after
    await client.quiet()
    await client.stop()
    assert unheeded == []
    assert [e["type"] for e in client.heard if e["type"] in TERMINAL] == ["response.cancelled"]


async def test_sixty_background_requests_at_once_are_all_answered() -> None:
    client = Client()
    await client.start()
    for _ in range(60):
        await client.say(kind="response.create", input="short", background=True)
    await client.quiet()
    refused = [e for e in client.heard if e["type"] == "error"]
    assert len(client.ended) + len(refused) == 60
    assert len(client.ended) >= 16
    await client.stop()


async def test_a_client_that_asks_and_never_reads_is_let_go_and_nothing_is_kept_for_it() -> None:
    class Reader(SocketConnection):
        def __init__(self) -> None:
            super().__init__(socket)
            self.told: list[str] = []

        def handle_frame(self, frame: str) -> None:
            socket.put([{"echo": frame}])

        def on_stalled(self, reason: SlowClient) -> None:
            self.told.append("stalled")

        def on_disconnect(self) -> None:
            self.told.append("left")

    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def never(message: Any) -> None:
        if message["type"] == "websocket.send":
            await asyncio.Event().wait()

    aborted: list[bool] = []
    socket = Socket(inbox.get, never, fast_path={"abort": lambda: aborted.append(True)})
    reader = Reader()
    serving = asyncio.create_task(socket.serve(reader))
    for _ in range(FULL // (1 << 20) + 3):
        await inbox.put({"type": "websocket.receive", "text": "x" * (1 << 20)})
    await inbox.put({"type": "websocket.disconnect"})
    await asyncio.wait_for(serving, 60)
    assert reader.told == ["stalled", "left"]
    assert aborted == [True]
    assert socket._outbox.bytes == 0


async def test_a_cancel_that_comes_with_its_create_is_heeded() -> None:
    """Both frames are there before the server looks: nothing lies between them."""
    for text in ("long", "long " + LARGE):
        client = Client()
        await client.say(kind="response.create", input=text, store=False)
        await client.say(kind="response.cancel")
        await client.start()
        for _ in range(2000):
            if client.ended:
                break
            await asyncio.sleep(0.005)
        assert [e["type"] for e in client.heard if e["type"] in TERMINAL] == ["response.cancelled"]
        await client.stop()
