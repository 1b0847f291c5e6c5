"""Models of the hub by owner and name, over a small server of our own that speaks its addresses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, running_hub

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
sys.path.insert(0, str(Path(__file__).parents[2] / "clients"))
from checkpoint_models import reference, write_gguf
from tiny_model import write_tiny_model

from keystroke.engine.fetch import hub as hub_module
from keystroke.engine.fetch.repositories import add_repository
from keystroke.engine.library import ModelFormat, ModelLibrary, no_progress
from keystroke.engine.load import load_model
from keystroke.errors import (
    InputError,
    KeystrokeError,
    ModelDamaged,
    ModelError,
    NotEnoughDisk,
    NotFound,
    Unavailable,
    UnsupportedModel,
)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield started


@pytest.fixture
def library(tmp_path: Path) -> ModelLibrary:
    return ModelLibrary(tmp_path / "models")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A whole Hugging Face folder, and what repositories hold besides."""
    path = write_tiny_model(tmp_path_factory.mktemp("hub") / "tiny")
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    return {**files, "README.md": b"# Tiny", "pytorch_model.bin": b"pickle", "modeling_tiny.py": b"exit()"}


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("hub") / "tiny.gguf"
    write_gguf(path, reference("qwen2"), "qwen2")
    return path.read_bytes()


def add(library: ModelLibrary, repo: str, wanted: str | None = None, name: str | None = None) -> object:
    return add_repository(library, repo, wanted, name, no_progress)


