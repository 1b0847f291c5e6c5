"""Small random models of the families, saved by transformers and written as GGUF files by the gguf package.

The names of GGUF tensors come from that package's own map; what llama.cpp's converter does to values is
stated here a second time, independently of the reader.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType

from keystroke.config import load_settings
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.onnx import native
from keystroke.engine.onnx.convert import convert_stored
from keystroke.engine.onnx.engine import OnnxEngine, OnnxGraph, OnnxOptions
from keystroke.engine.onnx.packing import pack_tables
from keystroke.engine.onnx.precision import PRECISIONS
from keystroke.engine.onnx.stored import NativeWeights, stored_tables
from keystroke.engine.onnx.tables import convert_tables

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# The configuration of each model, and the architecture of its GGUF file.
MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], str]] = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**EXPERTS, "norm_topk_prob": True},
        "qwen3moe",
    ),
    "qwen3_moe_mixed": (  # dense layers between, weights of experts that do not add up to one
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**EXPERTS, "norm_topk_prob": False, "mlp_only_layers": [1]},
        "",
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 15000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        "gpt-oss",
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 32, "norm_topk_prob": True},
        "qwen3next",
    ),
    "qwen3_5": (
        transformers.Qwen3_5TextConfig,
        transformers.Qwen3_5ForCausalLM,
        HYBRID,
        "qwen35",
    ),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
        {**EXPERTS, **HYBRID, "shared_expert_intermediate_size": 32},
        "qwen35moe",
    ),
    "mellum": (
        transformers.MellumConfig,
        transformers.MellumForCausalLM,
        {
            **EXPERTS,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "mellum" if "mellum" in gguf.MODEL_ARCH_NAMES.values() else "",
    ),
    "ministral3": (
        transformers.Ministral3Config,
        transformers.Ministral3ForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 32,
            },
        },
        "mistral3",
    ),
    "glm4_moe_lite": (
        transformers.Glm4MoeLiteConfig,
        transformers.Glm4MoeLiteForCausalLM,
        LATENT,
        "deepseek2",
    ),
    "glm4_moe_lite_direct": (  # queries without a smaller vector between, halves that rotate together
        transformers.Glm4MoeLiteConfig,
        transformers.Glm4MoeLiteForCausalLM,
        {**LATENT, "q_lora_rank": None, "rope_interleave": False},
        "",
    ),
}
TOKENS = [int(t) for t in np.random.default_rng(0).integers(3, 96, 150)]


def reference(name: str, **changes: Any) -> Any:
    """A transformers model with random weights."""
    config_class, model_class, extra, _ = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **copy.deepcopy(extra), **changes})).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if "A_log" in parameter_name else 0.2))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    return model


def reference_logits(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        logits: np.ndarray[Any, Any] = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return logits


def engine_on(path: Path, precision: str, cache: Path, **options: Any) -> OnnxEngine:
    """The embedded engine on a folder or file; skips without a compiler."""
    library = native.operators_library(load_settings().paths.cache)
    if library is None:
        pytest.skip("no C compiler here, or not the vectors")
    with open_checkpoint(path) as checkpoint:
        checkpoint.read_predictor()
        if precision != "stored":
            checkpoint = convert_tables(checkpoint, PRECISIONS[precision], cache=cache)
        model = convert_stored(checkpoint, native=True, cache=cache)
        stored = NativeWeights(library, pack_tables(library, checkpoint, stored_tables(checkpoint), 2))
        predictor = None
        if checkpoint.spec.predictor:
            predictor = convert_stored(checkpoint, native=True, cache=cache, predictor=True)
        graph = OnnxGraph(model, checkpoint.spec, precision, stored, predictor=predictor)
        return OnnxEngine(graph, OnnxOptions(**{"threads": 2, **options}))


def engine_logits(engine: OnnxEngine, tokens: list[int], rows: int) -> np.ndarray[Any, Any]:
    """The logits of the last `rows` tokens, computed in one run after the others."""
    with engine.session() as session:
        session.extend(tokens[: -rows + 1] if rows > 1 else tokens)
        session.step()
        session.rollback(0)
        logits = session._forward(tokens, 0, rows, None).copy()
        session._held.clear()
    return logits


def distance(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    """The relative error of the middle row: rounding may choose another expert in a few."""
    errors = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return float(np.median(errors))


def write_gguf(
    path: Path,
    name: str,
    model: Any,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    predictor: dict[str, Any] | None = None,
) -> None:
    """The model as llama.cpp's converter writes it: matrices of whole blocks as `kind`. `predictor`: the
    tensors of the layer that predicts the token after the next one, which becomes the last."""
    config, architecture = model.config, MODELS[name][3]
    writer = gguf.GGUFWriter(path, architecture)
    state, layers = model.state_dict(), config.num_hidden_layers
    if predictor is not None:
        state = {**state, **{_predictor_name(each, layers): value for each, value in predictor.items()}}
        writer.add_nextn_predict_layers(1)
        layers += 1
    _write_sizes(writer, config, layers)
    _WRITERS.get(architecture, lambda writer, config: None)(writer, config)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, layers)
    for theirs, value in _tensors(architecture, config, state):
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
        router = "gate_inp" in ours
        small = value.ndim == 1 or value.shape[-1] % 32 or value.shape[-2] < 16
        if small or router or "exp_probs_b" in ours or ours.endswith(".bias") or "conv1d" in ours:
            writer.add_tensor(ours, np.ascontiguousarray(value, np.float32))
        else:
            writer.add_tensor(ours, gguf.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _predictor_name(name: str, layers: int) -> str:
    known = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    known |= {"norm": "shared_head_norm"}
    if (part := known.get(name.removesuffix(".weight"))) is not None:
        return f"blk.{layers}.nextn.{part}.weight"
    return name.replace("layers.0.", f"model.layers.{layers}.")


def _write_sizes(writer: Any, config: Any, layers: int) -> None:
    writer.add_name("a small model")
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if getattr(config, "intermediate_size", None):
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    if "full_attention" not in ropes:
        writer.add_rope_freq_base(ropes["rope_theta"])
    if getattr(config, "num_experts", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")  # all that llama.cpp needs for token numbers
    writer.add_token_list([f"token {index}" for index in range(config.vocab_size)])


def _write_yarn(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_gpt_oss(writer: Any, config: Any) -> None:
    _write_yarn(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _write_mellum(writer: Any, config: Any) -> None:
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32("mellum.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _write_mistral3(writer: Any, config: Any) -> None:
    _write_yarn(writer, config)
    writer.add_rope_scaling_yarn_log_mul(config.rope_parameters["mscale_all_dim"])
    writer.add_attn_temperature_scale(config.rope_parameters["llama_4_scaling_beta"])


def _write_hybrid(writer: Any, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_rope_dimension_sections([2, 1, 1, 0])  # of pictures; those of a text are all alike
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _write_latent(writer: Any, config: Any) -> None:
    """Attention as llama.cpp sees it, with one key-value head, and in `_mla` the heads of queries."""
    rotated = config.qk_rope_head_dim
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + rotated)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + rotated)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


_WRITERS: dict[str, Callable[[Any, Any], None]] = {
    "qwen3next": _write_hybrid,
    "qwen35": _write_hybrid,
    "qwen35moe": _write_hybrid,
    "gpt-oss": _write_gpt_oss,
    "mellum": _write_mellum,
    "mistral3": _write_mistral3,
    "deepseek2": _write_latent,
}


def _tensors(
    architecture: str, config: Any, state: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Tensors by Hugging Face's name, with the values that the converter writes."""
    for name, tensor in state.items():
        value: np.ndarray[Any, Any] = tensor.float().numpy()
        if architecture in ("qwen3next", "qwen35", "qwen35moe"):
            name, value = _hybrid(architecture, config, name, value)
            if name.endswith("in_proj_qkvz.weight"):
                yield from _separate(config, name, value)
                continue
        if architecture == "gpt-oss" and ".experts." in name:
            yield from _gpt_oss_experts(name, value)
        elif architecture == "gpt-oss" and name.endswith(".sinks"):
            yield f"{name}.weight", value
        elif architecture == "mistral3" and ".q_proj." in name:
            yield name, _paired(value, config.num_attention_heads)
        elif architecture == "mistral3" and ".k_proj." in name:
            yield name, _paired(value, config.num_key_value_heads)
        elif name.endswith(".kv_b_proj.weight"):
            at = name.removesuffix("kv_b_proj.weight")
            each = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
            keys, values = np.split(each, [config.qk_nope_head_dim], axis=1)
            yield f"{at}k_b_proj.weight", keys.swapaxes(1, 2)
            yield f"{at}v_b_proj.weight", values
        elif name.endswith(".e_score_correction_bias"):
            yield name.replace("_correction_bias", "_correction.bias"), value
        elif name.endswith(".experts.gate_up_proj"):
            at, width = name.removesuffix("gate_up_proj"), value.shape[1] // 2
            yield f"{at}gate_proj.weight", value[:, :width]
            yield f"{at}up_proj.weight", value[:, width:]
        elif name.endswith(".experts.down_proj"):
            yield f"{name}.weight", value
        else:
            yield name, value


