"""GLM-4.7-Flash: latent attention, and experts that a sigmoid with a bias chooses beside a shared one. GGUF
files call it deepseek2. The layer that predicts a further token (MTP) is not read."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

import numpy as np

from keystroke.engine.checkpoint.spec import LatentSpec, ModelSpec
from keystroke.engine.families.config_file import read_llama
from keystroke.engine.families.family import ELSEWHERE, ConfigFile, Family, GGUFFile, TensorSource
from keystroke.engine.families.gguf_fields import read_gguf_experts, read_llama_gguf, without_predicting
from keystroke.engine.families.qwen3_moe import dense_layers, read_experts
from keystroke.engine.families.qwen3_moe import source as expert_source
from keystroke.errors import UnsupportedModel

_SIGMOID = 2  # of expert_gating_func; 0 and 1 are a softmax


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    layers = config.integer("num_hidden_layers", 1024)
    listed = "mlp_layer_types" in config
    first = config.integer("first_k_dense_replace", 1024, default=1)
    if config.integer("n_group", 1024, default=1) > 1:
        raise _unsupported_error(config.origin, "groups of experts")
    experts = read_experts(
        config,
        normalised=config.flag("norm_topk_prob", True),
        dense=dense_layers(config, layers) if listed else frozenset(range(min(first, layers))),
        sigmoid=True,
        selection_bias=True,
        scale=config.number("routed_scaling_factor", 1.0),
        shared=config.integer("moe_intermediate_size", 1 << 22)
        * config.integer("n_shared_experts", 64, default=1),
    )
    latent = LatentSpec(
        query_rank=config.integer("q_lora_rank", 1 << 20) if "q_lora_rank" in config else 0,
        rank=config.integer("kv_lora_rank", 1 << 16),
        unrotated=config.integer("qk_nope_head_dim", 4096),
        rotated=config.integer("qk_rope_head_dim", 4096),
        value=config.integer("v_head_dim", 4096),
        interleaved=config.flag("rope_interleave", True),
    )
    spec = read_llama(
        file, "glm4_moe_lite", head_dim=latent.rank + latent.rotated, rotary=latent.rotated, experts=experts
    )
    if spec.qkv_bias:
        raise _unsupported_error(config.origin, "biases of latent attention")
    return _check_latent(spec, latent, config.origin)


def _check_latent(spec: ModelSpec, latent: LatentSpec, origin: str) -> ModelSpec:
    if spec.rope.scaling is not None:
        raise _unsupported_error(origin, "latent attention with a scaled rotary embedding")
    scale = float((latent.unrotated + latent.rotated) ** -0.5)
    size: dict[str, Any] = {"head_dim": latent.rank + latent.rotated, "kv_heads": 1}
    return replace(spec, **size, latent=latent, attention_scale=scale)


def _unsupported_error(origin: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"{origin} has {what}, which this engine does not run; {ELSEWHERE}")


def source(spec: ModelSpec, name: str, stored: Container[str]) -> TensorSource:
    """The matrices of keys and values are one, head after head, those of keys the other way round."""
    before, _, part = name.rpartition(".self_attn.")
    if spec.latent is None or part not in ("k_b_proj.weight", "v_b_proj.weight"):
        return expert_source(spec, name.replace(".shared_expert.", ".shared_experts."), stored)
    apart = f"{before}.self_attn.{'embed_q' if part[0] == 'k' else 'unembed_out'}.weight"
    if apart in stored:  # a folder of MLX
        return TensorSource((apart,))
    keys, values = spec.latent.unrotated, spec.latent.value
    within = np.arange(keys) if part[0] == "k" else keys + np.arange(values)
    rows = (np.arange(spec.heads)[:, None] * (keys + values) + within).ravel()
    return TensorSource((f"{before}.self_attn.kv_b_proj.weight",), rows, turned=keys if part[0] == "k" else 0)


def read_gguf(file: GGUFFile) -> ModelSpec:
    fields, stated = file.fields, file.stated
    if f"{stated}.attention.key_length_mla" not in fields:
        raise _unsupported_error(fields.origin, "latent attention as older files lay it out")
    if fields.integer(f"{stated}.expert_group_count", 1024, default=1) > 1:
        raise _unsupported_error(fields.origin, "groups of experts")
    layers = without_predicting(file)
    rotated = fields.integer(f"{stated}.rope.dimension_count", 4096)
    latent = LatentSpec(
        query_rank=fields.integer(f"{stated}.attention.q_lora_rank", 1 << 20)
        if f"{stated}.attention.q_lora_rank" in fields
        else 0,
        rank=fields.integer(f"{stated}.attention.kv_lora_rank", 1 << 16),
        unrotated=fields.integer(f"{stated}.attention.key_length_mla", 4096) - rotated,
        rotated=rotated,
        value=fields.integer(f"{stated}.attention.value_length_mla", 4096),
    )
    experts, leading = read_gguf_experts(file), fields.get(f"{stated}.leading_dense_block_count")
    experts = replace(
        experts,
        normalised=fields.flag(f"{stated}.expert_weights_norm", False),
        dense=frozenset(range(leading if isinstance(leading, int) else 0)),
        sigmoid=fields.get(f"{stated}.expert_gating_func") == _SIGMOID,
        selection_bias=any(name.endswith(".exp_probs_b.bias") for name in file.shapes),
        scale=fields.number(f"{stated}.expert_weights_scale", 1.0),
        shared=experts.width * fields.integer(f"{stated}.expert_shared_count", 64, default=1),
    )
    spec = read_llama_gguf(
        file,
        "glm4_moe_lite",
        experts=experts,
        ignored=frozenset({"attention.value_length", "rope.dimension_count"}),
        layers=layers,
        rotary=rotated,
    )
    return _check_latent(spec, latent, fields.origin)


FAMILY = Family(
    name="glm4_moe_lite",
    title="GLM-4.7-Flash",
    huggingface=("Glm4MoeLiteForCausalLM",),
    gguf="deepseek2",
    read_config=read_config,
    read_gguf=read_gguf,
    source=source,
    gguf_names={
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.v_b_proj": "attn_v_b",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    },
)
