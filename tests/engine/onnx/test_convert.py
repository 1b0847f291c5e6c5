from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from keystroke.engine.base import Sampling
from keystroke.engine.checkpoint import ModelSpec, extend_context, open_checkpoint
from keystroke.engine.onnx.convert import conversion_cache, convert_model, converted_bytes
from keystroke.engine.onnx.engine import OnnxEngine, OnnxGraph, OnnxOptions
from keystroke.engine.onnx.precision import PRECISIONS
from keystroke.errors import ConfigError, ModelDamaged

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_models import saved, write_gguf

Array = np.ndarray[Any, Any]
PROMPT: list[int] = np.random.default_rng(0).integers(0, 96, 24).tolist()


def _logprobs(model: Path, spec: ModelSpec, precision: str) -> list[dict[int, float]]:
    """The likeliest tokens after each token of the prompt, from one verification pass over it."""
    wanted = Sampling(logprobs=20)
    found = []
    with (
        OnnxEngine(OnnxGraph(model, spec, precision), OnnxOptions(threads=1)) as engine,
        engine.session() as session,
    ):
        for length in (1, 2, 9, len(PROMPT)):
            session.extend(PROMPT[:length])
            found.append(dict(session.step(sampling=wanted).logprobs[0].top))
    return found


def _reference(model: Any) -> list[Array]:
    with torch.no_grad():
        logprobs: Array = model(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1).numpy()
    return [logprobs[length - 1] for length in (1, 2, 9, len(PROMPT))]


def _errors(actual: list[dict[int, float]], expected: list[Array]) -> Array:
    pairs = [
        (value, row[token])
        for each, row in zip(actual, expected, strict=True)
        for token, value in each.items()
    ]
    assert len(pairs) == 80
    errors: Array = np.abs(np.diff(np.array(pairs), axis=1))
    return errors


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_computes_what_transformers_computes(
    tmp_path: Path, family: str, tied: bool
) -> None:
    reference = saved(tmp_path / "model", family, tie_word_embeddings=tied)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        model = convert_model(checkpoint, precision="fp32", cache=tmp_path)
        actual = _logprobs(model, checkpoint.spec, "fp32")
    assert _errors(actual, _reference(reference)).max() < 1e-4


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 5}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
        ("gemma3", {"sliding_window": 9, "num_hidden_layers": 4}),
        ("smollm3", {"no_rope_layers": [0, 1]}),
    ],
)
def test_what_a_layer_does_otherwise_is_computed_as_transformers_does(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """However the tokens are grouped into runs: a window moves with each of them."""
    reference = saved(tmp_path / "model", family, **changes)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        spec = checkpoint.spec
        assert spec.unsupported_feature() is not None
        model = convert_model(checkpoint, precision="fp32", cache=tmp_path)
        assert _errors(_logprobs(model, spec, "fp32"), _reference(reference)).max() < 1e-4
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0].argmax(-1).tolist()
    with (
        OnnxEngine(OnnxGraph(model, spec, "fp32"), OnnxOptions(threads=1)) as engine,
        engine.session() as session,
    ):
        session.extend(PROMPT[:1])
        for at in range(1, len(PROMPT)):
            assert session.step().tokens[0] == expected[at - 1]
            session.rollback(at)
            session.extend(PROMPT[: at + 1])
        session.rollback(3)
        session.extend(PROMPT[:4])
        assert session.step().tokens[0] == expected[3]
        session.rollback(4)
        step = session.step([expected[3], *PROMPT[5:9]])
        assert step.tokens[0] == expected[3]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
        ("gemma3", {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32}),
    ],
)
def test_a_gguf_file_of_a_newer_family_computes_what_transformers_computes(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    reference = saved(tmp_path / "model", family, **changes)
    write_gguf(tmp_path / "model.gguf", reference, family)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        model = convert_model(checkpoint, precision="fp32", cache=tmp_path)
        actual = _logprobs(model, checkpoint.spec, "fp32")
    assert _errors(actual, _reference(reference)).max() < 1e-4


def test_a_model_with_every_bias_computes_what_transformers_computes(tmp_path: Path) -> None:
    reference = saved(tmp_path / "model", "llama", attention_bias=True, mlp_bias=True)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        model = convert_model(checkpoint, precision="fp32", cache=tmp_path)
        actual = _logprobs(model, checkpoint.spec, "fp32")
    assert _errors(actual, _reference(reference)).max() < 1e-4


def test_a_gguf_file_converts_to_the_same_numbers_as_its_folder(tmp_path: Path) -> None:
    reference = saved(tmp_path / "model", "llama")
    write_gguf(tmp_path / "model.gguf", reference, "llama")
    found = []
    for path in (tmp_path / "model", tmp_path / "model.gguf"):
        with open_checkpoint(path) as checkpoint:
            model = convert_model(checkpoint, precision="int8", cache=tmp_path / "cache")
            found.append(_logprobs(model, checkpoint.spec, "int8"))
    assert found[0] == found[1]


@pytest.mark.parametrize(("precision", "bound"), [("fp16", 0.002), ("int8", 0.03), ("int4", 0.25)])
def test_fewer_bits_stay_near_the_reference(tmp_path: Path, precision: str, bound: float) -> None:
    reference = saved(tmp_path / "model", "qwen2")
    with open_checkpoint(tmp_path / "model") as checkpoint:
        model = convert_model(checkpoint, precision=precision, cache=tmp_path)
        actual = _logprobs(model, checkpoint.spec, precision)
    error = np.sqrt(np.square(_errors(actual, _reference(reference))).mean())
    assert 0 < error < bound


def test_the_same_weights_are_found_again_wherever_they_lie(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    places = set()
    for name in ("here", "there"):
        saved(tmp_path / name, "llama")
        with open_checkpoint(tmp_path / name) as checkpoint:
            checkpoint.spec = replace(checkpoint.spec, name="model")
            places.add(
                convert_model(
                    checkpoint, precision="int4", cache=tmp_path, progress=lambda *p: seen.append(p)
                )
            )
    assert len(places) == 1
    totals = {total for _, total in seen}
    assert len(totals) == 1
    assert seen == sorted(set(seen)), "the second time reports no work"
    assert seen[-1][0] > 0.99 * seen[-1][1]


def test_precision_context_and_weights_each_make_another_model(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama")
    places = []
    with open_checkpoint(tmp_path / "model") as checkpoint:
        places += [convert_model(checkpoint, precision=p, cache=tmp_path) for p in ("int4", "int8")]
        checkpoint.spec = extend_context(checkpoint.spec, 1024)
        places.append(convert_model(checkpoint, precision="int4", cache=tmp_path))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-4}))
    with open_checkpoint(tmp_path / "model") as checkpoint:
        places.append(convert_model(checkpoint, precision="int4", cache=tmp_path))
    assert len(set(places)) == 4
    assert len(conversion_cache(tmp_path).entries()) == 4