def _gpt_oss_experts(name: str, value: np.ndarray[Any, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Rows of gate and up in turns, matrices by columns."""
    ending = "bias" if name.endswith("_bias") else "weight"
    value = value if ending == "bias" else value.swapaxes(-1, -2)
    at = name.removesuffix("_bias")
    if at.endswith("gate_up_proj"):
        at = at.removesuffix("gate_up_proj")
        yield f"{at}gate_proj.{ending}", value[:, ::2]
        yield f"{at}up_proj.{ending}", value[:, 1::2]
    else:
        yield f"{at}.{ending}", value


def _paired(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's row order: pair i of a head is its rows i and i + head_dim / 2."""
    return rows.reshape(heads, 2, -1, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _hybrid(
    architecture: str, config: Any, name: str, value: np.ndarray[Any, Any]
) -> tuple[str, np.ndarray[Any, Any]]:
    """Norms with their one, decays as they are used; value heads in turns of their key heads in Qwen3.5."""
    keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    size = config.linear_value_head_dim

    def tiled(array: np.ndarray[Any, Any], each: int) -> np.ndarray[Any, Any]:
        return array.reshape(keys, ratio, each, -1).swapaxes(0, 1).reshape(array.shape)

    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    if name.endswith("A_log"):
        value = -np.exp(value)
    if name.endswith("conv1d.weight"):
        value = value.squeeze(1)
    if architecture != "qwen3next" and ".linear_attn." in name:
        queries = 2 * keys * config.linear_key_head_dim
        if "in_proj_qkv." in name or "conv1d" in name:
            value = np.concatenate([value[:queries], tiled(value[queries:], size)])
        elif "in_proj_z" in name:
            value = tiled(value, size)
        elif "out_proj" in name:
            value = np.ascontiguousarray(tiled(np.ascontiguousarray(value.T), size).T)
        elif "norm" not in name:
            value = tiled(value, 1)
    if name.endswith("shared_expert_gate.weight"):
        value = value[0]
    return name.replace(".dt_bias", ".dt_proj.bias"), value


def _separate(
    config: Any, name: str, value: np.ndarray[Any, Any]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Queries, keys and values one after the other, and the gates by themselves."""
    keys, size = config.linear_num_key_heads, config.linear_key_head_dim
    wide = config.linear_num_value_heads // keys * config.linear_value_head_dim
    groups = value.reshape(keys, -1, value.shape[-1])
    parts = np.split(groups, np.cumsum([size, size, wide]), axis=1)
    q, k, v, z = (part.reshape(-1, value.shape[-1]) for part in parts)
    layer = name.split(".")[2]
    yield f"blk.{layer}.attn_qkv.weight", np.concatenate([q, k, v])
    yield f"blk.{layer}.attn_gate.weight", z
