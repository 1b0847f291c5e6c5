"""A model with its adapter beside the model alone: loaded unasked where that is cheap, gone with it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from gateway_support import echo, scripted_model, serving
from test_live import after, spm_model, wired

from keystroke.config import ModelSettings, NamedModel, PathSettings, Settings
from keystroke.engine import locate
from keystroke.engine.library import InstalledModel, ModelFormat, ModelLibrary, Progress, StoredFile, Traits
from keystroke.errors import NotEnoughMemory
from keystroke.gateway.work import registry as registries
from keystroke.gateway.work.loading import OfferedModel
from keystroke.gateway.work.registry import ModelRegistry, ServedModel, local_entry, registry_from_settings

ABOVE = "# what stands above, long enough to tell how fast it is read\n" * 4
TEXT = f"{ABOVE}def add(a, b):\n    return a"
RATE = 123.0
EMPTY = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)  # no tensors and no metadata


def script(answer: str) -> Callable[[str], str]:
    return after({"return a": answer})


@dataclass
class Shelf:
    """Loads a scripted model of any name; `plain` has an adapter, the others have none."""

    loaded: list[str] = field(default_factory=list)
    refuses: bool = False
    looked: int = 0

    def load(self, name: str, progress: Progress) -> ServedModel:
        self.loaded.append(name)
        if self.refuses:
            raise NotEnoughMemory(f"{name} needs more than there is")
        return local_entry(name, replace(spm_model(script(" + b\n")), name=name), role="deep")

    def adapted(self, entry: ServedModel) -> str | None:
        self.looked += 1
        return "plain:edit" if entry.name == "plain" else None

    def registry(
        self, *pinned: ServedModel, offers: tuple[str, ...] = (), idle_s: float = 900.0
    ) -> ModelRegistry:
        small = local_entry("small", replace(spm_model(script(" - b\n")), name="small"))
        offered = [OfferedModel(name, "deep", converses=True) for name in offers]
        return ModelRegistry(
            [small, *pinned], offers=offered, load=self.load, adapted_name=self.adapted, idle_s=idle_s
        )


def plain() -> ServedModel:
    """Fills in with the prefix first."""
    return local_entry("plain", replace(scripted_model(script(" * b\n")), name="plain"), role="deep")


@asynccontextmanager
async def started(registry: ModelRegistry) -> AsyncIterator[ModelRegistry]:
    registry.start()
    try:
        yield registry
    finally:
        await registry.stop()


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is waited for happens in another thread
            await asyncio.sleep(0.005)


def measured(entry: ServedModel) -> ServedModel:
    entry.scheduler.prefill_rate = RATE
    return entry


# ── who has an opinion ────────────────────────────────────────────────────────────────────────


def opinions(shelf: Shelf, count: int) -> list[tuple[str, str]]:
    """Who says what about a place, asked so many times by editors that know nothing of each other."""
    told: list[tuple[str, str]] = []

    async def run() -> None:
        for _ in range(count):
            async with wired(server) as wire:
                await wire.open(TEXT)
                await wire.complete(len(TEXT), 0)
                second = await wire.until("suggestion.revised")
            told.append((second["receipt"]["model"], second["text"]))
            await until(lambda: not registry.loads)

    registry = shelf.registry(plain())
    with serving(registry=registry) as server:
        asyncio.run(run())
    return told


def test_the_first_opinion_is_the_plain_models_and_the_next_are_those_of_the_one_with_its_adapter() -> None:
    shelf = Shelf()
    assert opinions(shelf, 3) == [("plain", " * b"), *[("plain:edit", " + b")] * 2]
    assert shelf.loaded == ["plain:edit"]


def test_where_it_cannot_be_loaded_the_plain_one_goes_on_and_it_is_not_tried_again() -> None:
    shelf = Shelf(refuses=True)
    assert opinions(shelf, 3) == [("plain", " * b")] * 3
    assert shelf.loaded == ["plain:edit"]
    assert shelf.looked == 1


# ── when it comes and goes ────────────────────────────────────────────────────────────────────


async def test_it_is_not_loaded_before_it_is_known_how_fast_the_plain_one_reads() -> None:
    shelf, base = Shelf(), plain()
    async with started(shelf.registry(base)) as registry:
        registry.load_adapted(base)
        assert not registry.loads
        registry.load_adapted(measured(base))
        await until(lambda: "plain:edit" in registry.entries)
        assert registry.entries["plain:edit"].scheduler.prefill_rate == RATE
        registry.load_adapted(base)
        assert not registry.loads


async def test_it_stays_as_long_as_the_plain_one_and_goes_with_it() -> None:
    shelf, base = Shelf(), plain()
    async with started(shelf.registry(base, offers=("other",), idle_s=0.1)) as registry:
        registry.load_adapted(measured(base))
        await registry.ensure_loaded("other")
        await until(lambda: "plain:edit" in registry.entries and "other" not in registry.entries)
        await asyncio.sleep(0.3)
        assert sorted(registry.entries) == ["plain", "plain:edit", "small"]
    async with started(shelf.registry(offers=("plain",))) as registry:
        for _ in range(2):  # when the plain one comes back, so does it
            base = await registry.ensure_loaded("plain")
            registry.load_adapted(measured(base))
            await until(lambda: "plain:edit" in registry.entries)
            registry._used["plain"] = 0.0  # the plain one was asked for long ago
            assert await registry.unload_idlest()
            assert list(registry.entries) == ["small"]


async def test_asked_for_by_name_it_is_a_model_like_any_other() -> None:
    shelf, base = Shelf(), plain()
    async with started(shelf.registry(base, idle_s=0.1)) as registry:
        registry.load_adapted(measured(base))
        await until(lambda: "plain:edit" in registry.entries)
        await registry.ensure_loaded("plain:edit")
        await until(lambda: sorted(registry.entries) == ["plain", "small"])


async def test_it_makes_room_for_what_is_asked_for_and_does_not_come_back_by_itself() -> None:
    shelf, base = Shelf(), plain()
    async with started(shelf.registry(base)) as registry:
        registry.load_adapted(measured(base))
        await until(lambda: "plain:edit" in registry.entries)
        registry._used["plain:edit"] = 0.0  # loaded long ago
        assert await registry.unload_idlest()
        assert sorted(registry.entries) == ["plain", "small"]
        registry.load_adapted(base)
        assert not registry.loads


# ── for whom there is one ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PathSettings:
    """A library that holds `coder`, and an installation that brings its adapter."""

    def build(folder: Path) -> InstalledModel:
        for name in ("a.gguf", "b.gguf"):
            (folder / name).write_bytes(EMPTY)
        file = StoredFile("a.gguf", len(EMPTY), "")
        return InstalledModel("coder", ModelFormat.GGUF, "", "", (file,), None, Traits("qwen2", 1, 777, True))

    ModelLibrary(tmp_path / "models").add_built("coder", build)
    (tmp_path / "coder-edit").mkdir()
    (tmp_path / "coder-edit" / "adapter.safetensors").touch()
    monkeypatch.setattr(locate, "shipped_folders", lambda: [tmp_path])
    return PathSettings(models=tmp_path / "models")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, installed: PathSettings) -> list[tuple[str, str]]:
    """What was loaded, and in which role. Most run the weights of the library's coder, mapped;
    `other` weights of its own; `copied` the same weights, not mapped."""
    found: list[tuple[str, str]] = []
    weights = installed.models / "coder" / "a.gguf"

    def entry(name: str, table: NamedModel, _settings: Settings, _progress: Progress) -> ServedModel:
        found.append((name, table.role))
        model = scripted_model(echo, name)
        model.engine.info = replace(model.engine.info, mapped=name != "copied")
        learned = {"fim_order": "spm"} if name.endswith(":edit") else {}
        path = weights.parent / "b.gguf" if name == "other" else weights
        return local_entry(name, replace(model, path=path, adapter_facts=learned), role=table.role)

    monkeypatch.setattr(registries, "load_entry", entry)
    return found


async def adapted(registry: ModelRegistry, name: str, loaded: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What is loaded for a model of this name."""
    async with started(registry):
        entry = await registry.ensure_loaded(name)
        loaded.clear()
        registry.load_adapted(measured(entry))
        await until(lambda: not registry.loads)
        return loaded


