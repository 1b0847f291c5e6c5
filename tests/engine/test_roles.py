"""Who does which work: the settings first, then what is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
from tiny_model import write_tiny_model

from keystroke.config import EngineSettings, ModelSettings, NamedModel, PathSettings, Settings
from keystroke.engine import builtin, locate, roles
from keystroke.engine.library import InstalledModel, ModelFormat, ModelLibrary, StoredFile, Traits
from keystroke.engine.roles import (
    Role,
    can_chat,
    chat_model_advice,
    instruction_models,
    model_for,
    require_model,
)
from keystroke.errors import NotFound


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelLibrary:
    """An empty library, on a machine whose shipped model only completes code."""
    own = write_tiny_model(tmp_path / "own")
    (own / "tokenizer_config.json").unlink()
    monkeypatch.setattr(locate, "shipped_model", lambda: own)
    monkeypatch.setattr(roles, "shipped_model", lambda: own)
    return ModelLibrary(tmp_path / "models")


def put(library: ModelLibrary, name: str, *, chat: bool | None, added: str = "2026-01-01") -> None:
    def build(folder: Path) -> InstalledModel:
        (folder / "a.gguf").write_bytes(b"GGUF")
        traits = None if chat is None else Traits("llama", 1, 1, chat)
        return InstalledModel(name, ModelFormat.GGUF, "", added, (StoredFile("a.gguf", 4, ""),), None, traits)

    library.add_built(name, build)


def settings(library: ModelLibrary, models: dict[str, NamedModel] | None = None, **model: str) -> Settings:
    return Settings(
        paths=PathSettings(models=library.folder), model=ModelSettings(**model), models=models or {}
    )


def chosen(given: Settings) -> list[str | None]:
    return [model_for(role, given) for role in (Role.FAST, Role.DEEP, Role.CHAT)]


def test_with_nothing_installed_only_typing_has_a_model(library: ModelLibrary) -> None:
    assert chosen(settings(library)) == ["embedded", None, None]
    with pytest.raises(NotFound, match=r"`keystroke models add coder` installs one \(1\.1 GB\)"):
        require_model(Role.CHAT, settings(library))


def test_after_coder_is_added_it_follows_instructions_without_further_settings(library: ModelLibrary) -> None:
    put(library, "other", chat=True, added="2030-01-01")
    put(library, "coder", chat=True)
    assert chosen(settings(library)) == ["embedded", "coder", "coder"]
    assert instruction_models(settings(library)) == ["coder", "other"]
    assert "--model (coder, other)" in chat_model_advice(settings(library))


def test_without_coder_the_latest_added_that_converses_is_taken(library: ModelLibrary) -> None:
    put(library, "old", chat=True, added="2026-01-01")
    put(library, "new", chat=True, added="2026-02-01")
    put(library, "completes", chat=False, added="2026-03-01")
    put(library, "smollm2", chat=True, added="2026-04-01")
    put(library, "unreadable", chat=None, added="2026-05-01")
    assert chosen(settings(library)) == ["embedded", "new", "new"]


def test_the_settings_stand_above_what_is_installed(library: ModelLibrary) -> None:
    put(library, "coder", chat=True)
    put(library, "mine", chat=True)
    assert chosen(settings(library, default="mine")) == ["mine", "mine", "mine"]
    assert chosen(settings(library, deep="mine")) == ["embedded", "mine", "mine"]
    assert chosen(settings(library, chat="mine")) == ["embedded", "coder", "mine"]
    table = {"far": NamedModel(engine="remote", base_url="http://x", model="m", role="deep")}
    assert chosen(settings(library, table)) == ["embedded", "far", "far"]
    assert chosen(settings(library, table, deep="mine", chat="coder")) == ["embedded", "mine", "coder"]
    spoken = {"far": NamedModel(engine="remote", base_url="http://x", model="m", role="chat")}
    assert chosen(settings(library, spoken)) == ["embedded", "coder", "far"]


def test_a_default_that_only_completes_does_not_have_to_converse(library: ModelLibrary) -> None:
    put(library, "fim", chat=False)
    put(library, "coder", chat=True)
    assert chosen(settings(library, default="fim")) == ["fim", "coder", "coder"]


def test_a_server_is_taken_to_converse_and_a_folder_is_looked_at(
    library: ModelLibrary, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    tables = {"far": NamedModel(base_url="http://x", model="m"), "here": NamedModel(path=folder)}
    given = settings(library, tables)
    assert can_chat("far", given)
    assert can_chat("here", given)
    assert can_chat(str(folder), given)
    assert not can_chat("embedded", given)
    assert not can_chat("nowhere", given)
    remote = Settings(paths=given.paths, engine=EngineSettings(kind="remote"))
    assert can_chat(remote.model.default, remote)


def test_no_role_is_the_name_of_a_model(library: ModelLibrary) -> None:
    for name in ("auto", "fast", "Deep", "chat"):
        with pytest.raises(Exception, match="choose another name"):
            library.check_name(name)
    assert not set(builtin.BUILT_IN) & {"auto", "fast", "deep", "chat", "embedded"}