class TestAdding:
    def test_a_repository_of_safetensors_is_added_whole_and_answers(
        self, hub: Hub, library: ModelLibrary, folder: dict[str, bytes]
    ) -> None:
        hub.models["maker/tiny-chat"] = folder
        entry = add_repository(library, "maker/tiny-chat", None, None, no_progress)
        assert (entry.name, entry.kind, entry.source) == ("tiny-chat", ModelFormat.FOLDER, "maker/tiny-chat")
        assert entry.traits is not None
        assert (entry.traits.architecture, entry.traits.chat) == ("llama", True)
        path = library.path(entry)
        held = {file.name for file in path.iterdir()}
        assert held == {
            "config.json",
            "model.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert library.verify("tiny-chat") == entry
        assert library.partial_downloads() == []
        with load_model(path).engine as engine:
            assert engine.info.vocab_size > 256

    def test_one_file_of_many_is_named_by_its_whole_name_or_by_a_part_that_tells_it_apart(
        self, hub: Hub, library: ModelLibrary, gguf: bytes
    ) -> None:
        hub.models["maker/many"] = {"a-q4_0.gguf": gguf, "a-q8_0.gguf": gguf, "deep/a-q6_k.gguf": gguf}
        for wanted, name in (("a-q8_0.gguf", "a-q8_0"), ("Q4_0", "a-q4_0"), ("q6_k", "a-q6_k")):
            entry = add_repository(library, "maker/many", wanted, None, no_progress)
            assert (entry.name, entry.kind) == (name, ModelFormat.GGUF)
            assert library.path(entry).read_bytes() == gguf
        with pytest.raises(InputError, match=r"has 3 GGUF files; name one, such as maker/many:a-q4_0\.gguf"):
            add(library, "maker/many")
        with pytest.raises(NotFound, match=r"no single GGUF file q; it has a-q4_0\.gguf, a-q8_0\.gguf"):
            add(library, "maker/many", "q")

    def test_of_many_files_the_usual_one_is_taken(self, hub: Hub, library: ModelLibrary, gguf: bytes) -> None:
        hub.models["maker/many"] = {"a-q2_k.gguf": gguf, "a-Q4_K_M.gguf": gguf}
        assert (
            add_repository(library, "maker/many", None, "mine", no_progress).source
            == "maker/many:a-Q4_K_M.gguf"
        )
        assert library.names() == ["mine"]

    def test_what_a_killed_process_had_fetched_is_not_asked_for_again(
        self, hub: Hub, library: ModelLibrary, gguf: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.models["maker/one"] = {"one.gguf": gguf}
        span = len(gguf) // 3
        hub.held.add(2 * span)
        script = (
            "from pathlib import Path\nfrom keystroke.engine.library import ModelLibrary, no_progress\n"
            "from keystroke.engine.fetch import hub\n"
            "from keystroke.engine.fetch.repositories import add_repository\n"
            f"hub.SPAN = {span}\n"
            f"library = ModelLibrary(Path({str(library.folder)!r}))\n"
            "add_repository(library, 'maker/one', None, None, no_progress)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", script])
        assert hub.waiting.wait(60)
        parts = -(-len(gguf) // span)
        while len(list(library.folder.rglob("*.done"))) < parts - 1:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.wait(60)
        assert (library.names(), [name for name, _ in library.partial_downloads()]) == ([], ["one"])
        hub.held.clear()
        hub.ranges.clear()
        monkeypatch.setattr(hub_module, "SPAN", span)
        add(library, "maker/one")
        assert hub.ranges == [2 * span]
        assert library.path(library.get("one")).read_bytes() == gguf


class TestRefusing:
    def test_each_thing_that_can_be_wrong_is_one_sentence_and_leaves_nothing(
        self, hub: Hub, library: ModelLibrary, folder: dict[str, bytes], gguf: bytes
    ) -> None:
        weights = {"config.json": folder["config.json"], "tokenizer.json": folder["tokenizer.json"]}
        strange = folder["config.json"].replace(b"LlamaForCausalLM", b"MambaForCausalLM")
        hub.models |= {
            "maker/pickled": {**weights, "pytorch_model.bin": b"pickle"},
            "maker/mamba": {**folder, "config.json": strange},
            "maker/split": {"a-00001-of-00002.gguf": gguf, "a-00002-of-00002.gguf": gguf},
            "maker/text": {"a.gguf": b"GGUF, they say"},
        }
        hub.gated.add("maker/gated")
        expected: list[tuple[str, str | None, type[KeystrokeError], str]] = [
            ("maker/nothing", None, NotFound, "the hub has no model called maker/nothing"),
            ("maker/gated", None, ModelError, "accepted its terms"),
            ("maker/pickled", None, InputError, "neither a GGUF file nor safetensors"),
            ("maker/mamba", None, UnsupportedModel, "MambaForCausalLM"),
            ("maker/split", None, InputError, "neither a GGUF file"),
            ("maker/split", "00001", InputError, "one of several pieces"),
            ("maker/text", None, UnsupportedModel, "GGUF version"),
        ]
        for repo, wanted, kind, sentence in expected:
            with pytest.raises(kind, match=sentence) as told:
                add(library, repo, wanted)
            assert "\n" not in str(told.value)
        assert (library.names(), library.partial_downloads()) == ([], [])
        assert "model.safetensors" not in hub.asked, "what cannot run is refused before its weights come"

    def test_other_bytes_than_the_hub_promised_are_refused(
        self, hub: Hub, library: ModelLibrary, gguf: bytes
    ) -> None:
        hub.models["maker/one"] = {"one.gguf": gguf}
        hub.lies["one.gguf"] = gguf[::-1]
        with pytest.raises(ModelDamaged, match="its SHA-256 differs"):
            add(library, "maker/one")
        assert library.names() == []
        hub.lies.clear()
        add(library, "maker/one")
        assert library.path(library.get("one")).read_bytes() == gguf

    def test_no_room_on_the_disk_is_said_before_anything_comes(
        self, hub: Hub, library: ModelLibrary, gguf: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.models["maker/one"] = {"one.gguf": gguf}
        free = shutil.disk_usage("/")._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
        with pytest.raises(NotEnoughDisk, match=r"one needs 0\.1 GB more"):
            add(library, "maker/one")
        assert hub.asked == []

    def test_a_hub_that_cannot_be_reached_is_said_with_what_to_do(
        self, library: ModelLibrary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(
            Unavailable, match=r"the hub cannot be reached for maker/one .*keystroke models add"
        ):
            add(library, "maker/one")

    def test_a_name_that_is_taken_is_refused_before_the_hub_is_asked(
        self, hub: Hub, library: ModelLibrary, gguf: bytes
    ) -> None:
        hub.models["maker/one"] = {"one.gguf": gguf}
        add(library, "maker/one")
        hub.asked.clear()
        with pytest.raises(KeystrokeError, match="exists already"):
            add(library, "maker/one")
        assert hub.asked == []
