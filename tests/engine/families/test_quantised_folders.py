"""Folders whose weights are already quantised: FP8 with a scale per block, and MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from family_models import TOKENS, distance, engine_logits, engine_on, reference, reference_logits
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.checkpoint.huggingface import configured_spec
from keystroke.errors import ModelDamaged, UnsupportedModel


def rewritten(folder: Path, tensors: dict[str, torch.Tensor], method: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


def test_fp8_blocks_are_their_codes_times_their_scales(tmp_path: Path) -> None:
    reference("qwen3_moe").save_pretrained(tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name, value in list(tensors.items()):
        if value.ndim == 2 and "_proj" in name:
            rows, columns = -(-value.shape[0] // 24), -(-value.shape[1] // 40)  # blocks that do not divide it
            scales = torch.rand(rows, columns) + 0.5
            codes = value.to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
            spread = scales.repeat_interleave(24, 0).repeat_interleave(40, 1)
            expected[name] = codes.float() * spread[: value.shape[0], : value.shape[1]]
    rewritten(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [24, 40]})
    name = "model.layers.1.self_attn.q_proj.weight"
    with open_checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor(name), expected[name].numpy())
        down = checkpoint.tensor("model.layers.2.mlp.experts.down_proj.weight")
        last = expected["model.layers.2.mlp.experts.7.down_proj.weight"].numpy()
        np.testing.assert_array_equal(down[-last.shape[0] :], last)
    del tensors[f"{name}_scale_inv"]
    rewritten(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [24, 40]})
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(ModelDamaged, match="lacks the scales"):
        checkpoint.tensor(name)


def test_mxfp4_experts_run_as_they_are_stored(tmp_path: Path) -> None:
    model = reference("gpt_oss")
    model.save_pretrained(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    dice = np.random.default_rng(0)
    for name, value in list(tensors.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, columns, rows = value.shape
        blocks = dice.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = dice.integers(122, 126, (experts, rows, columns // 32), dtype=np.uint8)
        del tensors[name]
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = map(torch.from_numpy, (blocks, scales))
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        wide = values[np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)]
        wide *= np.exp2(scales.astype(np.float32) - 127)[..., None]
        parameter = dict(model.named_parameters())[name]
        parameter.data = torch.from_numpy(wide.reshape(experts, rows, columns)).swapaxes(1, 2).contiguous()
    rewritten(tmp_path / "model", tensors, {"quant_method": "mxfp4"})
    with open_checkpoint(tmp_path / "model") as checkpoint:
        name = "model.layers.0.mlp.experts.up_proj.weight"
        assert checkpoint.storage(name) == "MXFP4"
        stored = np.asarray(checkpoint.raw(name)[0], np.uint8)
        parameter = model.model.layers[0].mlp.experts.gate_up_proj.detach().numpy()
        up = parameter[:, :, 1::2].swapaxes(1, 2).reshape(-1, parameter.shape[1])
        np.testing.assert_array_equal(gguf.dequantize(stored, GGMLQuantizationType.MXFP4), up)
    wanted = reference_logits(model, TOKENS)[-100:]
    with engine_on(tmp_path / "model", "int8", tmp_path / "cache") as engine:
        assert distance(engine_logits(engine, TOKENS, 100), wanted) < 0.1


def test_other_quantised_folders_are_refused_before_their_weights_are_read(tmp_path: Path) -> None:
    reference("qwen3_moe").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="already quantised"):
        configured_spec(tmp_path)
