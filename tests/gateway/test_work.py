"""One unit of work: whatever is sent and however it ends, limits, metrics, usage and receipts agree."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_support import RunningServer, last_user, scripted_model, serving
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect

from keystroke.config import NamedModel
from keystroke.errors import EngineError
from keystroke.gateway.access.limits import RateBudget, RateLimiter
from keystroke.gateway.work.service import Service
from keystroke.gateway.work.work import Work, WorkOutcome

CAPACITY = 1_000_000_000


def script(prompt: str) -> str:
    said = last_user(prompt)
    if "```" in said:
        return "```\nvalue = 2\n```\n"
    return f"{said[:40]} and so on" * (40 if "long" in said else 1)


class Books:
    """Everything that was kept of every span, read where it is kept."""

    def __init__(self, server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.outcomes: list[WorkOutcome] = []
        service = server.gateway.service
        service.limits = RateLimiter({"echo": RateBudget(tokens_per_minute=CAPACITY)}, clock=lambda: 0.0)
        keep = Service._record_span

        def noting(service: Service, work: Work, identity: str, outcome: WorkOutcome) -> None:
            self.outcomes.append(outcome)
            keep(service, work, identity, outcome)

        monkeypatch.setattr(Service, "_record_span", noting)

    def agree(self) -> int:
        """Compare them; the tokens spent in all."""
        assert self.server.settled()
        receipts = [outcome.receipt for outcome in self.outcomes]
        spent = sum(r.computed_tokens + r.output_tokens for r in receipts)
        (account,) = self.server.gateway.service.limits._accounts.values()
        assert account.tokens is not None
        assert account.running == 0
        assert CAPACITY - account.tokens.level == spent
        page = httpx.get(f"{self.server.url}/metrics").text
        counted = {
            sample.labels["kind"]: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "keystroke_tokens_total"
        }
        assert counted["input"] + counted["output"] == spent
        assert counted["reused"] == sum(r.reused_tokens for r in receipts)
        store = self.server.gateway.store
        assert store is not None
        (row,) = store.usage()
        assert row.computed_tokens + row.output_tokens == spent
        assert row.reused_tokens == sum(r.reused_tokens for r in receipts)
        assert row.responses == len(receipts)
        return spent


async def whole(server: RunningServer, text: str) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        await http.post("/v1/responses", json={"input": text})


async def chat(server: RunningServer, text: str) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})


async def completions(server: RunningServer, text: str) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        await http.post("/v1/completions", json={"prompt": text, "max_tokens": 4})
        await http.post("/infill", json={"input_prefix": text, "input_suffix": ")", "n_predict": 4})


async def hung_up(server: RunningServer, text: str) -> None:
    """A stream whose reader goes away in the middle."""
    body = {"input": text + " long", "stream": True}
    async with (
        httpx.AsyncClient(base_url=server.url) as http,
        http.stream("POST", "/v1/responses", json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            break


async def superseded(server: RunningServer, text: str) -> None:
    async with httpx.AsyncClient(base_url=server.url) as http:
        asks = [http.post("/v1/completions", json={"prompt": text * n, "buffer": "b"}) for n in (1, 2, 3)]
        await asyncio.gather(*asks)


async def on_socket(server: RunningServer, text: str) -> None:
    """A warm-up, a steered turn, a cancelled one, and a drop without goodbye."""
    async with connect(server.ws) as socket:

        async def said(kind: str) -> dict[str, Any]:
            while True:
                event: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), 60))
                if event["type"] == kind:
                    return event

        async def send(**event: Any) -> None:
            await socket.send(json.dumps({"type": "response.create", **event}))

        await send(input=text, generate=False)
        await said("response.completed")
        await send(input=text + " long")
        began = await said("response.created")
        await socket.send(
            json.dumps(
                {
                    "type": "response.steer",
                    "previous_response_id": began["response"]["id"],
                    "input": "shorter",
                }
            )
        )
        await said("response.completed")
        await send(input=text + " long, again")
        began = await said("response.created")
        await socket.send(json.dumps({"type": "response.cancel", "response_id": began["response"]["id"]}))
        await said("response.cancelled")
        await send(input=text + " long, and gone")
        await said("response.created")
        socket.transport.abort()


async def typed(server: RunningServer, text: str) -> None:
    """A buffer opened, typed in, completed, edited by instruction, and left while it works."""
    async with connect(f"ws://127.0.0.1:{server.port}/v1/live") as socket:

        async def send(**event: Any) -> None:
            event["type"] = event.pop("kind")
            await socket.send(json.dumps(event))

        async def until(*kinds: str) -> None:
            while json.loads(await asyncio.wait_for(socket.recv(), 60))["type"] not in kinds:
                pass

        await send(kind="buffer.open", buffer="a.py", text=f"value = 1\n{text}", path="a.py", version=1)
        await until("ready")
        for version in range(2, 6):
            edit = {"start": 0, "end": 0, "text": "x"}
            await send(kind="buffer.change", buffer="a.py", base=version - 1, version=version, edits=[edit])
        await send(kind="complete", id="c", buffer="a.py", version=5, cursor=4)
        await until("suggestion", "not_shown")
        await send(
            kind="edit.ask", id="e", buffer="a.py", version=5, start=0, end=9, instruction=f"two {text}"
        )
        await until("changes", "error")
        await send(kind="complete", id="d", buffer="a.py", version=5, cursor=2)


KINDS = (whole, chat, completions, hung_up, superseded, on_socket, typed)


@pytest.mark.parametrize("seed", range(3))
async def test_limits_metrics_usage_and_receipts_count_the_same_tokens(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    tables = {"echo": NamedModel(concurrent=4, tokens_per_minute=CAPACITY)}
    model = scripted_model(script, step_cost=0.0004)
    with serving(model, tables=tables, folder=tmp_path) as server:
        books = Books(server, monkeypatch)
        mixture = [*KINDS, *rng.choices(KINDS, k=5)]
        rng.shuffle(mixture)
        await asyncio.gather(*(kind(server, f"request {n}") for n, kind in enumerate(mixture)))
        spent = await asyncio.to_thread(books.agree)
        assert spent > 0
        statuses = {outcome.status for outcome in books.outcomes}
        assert statuses >= {"completed", "cancelled", "incomplete"}
        kinds = {outcome.receipt.priority for outcome in books.outcomes}
        assert kinds >= {"ghost", "edit", "chat", "background"}


async def test_work_that_fails_is_settled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_prompt: str) -> str:
        raise EngineError("the engine fell over")

    tables = {"echo": NamedModel(concurrent=4, tokens_per_minute=CAPACITY)}
    with serving(scripted_model(broken), tables=tables, folder=tmp_path) as server:
        books = Books(server, monkeypatch)
        for kind in (whole, chat, completions):
            await kind(server, "anything")
        await asyncio.to_thread(books.agree)
        assert {outcome.status for outcome in books.outcomes} == {"failed"}


async def test_a_warm_up_over_the_budget_is_refused(tmp_path: Path) -> None:
    tables = {"echo": NamedModel(concurrent=4, tokens_per_minute=200)}
    with serving(scripted_model(script), tables=tables, folder=tmp_path) as server:
        async with connect(server.ws) as socket:
            for text in ("x" * 150, "y" * 150):
                await socket.send(json.dumps({"type": "response.create", "input": text, "generate": False}))
            seen: list[str] = []
            while len(seen) < 2:
                event = json.loads(await asyncio.wait_for(socket.recv(), 60))
                if event["type"] in ("response.completed", "error"):
                    seen.append(event["type"])
        assert seen == ["response.completed", "error"]
