"""An adapter beside a base gives what a model with the adapter in its weights gives, in every layout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from installed import lend_operators
from keystroke.config import load_settings
from keystroke.engine import locate
from keystroke.engine.adapter import (
    PRODUCTS,
    AdaptedCheckpoint,
    AdapterFile,
    AdapterShape,
    product_sizes,
    read_adapter,
    write_adapter,
)
from keystroke.engine.backends import LoadArguments, choose_backend
from keystroke.engine.base import Engine
from keystroke.engine.checkpoint import ModelSpec, open_checkpoint
from keystroke.engine.host import HostSession
from keystroke.engine.library import no_progress
from keystroke.engine.load import load_model
from keystroke.engine.locate import adapter_path
from keystroke.engine.onnx import native
from keystroke.engine.onnx.convert import convert_model, convert_stored
from keystroke.engine.onnx.engine import OnnxEngine, OnnxGraph, OnnxOptions
from keystroke.engine.onnx.stored import NativeWeights, stored_tables
from keystroke.errors import InputError, ModelDamaged, NotFound

sys.path.insert(0, str(Path(__file__).parent / "checkpoint"))
sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))
from stored_models import write_stored
from tiny_model import write_tiny_model

PROMPT: list[int] = np.random.default_rng(0).integers(0, 96, 24).tolist()
FACTS = {"base": "tiny", "next_edit": "3", "fim_order": "spm"}


def adapter_for(spec: ModelSpec, path: Path, rank: int = 4, size: float = 0.4) -> AdapterFile:
    """A random adapter that was written and read again."""
    dice = np.random.default_rng(3)
    shape = AdapterShape.of(spec, rank)
    pairs = {
        (layer, product): (
            dice.normal(0, columns**-0.5, (rank, columns)).astype(np.float32),
            dice.normal(0, size, (rows, rank)).astype(np.float32),
        )
        for layer in range(spec.layers)
        for product, (rows, columns) in zip(PRODUCTS, product_sizes(shape), strict=True)
    }
    write_adapter(path, shape, pairs, FACTS)
    return read_adapter(path)


def logprobs(engine: Engine) -> np.ndarray[Any, np.dtype[np.float64]]:
    with engine.session() as session:
        assert isinstance(session, HostSession)
        logits = session._forward(PROMPT, 0, len(PROMPT), None).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    found: np.ndarray[Any, np.dtype[np.float64]] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def divergence(wanted: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    return float((np.exp(wanted) * (wanted - found)).sum(axis=1).mean())


@pytest.mark.parametrize("layout", ["fp32", "native", "portable"])
def test_an_adapter_beside_the_weights_is_the_adapter_in_them(tmp_path: Path, layout: str) -> None:
    write_stored(tmp_path / "model.gguf", "qwen2", ["Q8_0", "Q6_K"])
    library = native.operators_library(load_settings().paths.cache) if layout == "native" else None
    if layout == "native" and library is None:
        pytest.skip("no C compiler here, or not the vectors")
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        spec = checkpoint.spec
        adapter = adapter_for(spec, tmp_path / "a.safetensors")
        base = convert_model(checkpoint, precision="fp32", cache=tmp_path)
        merged = convert_model(AdaptedCheckpoint(checkpoint, adapter), precision="fp32", cache=tmp_path)
        if layout == "fp32":
            beside = convert_model(checkpoint, precision="fp32", cache=tmp_path, adapted=True)
        else:
            beside = convert_stored(checkpoint, native=library is not None, cache=tmp_path, adapted=True)
        stored = NativeWeights(library, stored_tables(checkpoint)) if library is not None else None
    one_thread = OnnxOptions(threads=1)
    with OnnxEngine(OnnxGraph(merged, spec, "fp32"), one_thread) as engine:
        wanted = logprobs(engine)
    with OnnxEngine(OnnxGraph(base, spec, "fp32"), one_thread) as engine:
        plain = logprobs(engine)
    with OnnxEngine(OnnxGraph(beside, spec, layout, stored, adapter), one_thread) as engine:
        found = logprobs(engine)
        assert engine.info.mapped == (layout == "native"), "only there a second engine shares the weights"
    apart, near = divergence(wanted, plain), divergence(wanted, found)
    assert apart > 0.02  # the adapter does something
    assert near < (1e-6 if layout == "fp32" else apart / 10)


@pytest.mark.parametrize("kinds", [["Q8_0"], ["Q4_K", "Q6_K"]], ids=" ".join)
def test_mlx_adds_an_adapter_to_weights_as_they_are_stored(tmp_path: Path, kinds: list[str]) -> None:
    pytest.importorskip("mlx.core", reason="MLX is not installed")
    write_stored(tmp_path / "model.gguf", "qwen2", kinds)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        spec = checkpoint.spec
        adapter = adapter_for(spec, tmp_path / "a.safetensors")
        merged = convert_model(AdaptedCheckpoint(checkpoint, adapter), precision="fp32", cache=tmp_path)
    with OnnxEngine(OnnxGraph(merged, spec, "fp32"), OnnxOptions(threads=1)) as engine:
        wanted = logprobs(engine)
    request = LoadArguments(
        path=tmp_path / "model.gguf", precision="auto", settings=load_settings(), progress=no_progress
    )
    with choose_backend("mlx").load(request) as engine:
        apart = divergence(wanted, logprobs(engine))
    with choose_backend("mlx").load(replace(request, adapter=adapter)) as engine:
        near = divergence(wanted, logprobs(engine))
    assert apart > 0.01
    assert near < apart / 1000
    write_stored(tmp_path / "other.gguf", "qwen2", kinds, intermediate_size=256)
    with pytest.raises(InputError, match="made for tiny"):
        choose_backend("mlx").load(replace(request, path=tmp_path / "other.gguf", adapter=adapter))


def test_a_table_names_an_adapter_and_the_model_says_what_it_has_learned(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    with open_checkpoint(folder) as checkpoint:
        adapter_for(checkpoint.spec, tmp_path / "a.safetensors")
    lend_operators(tmp_path / "cache")
    settings = load_settings({
        "paths.cache": str(tmp_path / "cache"),
        "models.both.path": str(folder),
        "models.both.adapter": str(tmp_path / "a.safetensors"),
    })  # fmt: skip
    model = load_model("both", settings)
    try:
        assert dict(model.adapter_facts)["next_edit"] == "3"
        assert model.fim is not None
        assert model.fim.order == "spm"
    finally:
        model.engine.close()


def test_an_adapter_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = load_settings({"models.both.path": str(tmp_path), "models.both.adapter": str(tmp_path / "x")})
    with pytest.raises(NotFound, match="x"):
        adapter_path("both", settings)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    write_stored(tmp_path / "model.gguf", "qwen2", ["Q8_0"])
    write_stored(tmp_path / "other.gguf", "qwen2", ["Q8_0"], intermediate_size=256)
    with open_checkpoint(tmp_path / "model.gguf") as one, open_checkpoint(tmp_path / "other.gguf") as other:
        adapter = adapter_for(one.spec, tmp_path / "a.safetensors")
        with pytest.raises(InputError, match="made for tiny"):
            AdaptedCheckpoint(other, adapter)


def _short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _not_finite(data: bytes) -> bytes:
    return data[:-2] + b"\xff\x7f"


def _other_format(data: bytes) -> bytes:
    return data.replace(b"keystroke-adapter-1", b"keystroke-adapter-9")


@pytest.mark.parametrize("damage", [_short, _not_finite, _other_format, lambda data: b"{}"])
def test_a_damaged_adapter_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_stored(tmp_path / "model.gguf", "qwen2", ["Q8_0"])
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        adapter_for(checkpoint.spec, tmp_path / "a.safetensors")
    path = tmp_path / "a.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelDamaged, match="get it again"):
        read_adapter(path)


def test_a_name_with_edit_is_the_model_with_the_adapter_that_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings({"models.tiny.path": str(tmp_path)})
    monkeypatch.setattr(locate, "shipped_folders", lambda: [tmp_path])
    with pytest.raises(NotFound, match="has no adapter"):
        adapter_path("tiny:edit", settings)
    (tmp_path / "coder-edit").mkdir()
    (tmp_path / "coder-edit" / "a.safetensors").touch()
    assert adapter_path("tiny:edit", settings) == tmp_path / "coder-edit" / "a.safetensors"
    assert adapter_path("tiny", settings) is None
    assert locate.resolve("tiny:edit", settings) == locate.resolve("tiny", settings)


def test_a_table_may_stand_for_a_model_with_the_adapter_that_is_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(locate, "shipped_folders", lambda: [tmp_path])
    lend_operators(tmp_path / "cache")
    settings = load_settings({
        "paths.cache": str(tmp_path / "cache"),
        "models.tiny.path": str(folder),
        "models.tiny.precision": "fp32",
        "models.second.model": "tiny:edit",
        "models.second.role": "deep",
        "models.plain.model": "smollm2",
    })  # fmt: skip
    with pytest.raises(NotFound, match=r"no adapter, so there is no tiny:edit, which models\.second names"):
        load_model("second", settings)
    assert adapter_path("plain", settings) is None
    (tmp_path / "coder-edit").mkdir()
    with open_checkpoint(folder) as checkpoint:
        adapter_for(checkpoint.spec, tmp_path / "coder-edit" / "a.safetensors")
    tiny, second, named = (load_model(name, settings) for name in ("tiny", "second", "tiny:edit"))
    with tiny.engine, second.engine, named.engine:
        assert tiny.fim is not None
        assert second.fim is not None
        assert (tiny.fim.order, second.fim.order) == ("psm", "spm")
        assert dict(second.adapter_facts)["next_edit"] == "3"
        assert (second.name, second.path) == ("second", folder)
        assert named.fim == second.fim
        assert named.engine.info.precision == "fp32", "NAME:edit is run as NAME is"