def test_large_weights_lie_outside_the_graph_on_page_boundaries(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama", vocab_size=8192)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        path = convert_model(checkpoint, precision="fp32", cache=tmp_path)
    model = onnx.load(path, load_external_data=False)
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    large = [place for place in places.values() if int(place["length"]) >= 1 << 20]
    assert len(large) == 2  # the embedding and the head
    assert all(int(place["offset"]) % 65_536 == 0 for place in large)
    assert all(int(place["offset"]) % 64 == 0 for place in places.values())
    assert {place["location"] for place in places.values()} == {"weights.bin"}
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("precision", list(PRECISIONS))
@pytest.mark.parametrize("tied", [True, False])
def test_the_room_asked_for_is_the_room_taken(tmp_path: Path, precision: str, tied: bool) -> None:
    saved(
        tmp_path / "model",
        "qwen2",
        hidden_size=256,
        vocab_size=2048,
        intermediate_size=512,
        tie_word_embeddings=tied,
    )
    with open_checkpoint(tmp_path / "model") as checkpoint:
        path = convert_model(checkpoint, precision=precision, cache=tmp_path)
        estimate = converted_bytes(checkpoint.spec, PRECISIONS[precision])
    actual = sum(file.stat().st_size for file in path.parent.iterdir())
    assert 0.95 * actual < estimate + 60_000  # the graph itself
    assert estimate < 1.1 * actual


def test_an_interrupted_conversion_leaves_no_model(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with open_checkpoint(tmp_path / "model") as checkpoint:
        with pytest.raises(KeyboardInterrupt):
            convert_model(checkpoint, precision="int4", cache=tmp_path, progress=stop)
        assert conversion_cache(tmp_path).entries() == []
        assert convert_model(checkpoint, precision="int4", cache=tmp_path).is_file()


def test_a_model_with_broken_numbers_is_damage(tmp_path: Path) -> None:
    reference = saved(tmp_path / "model", "llama")
    with torch.no_grad():
        reference.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    reference.save_pretrained(tmp_path / "model")
    with open_checkpoint(tmp_path / "model") as checkpoint, pytest.raises(ModelDamaged, match="finite"):
        convert_model(checkpoint, precision="int4", cache=tmp_path)


def test_an_unknown_precision_names_the_known_ones(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama")
    with (
        open_checkpoint(tmp_path / "model") as checkpoint,
        pytest.raises(ConfigError, match="int4, int8, fp16, fp32"),
    ):
        convert_model(checkpoint, precision="int3", cache=tmp_path)
