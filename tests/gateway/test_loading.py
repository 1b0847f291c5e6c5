"""Models on offer: loaded when first asked for, once for all who wait, and let go again."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import pytest
from gateway_support import RunningServer, echo, scripted_model, serving

from keystroke import Client
from keystroke.clients.connection import RemoteError
from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.gateway_http import GatewayHttp
from keystroke.config import ModelSettings, NamedModel, PathSettings, Settings
from keystroke.engine.library import InstalledModel, ModelFormat, ModelLibrary, Progress, StoredFile, Traits
from keystroke.errors import NotEnoughMemory, NotFound
from keystroke.gateway.work import registry as registries
from keystroke.gateway.work.loading import OfferedModel
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ModelRegistry, ServedModel, local_entry, registry_from_settings
from keystroke.gateway.work.routing import ModelCandidate, Router, RoutingRequest


@dataclass
class Shelf:
    """Loads scripted models, keeps count, and may be made to wait or to refuse."""

    loaded: list[str] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    room: int = 100  # models that fit the memory
    registry: ModelRegistry | None = None

    def load(self, name: str, progress: Progress) -> ServedModel:
        if name.startswith("no-"):
            raise NotFound(f"there is no model called {name}")
        progress(f"converting {name}", 1, 2)
        assert self.go_on.wait(60)
        assert self.registry is not None
        if sum(entry.name != "small" for entry in self.registry.entries.values()) >= self.room:
            raise NotEnoughMemory(f"{name} needs more memory than there is; choose a smaller model")
        self.loaded.append(name)
        return local_entry(name, scripted_model(echo, name), role="deep", named=NamedModel(concurrent=4))

    def made(self, *, idle_s: float = 900.0, open_ended: bool = False) -> ModelRegistry:
        small = local_entry("small", scripted_model(echo, "small"), named=NamedModel(concurrent=4))
        offers = [OfferedModel("large", "deep", converses=True, context=4096)]
        self.registry = ModelRegistry(
            [small], offers=offers, load=self.load, open_ended=open_ended, idle_s=idle_s
        )
        return self.registry


@pytest.fixture
def shelf() -> Shelf:
    made = Shelf()
    made.go_on.set()
    return made


def asked(server: RunningServer, model: str, text: str = "hi") -> str:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def eventually(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_offer_is_loaded_by_its_first_request_and_then_there(shelf: Shelf) -> None:
    with serving(registry=shelf.made()) as server:
        assert asked(server, "small") == "You said: hi"
        assert shelf.loaded == []
        names = [m["id"] for m in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert names == ["auto", "fast", "deep", "small", "large"]
        for _ in range(2):
            assert asked(server, "deep") == "You said: hi"
        assert shelf.loaded == ["large"]


async def test_all_who_wait_share_one_load_and_one_who_leaves_does_not_end_it(shelf: Shelf) -> None:
    shelf.go_on.clear()
    with serving(registry=shelf.made()) as server:
        async with Client(server.url) as client:
            waiting = [asyncio.ensure_future(client.ask("hi", model="large")) for _ in range(3)]
            await asyncio.to_thread(eventually, lambda: shelf.registry and shelf.registry.loads)
            assert (await client.ask("hi", model="small")).model == "small"  # others do not wait
            waiting.pop().cancel()
            shelf.go_on.set()
            for answer in await asyncio.gather(*waiting):
                assert answer.model == "large"
    assert shelf.loaded == ["large"]


async def test_a_load_that_fails_is_told_and_can_be_tried_again(shelf: Shelf) -> None:
    with serving(registry=shelf.made(open_ended=True)) as server:
        async with Client(server.url) as client:
            for _ in range(2):
                with pytest.raises(RemoteError, match="there is no model called no-such"):
                    await client.ask("hi", model="no-such")
            assert (await client.ask("hi", model="any")).model == "any"


def test_the_least_recently_used_makes_room_and_what_is_configured_stays(shelf: Shelf) -> None:
    shelf.room = 1
    with serving(registry=shelf.made(open_ended=True)) as server:
        registries_used = server.gateway.service.registry._used
        asked(server, "one")
        registries_used["one"] = 0.0  # asked for long ago
        asked(server, "two")
        assert sorted(server.gateway.service.registry.entries) == ["small", "two"]
        shelf.room = 0
        registries_used["two"] = 0.0
        body = {"model": "three", "messages": [{"role": "user", "content": "hi"}]}
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_enough_memory")
        assert asked(server, "small") == "You said: hi"
        assert sorted(server.gateway.service.registry.entries) == ["small"]


def test_what_was_idle_is_let_go_and_loaded_again_when_asked_for(shelf: Shelf) -> None:
    with serving(registry=shelf.made(idle_s=0.2)) as server:
        asked(server, "large")
        eventually(lambda: sorted(server.gateway.service.registry.entries) == ["small"])
        assert asked(server, "large") == "You said: hi"
    assert shelf.loaded == ["large", "large"]


def test_a_load_tells_how_far_it_has_come_and_what_was_loaded(shelf: Shelf) -> None:
    shelf.go_on.clear()
    seen: list[tuple[str, int, int]] = []

    def watch(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))
        if total:
            shelf.go_on.set()

    with serving(registry=shelf.made()) as server:
        http = GatewayHttp(GatewayAddress(server.url))
        assert [m.state for m in http.status().models] == ["loaded", "offered"]
        model = http.load("large", watch)
        assert (model.name, model.state, model.chat, model.fill_in) == ("large", "loaded", True, "psm")
        assert ("converting large", 1, 2) in seen
        assert [m.state for m in http.status().models] == ["loaded", "loaded"]
        seen.clear()
        assert http.load("large", watch).name == "large"
        assert seen == []
        with pytest.raises(Exception, match="There is no model called other"):
            http.load("other", watch)


def test_a_stream_tells_those_who_ask_how_far_its_first_word_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keystroke.gateway.transport.http.PROGRESS_INTERVAL", 0.01)
    slow = scripted_model(lambda _prompt: "done", "slow", prefill_cost=0.002)
    with serving(slow) as server:
        for letter, headers in (("x", {}), ("y", {"x-keystroke-progress": "1"})):
            said = [{"role": "user", "content": letter * 400}]
            body = {"model": "slow", "stream": True, "messages": said}
            with httpx.stream(
                "POST", f"{server.url}/v1/chat/completions", json=body, headers=headers
            ) as answer:
                lines = [line for line in answer.iter_lines() if line.startswith(":")]
            assert bool(lines) == bool(headers)
    signs = [json.loads(line[2:]) for line in lines]
    read = [sign.get("read", 0) for sign in signs]
    assert read == sorted(read)
    assert signs[-1]["prompt"] > 400


def test_talk_goes_to_the_model_that_was_chosen_for_it() -> None:
    router = Router([ModelCandidate("a", "fast"), ModelCandidate("b", "deep"), ModelCandidate("c", "chat")])
    assert router.choose(RoutingRequest(Priority.CHAT, "hi", converses=True))[0] == "c"
    assert router.choose(RoutingRequest(Priority.CHAT, "think hard", converses=True))[0] == "b"
    assert router.choose(RoutingRequest(Priority.GHOST))[0] == "a"


def test_a_server_offers_what_is_installed_for_instructions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModelLibrary(tmp_path)

    def build(folder: Path) -> InstalledModel:
        (folder / "a.gguf").write_bytes(b"GGUF")
        traits = Traits("qwen2", 1, 777, True)
        return InstalledModel("coder", ModelFormat.GGUF, "", "", (StoredFile("a.gguf", 4, ""),), None, traits)

    library.add_built("coder", build)
    loaded: list[tuple[str, str]] = []

    def entry(name: str, table: NamedModel, _settings: Settings, _progress: Progress) -> ServedModel:
        loaded.append((name, table.role))
        model = replace(scripted_model(echo, name), chat=None) if name == "embedded" else scripted_model(echo)
        return local_entry(name, model, role=table.role)

    monkeypatch.setattr(registries, "load_entry", entry)
    paths = PathSettings(models=tmp_path)
    made = registry_from_settings(Settings(paths=paths))
    assert loaded == [("embedded", "fast")]
    assert [(o.name, o.role, o.context) for o in made.offers.values()] == [("coder", "deep", 777)]
    assert made.resolve("deep") == made.resolve("chat") == "coder"
    assert registry_from_settings(Settings(paths=paths), roles=False).offers == {}
    loaded.clear()
    settings = Settings(paths=paths, model=ModelSettings(deep="coder"), models={"coder": NamedModel()})
    made = registry_from_settings(settings)
    assert (loaded, made.offers) == ([("coder", "deep")], {})
