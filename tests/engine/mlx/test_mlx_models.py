"""Models on MLX, on its CPU build: logits of transformers, weights as files store them, its own folders."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from keystroke.config import load_settings
from keystroke.engine.backends import LoadArguments, choose_backend
from keystroke.engine.base import GREEDY
from keystroke.engine.checkpoint import open_checkpoint, tensor_shapes
from keystroke.engine.library import no_progress
from keystroke.engine.mlx.backend import unavailable_reason
from keystroke.engine.mlx.engine import MlxEngine
from keystroke.engine.mlx.weights import _AFFINE, mxfp4, pack, quantise
from keystroke.engine.speculative import MAX_DRAFT, drafter_for, verify_cost
from keystroke.engine.speculative.cost import CHEAP, remember_cost
from keystroke.errors import ConfigError, ModelDamaged, NotEnoughMemory, UnsupportedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
import checkpoint_models
from family_models import MODELS, TOKENS, distance, reference, reference_logits, write_gguf
from stored_models import random_blocks, widened

DENSE = ("llama", "qwen2", "qwen3", "gemma3", "smollm3")


def mlx_on(path: Path, kv_budget_mb: int = 64, precision: str = "auto") -> MlxEngine:
    settings = load_settings()
    settings = replace(settings, engine=replace(settings.engine, kv_budget_mb=kv_budget_mb))
    request = LoadArguments(path=path, precision=precision, settings=settings, progress=no_progress)
    engine = choose_backend("mlx").load(request)
    assert isinstance(engine, MlxEngine)
    return engine


def logits(engine: MlxEngine, tokens: list[int], rows: int) -> np.ndarray[Any, Any]:
    with engine.session() as session:
        return session._forward(tokens, 0, rows, None)


@pytest.mark.parametrize("family", DENSE)
def test_dense_models_compute_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = checkpoint_models.saved(tmp_path, family)
    wanted = reference_logits(model, TOKENS)[-100:]
    with mlx_on(tmp_path) as engine:
        assert distance(logits(engine, TOKENS, 100), wanted) < 1e-4


@pytest.mark.parametrize("family", MODELS)
def test_newer_families_compute_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = reference(family)
    model.save_pretrained(tmp_path / "model")
    wanted = reference_logits(model, TOKENS)[-100:]
    with mlx_on(tmp_path / "model") as engine:
        assert distance(logits(engine, TOKENS, 100), wanted) < 1e-4
    if MODELS[family][3]:
        for kind, most in (("F32", 1e-4), ("Q8_0", 0.12)):
            write_gguf(tmp_path / f"{kind}.gguf", family, model, GGMLQuantizationType[kind])
            with mlx_on(tmp_path / f"{kind}.gguf") as engine:
                assert distance(logits(engine, TOKENS, 100), wanted) < most


@pytest.mark.parametrize("family", MODELS)
def test_an_engine_runs_on_another_thread_than_it_was_loaded_on(family: str, tmp_path: Path) -> None:
    reference(family).save_pretrained(tmp_path)
    with mlx_on(tmp_path) as engine, ThreadPoolExecutor(1) as other:
        assert other.submit(logits, engine, TOKENS, 4).result().shape == (4, 96)


@pytest.mark.parametrize("kind", _AFFINE)
def test_blocks_become_groups_without_a_change(kind: str) -> None:
    blocks = random_blocks(kind, 6, 512)
    affine = _AFFINE[kind](blocks)
    packed, scales, offsets = mx.array(pack(affine.codes, affine.bits)), affine.scales, affine.offsets
    found = mx.dequantize(packed, mx.array(scales), mx.array(offsets), group_size=32, bits=affine.bits)
    wanted = widened(kind, blocks)
    assert np.abs(np.array(found) - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_mxfp4_keeps_its_codes_and_scales() -> None:
    blocks, ids = random_blocks("MXFP4", 6, 512), mx.array([4, 0])
    matrix, wanted = mxfp4(blocks), widened("MXFP4", blocks)
    assert (np.array(matrix.rows(ids).astype(mx.float32)) == wanted[[4, 0]]).all()
    assert sum(array.nbytes for array in matrix.arrays) == blocks.nbytes
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    near = 1e-5 * np.abs(x).sum() * np.abs(wanted).max()
    assert np.abs(np.array(matrix(mx.array(x))) - x @ wanted.T).max() < near
    experts, chosen = matrix.experts(2), mx.array([[1], [0], [1]])
    found = np.array(experts(mx.array(x)[:, None, None], chosen))[:, 0, 0]
    assert np.abs(found - [x[0] @ wanted[3:].T, x[1] @ wanted[:3].T, x[2] @ wanted[3:].T]).max() < near


def test_other_types_keep_eight_bits() -> None:
    wanted = widened("Q6_K", random_blocks("Q6_K", 8, 512))
    affine = quantise(wanted.astype(np.float32))
    groups = affine.codes.reshape(8, -1, 32) * affine.scales[..., None] + affine.offsets[..., None]
    spread = np.ptp(wanted.reshape(8, -1, 32), axis=-1, keepdims=True)
    assert (np.abs(groups - wanted.reshape(8, -1, 32)) <= spread / 255 * 0.51).all()
    flat = quantise(np.full((1, 32), 0.25, np.float32))
    assert (flat.codes == 0).all()
    assert flat.offsets == 0.25


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32), (3, 64), (6, 32)])
def test_a_folder_of_mlx_is_read_by_every_engine(tmp_path: Path, bits: int, group: int) -> None:
    checkpoint_models.saved(tmp_path, "llama", hidden_size=128, intermediate_size=192, head_dim=32)
    tensors, groups = {}, {}
    for name, value in load_file(tmp_path / "model.safetensors").items():
        if value.ndim != 2:
            tensors[name] = value
            continue
        words, scales, offsets = mx.quantize(mx.array(value), group_size=group, bits=bits)
        stem = name.removesuffix(".weight")
        tensors |= {
            name: np.array(words),
            f"{stem}.scales": np.array(scales),
            f"{stem}.biases": np.array(offsets),
        }
        groups[name] = np.array(mx.dequantize(words, scales, offsets, group_size=group, bits=bits))
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = {"bits": bits, "group_size": group}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(tmp_path) as checkpoint:
        for name, value in groups.items():
            assert np.abs(checkpoint.tensor(name) - value).max() < 1e-6
    with mlx_on(tmp_path) as engine:
        ours = logits(engine, [1, 2, 3, 4, 5], 5)
    plain = tmp_path / "plain"
    plain.mkdir()
    vectors = {name: value for name, value in tensors.items() if value.ndim == 1}
    save_file({**vectors, **groups}, plain / "model.safetensors")
    del config["quantization"]
    (plain / "config.json").write_text(json.dumps(config))
    with mlx_on(plain) as engine:
        assert np.abs(logits(engine, [1, 2, 3, 4, 5], 5) - ours).max() < 1e-3
    words = tensors["model.layers.0.mlp.up_proj.scales"]
    save_file({**tensors, "model.layers.0.mlp.up_proj.scales": words[:, :1]}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(ModelDamaged, match="do not fit"):
        checkpoint.tensor("model.layers.0.mlp.up_proj.weight")


def mlx_layout(folder: Path, *, quantised: bool = True) -> None:
    """Rewrite a saved model as MLX's converter does: experts stacked under another name (those of gpt-oss as
    MXFP4), norms of hybrids with the one added, latent matrices apart; matrices in 8 bits, groups of 32, or
    as they are."""
    config = json.loads((folder / "config.json").read_text())
    tensors: dict[str, Any] = {}
    experts: dict[str, list[Any]] = {}
    hybrid = "linear_num_value_heads" in config
    for name, value in load_file(folder / "model.safetensors").items():
        value = value.astype(np.float32)
        if match := re.fullmatch(r"(.*\.mlp)\.experts\.\d+\.(\w+)\.weight", name):
            experts.setdefault(f"{match[1]}.switch_mlp.{match[2]}.weight", []).append(value)
        elif ".experts.gate_up_proj" in name:
            ending = ".bias" if name.endswith("_bias") else ".weight"
            rows = value if ending == ".bias" else value.swapaxes(-1, -2)
            stem = name.partition("gate_up_proj")[0]
            for part, first in (("gate_proj", 0), ("up_proj", 1)):
                each = rows[:, first::2] if ending == ".weight" else rows[..., first::2]
                tensors[f"{stem}{part}{ending}"] = np.ascontiguousarray(each)
        elif ".experts.down_proj" in name:
            bias = name.endswith("_bias")
            stem = name.removesuffix("_bias")
            tensors[f"{stem}.{'bias' if bias else 'weight'}"] = np.ascontiguousarray(
                value if bias else value.swapaxes(-1, -2)
            )
        elif name.endswith(".kv_b_proj.weight"):
            stem, keys = name.removesuffix("kv_b_proj.weight"), config["qk_nope_head_dim"]
            heads = value.reshape(config["num_attention_heads"], -1, value.shape[-1])
            tensors[f"{stem}embed_q.weight"] = np.ascontiguousarray(heads[:, :keys].swapaxes(-1, -2))
            tensors[f"{stem}unembed_out.weight"] = np.ascontiguousarray(heads[:, keys:])
        elif hybrid and name.endswith("norm.weight") and ".linear_attn." not in name:
            tensors[name] = value + 1
        elif name.endswith(".conv1d.weight"):
            tensors[name] = np.ascontiguousarray(np.moveaxis(value, 2, 1))
        else:
            tensors[name] = value
    tensors |= {name: np.stack(each) for name, each in experts.items()}
    if not quantised:
        save_file(tensors, folder / "model.safetensors")
        return
    groups: dict[str, Any] = {"bits": 8, "group_size": 32, "mode": "affine"}
    stored: dict[str, Any] = {}
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        if value.ndim < 2 or value.shape[-1] % 32 or "conv1d" in name or name.endswith("bias"):
            stored[name] = value
            continue
        bits, mode = (4, "mxfp4") if ".mlp.experts." in name else (8, "affine")
        parts = mx.quantize(mx.array(value), group_size=32, bits=bits, mode=mode)
        stored |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), map(np.array, parts), strict=False))
        if mode == "mxfp4":
            groups[stem] = {"bits": bits, "group_size": 32, "mode": mode}
    save_file(stored, folder / "model.safetensors")
    config["quantization"] = config["quantization_config"] = groups
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe_lite", "gpt_oss"])
def test_folders_as_mlx_publishes_them_hold_the_same_model(family: str, tmp_path: Path) -> None:
    reference(family).save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        names = list(tensor_shapes(checkpoint.spec))
        wanted = {name: checkpoint.tensor(name) for name in names}
    mlx_layout(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        for name in names:
            found, bits = checkpoint.tensor(name), checkpoint.storage(name)
            assert found.shape == wanted[name].shape, name
            near = 0.3 if bits == "MXFP4" else 0.01
            assert np.abs(found - wanted[name]).max() <= near * np.abs(wanted[name]).max(), name
    with mlx_on(tmp_path) as engine:
        assert np.isfinite(logits(engine, TOKENS, 4)).all()


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe_lite", "glm4_moe_lite_direct"]
)
def test_the_layout_of_mlx_changes_no_logits(family: str, tmp_path: Path) -> None:
    model = reference(family)
    model.save_pretrained(tmp_path)
    mlx_layout(tmp_path, quantised=False)
    with mlx_on(tmp_path) as engine:
        assert distance(logits(engine, TOKENS, 100), reference_logits(model, TOKENS)[-100:]) < 1e-4


def test_a_folder_in_another_format_of_mlx_is_refused(tmp_path: Path) -> None:
    checkpoint_models.saved(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 16, "mode": "nvfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="nvfp4"):
        open_checkpoint(tmp_path)


def test_memory_is_bounded_and_comes_back(tmp_path: Path) -> None:
    checkpoint_models.saved(tmp_path, "llama", max_position_embeddings=4096)
    with mlx_on(tmp_path, kv_budget_mb=1) as engine:
        each = engine.info.kv_bytes_per_token
        for seed in range(6):
            with engine.session() as session:
                session.extend([seed + 3] * 400)
                session.step()
            assert engine.stats().cached_bytes <= 1 << 20
        assert engine.stats().kv_bytes == 0
        assert engine.stats().cached_tokens > 0
        sessions = [engine.session() for _ in range(64)]

        def fill() -> None:
            for session in sessions:
                session.extend([7] * min((1 << 20) // each, 4000))
                session.step()

        with pytest.raises(NotEnoughMemory, match=r"engine\.kv_budget_mb"):
            fill()
        for session in sessions:
            session.close()
        with engine.session() as session:
            session.extend([5] * 40)
            assert session.step((), GREEDY).accepted == 0


def test_what_it_does_not_do_is_said(tmp_path: Path) -> None:
    checkpoint_models.saved(tmp_path, "llama")
    with pytest.raises(ConfigError, match="no precision int4"):
        mlx_on(tmp_path, precision="int4")
    if sys.platform != "darwin":
        assert unavailable_reason() == "MLX runs on Macs with Apple silicon"
        assert choose_backend("auto").name != "mlx"


def test_on_a_cpu_no_draft_pays_and_none_is_made(tmp_path: Path) -> None:
    checkpoint_models.saved(tmp_path, "llama")
    repeated = [1, 2, 3, 4] * 8
    with mlx_on(tmp_path) as engine:
        assert verify_cost(engine)[:4] == (0.0, 1.0, 2.0, 3.0)
        drafter = drafter_for(engine, repeated)
        drafter.begin(repeated)
        assert not drafter.propose(repeated, 8)
        remember_cost(engine, CHEAP)
        drafter = drafter_for(engine, repeated)
        drafter.begin(repeated)
        assert drafter.propose(repeated, 8)


def test_on_a_gpu_the_cost_of_rows_is_measured_and_leaves_nothing_behind(tmp_path: Path) -> None:
    checkpoint_models.saved(tmp_path, "llama")
    with mlx_on(tmp_path) as engine:
        engine.measure_drafts(gpu=True)
        measured = verify_cost(engine)
        assert len(measured) == MAX_DRAFT + 2
        assert measured[:4] != (0.0, 1.0, 2.0, 3.0)
        assert engine.stats().cached_tokens == 0
    with mlx_on(tmp_path, kv_budget_mb=0) as engine:
        engine.measure_drafts(gpu=True)
        assert verify_cost(engine)[:4] == (0.0, 1.0, 2.0, 3.0)
