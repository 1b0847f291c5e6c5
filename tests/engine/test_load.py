from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from installed import lend_operators
from keystroke.config import load_settings
from keystroke.engine.load import load_model
from keystroke.engine.onnx import backend
from keystroke.errors import (
    ConfigError,
    KeystrokeError,
    ModelDamaged,
    NotEnoughMemory,
    NotFound,
    UnsupportedModel,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
from tiny_model import write_tiny_model


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(NotFound, match="smollm2"):
        load_model("smolm2")


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(KeystrokeError, match="no-such-model"):
        load_model(Path("/no-such-model"))


def test_a_model_without_a_usable_tokenizer_is_refused_before_it_is_converted(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    lend_operators(tmp_path / "cache")
    settings = load_settings({"paths.cache": str(tmp_path / "cache")})
    with pytest.raises(ModelDamaged, match=r"tokenizer\.json does not describe a tokenizer"):
        load_model(folder, settings)
    assert not any(tmp_path.rglob("*.onnx"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnsupportedModel, match="MambaForCausalLM"):
        load_model(folder, settings)


@pytest.mark.model
def test_a_model_larger_than_the_memory_is_refused_before_it_is_converted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "available_bytes", lambda: 50 << 20)
    lend_operators(tmp_path)
    settings = load_settings({"paths.cache": str(tmp_path), "model.precision": "int8"})
    with pytest.raises(NotEnoughMemory, match=r"needs about 0\.2 GB at int8 and 0\.0 GB are free"):
        load_model("smollm2", settings)
    assert not any(tmp_path.rglob("*.onnx"))


@pytest.mark.model
def test_a_remote_engine_loads_no_local_model() -> None:
    with pytest.raises(ConfigError, match="base_url"):
        load_model("smollm2", load_settings({"engine.kind": "remote"}))


@pytest.mark.model
def test_settings_reach_the_engine() -> None:
    settings = load_settings({"engine.context": "512", "engine.exact": "false", "engine.threads": "1"})
    model = load_model("smollm2", settings)
    with model.engine as engine:
        assert engine.info.context_length == 512
        assert engine.info.precision == "stored"
        assert model.chat is not None