async def test_a_server_loads_the_adapter_of_the_installed_coder_beside_it(
    installed: PathSettings, loaded: list[tuple[str, str]]
) -> None:
    offered = registry_from_settings(Settings(paths=installed))
    assert await adapted(offered, "coder", loaded) == [("coder:edit", "deep")]
    tables = {"mine": NamedModel(model="coder", role="chat")}
    configured = registry_from_settings(Settings(paths=installed, models=tables))
    assert await adapted(configured, "mine", loaded) == [("mine:edit", "chat")]
    chosen = Settings(paths=installed, model=ModelSettings(deep="coder"), models={"coder": NamedModel()})
    assert await adapted(registry_from_settings(chosen), "coder", loaded) == [("coder:edit", "deep")]


@pytest.mark.parametrize("name", ["other", "copied", "mine:edit"])
async def test_weights_of_another_model_a_second_copy_and_what_has_its_adapter_get_none(
    name: str, installed: PathSettings, loaded: list[tuple[str, str]]
) -> None:
    settings = Settings(paths=installed, models={name: NamedModel(role="deep")})
    assert await adapted(registry_from_settings(settings), name, loaded) == []


async def test_an_installation_without_an_adapter_loads_none(
    installed: PathSettings, loaded: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate, "shipped_folders", list)
    assert await adapted(registry_from_settings(Settings(paths=installed)), "coder", loaded) == []
