"""Qwen3-Next and Qwen3-Coder-Next: gated delta nets with gated attention in every fourth layer, and a mixture
of experts with a gated shared one. Heads are rotated in part; norms are stored minus one, except in GGUF
files."""

from __future__ import annotations

from collections.abc import Container
from itertools import pairwise
from typing import Any

import numpy as np

from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.spec import Architecture, DeltaSpec, ExpertsSpec, ModelSpec
from keystroke.engine.families.config_file import linear_layers, partial_rotary, read_llama
from keystroke.engine.families.family import ConfigFile, Family, GGUFFile, TensorSource
from keystroke.engine.families.gguf_fields import (
    gguf_name,
    read_gguf_experts,
    read_llama_gguf,
    without_predicting,
)
from keystroke.engine.families.qwen3_moe import dense_layers, read_experts
from keystroke.engine.families.qwen3_moe import source as expert_source

HEAD_DIM, _ROTATED = 256, 0.25
GGUF_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.decay": "ssm_a",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_PREDICTOR_NAMES = {  # of the layer after the last
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
READ_HERE = frozenset({"rope.dimension_count"})


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    dense = dense_layers(config, config.integer("num_hidden_layers", 1024))
    experts = read_shared_experts(config, normalised=config.flag("norm_topk_prob", True), dense=dense)
    return read_hybrid(file, "qwen3_next", experts=experts)


def read_hybrid(file: ConfigFile, architecture: Architecture, **changes: Any) -> ModelSpec:
    """`changes`: what `read_llama` takes beyond the layers of all hybrids."""
    config = file.config
    head_dim = config.integer("head_dim", 4096, default=HEAD_DIM)
    delta = DeltaSpec(
        layers=linear_layers(config, config.integer("num_hidden_layers", 1024)),
        key_heads=config.integer("linear_num_key_heads", 4096, default=16),
        value_heads=config.integer("linear_num_value_heads", 4096, default=32),
        key_size=config.integer("linear_key_head_dim", 4096, default=128),
        value_size=config.integer("linear_value_head_dim", 4096, default=128),
        kernel=config.integer("linear_conv_kernel_dim", 64, default=4),
    )
    return read_llama(
        file,
        architecture,
        head_dim=HEAD_DIM,
        rotary=partial_rotary(config, head_dim, _ROTATED),
        qk_norm=True,
        gated_attention=True,
        delta=delta,
        **changes,
    )


def read_shared_experts(config: Fields, *, normalised: bool, dense: frozenset[int]) -> ExpertsSpec:
    shared = config.integer("shared_expert_intermediate_size", 1 << 22, default=512)
    return read_experts(config, normalised=normalised, dense=dense, shared=shared, shared_gate=True)


def source(spec: ModelSpec, name: str, stored: Container[str]) -> TensorSource:
    """Queries, keys, values and gates are one tensor, key head after key head; so are b and a."""
    delta = spec.delta
    if delta is None or ".linear_attn." not in name:
        return hybrid_source(spec, name, stored)
    at, _, part = name.partition(".linear_attn.")
    ratio = delta.value_heads // delta.key_heads
    if part in ("in_proj_b.weight", "in_proj_a.weight"):
        rows = _split_groups(delta.key_heads, [ratio, ratio])["ba".index(part[8])]
        return TensorSource((f"{at}.linear_attn.in_proj_ba.weight",), rows)
    if part in ("in_proj_qkv.weight", "in_proj_z.weight"):
        values = ratio * delta.value_size
        q, k, v, z = _split_groups(delta.key_heads, [delta.key_size, delta.key_size, values, values])
        rows = z if part == "in_proj_z.weight" else np.concatenate([q, k, v])
        return TensorSource((f"{at}.linear_attn.in_proj_qkvz.weight",), rows)
    return hybrid_source(spec, name, stored)


def _split_groups(groups: int, sizes: list[int]) -> list[np.ndarray[tuple[int], np.dtype[np.intp]]]:
    """The rows of each part of a tensor that holds all parts of a group, group after group."""
    starts = np.arange(groups)[:, None] * sum(sizes)
    edges = np.cumsum([0, *sizes])
    return [(starts + np.arange(a, b)).ravel() for a, b in pairwise(edges)]


def hybrid_source(spec: ModelSpec, name: str, stored: Container[str]) -> TensorSource:
    """For tensors that all hybrids store alike."""
    if name.endswith(".linear_attn.decay"):
        return TensorSource((name.replace(".decay", ".A_log"),), change="minus exponential")
    if "norm" in name.split(".")[-2] and not name.endswith(".linear_attn.norm.weight"):
        return TensorSource((name,), change="plus one")
    return expert_source(spec, name, stored)


def read_hybrid_gguf(
    file: GGUFFile, architecture: Architecture, *, experts: ExpertsSpec | None = None, tiled: bool = False
) -> ModelSpec:
    fields, stated = file.fields, file.stated
    layers = without_predicting(file)
    every = fields.integer(f"{stated}.full_attention_interval", 1024, default=4)
    value_heads = fields.integer(f"{stated}.ssm.time_step_rank", 4096)
    delta = DeltaSpec(
        layers=frozenset(n for n in range(layers) if (n + 1) % every),
        key_heads=fields.integer(f"{stated}.ssm.group_count", 4096),
        value_heads=value_heads,
        key_size=fields.integer(f"{stated}.ssm.state_size", 4096),
        value_size=fields.integer(f"{stated}.ssm.inner_size", 1 << 22) // value_heads,
        kernel=fields.integer(f"{stated}.ssm.conv_kernel", 64),
        tiled=tiled,
    )
    head_dim = fields.integer(f"{stated}.attention.key_length", 4096, default=HEAD_DIM)
    rotary = fields.integer(f"{stated}.rope.dimension_count", 4096, default=head_dim)
    return read_llama_gguf(
        file,
        architecture,
        experts=experts,
        ignored=READ_HERE,
        layers=layers,
        rotary=0 if rotary == head_dim else rotary,
        qk_norm=True,
        gated_attention=True,
        delta=delta,
    )


def read_shared_gguf_experts(file: GGUFFile) -> ExpertsSpec:
    width = file.fields.integer(f"{file.stated}.expert_shared_feed_forward_length", 1 << 22, default=512)
    return read_gguf_experts(file, shared=width, shared_gate=True)


def gguf_source(spec: ModelSpec, name: str, stored: Container[str]) -> TensorSource:
    for letter in "ba":
        if spec.delta is not None and name.endswith(f".in_proj_{letter}.weight"):
            layer = name.split(".")[2]
            joint = f"blk.{layer}.ssm_ba.weight"
            if joint in stored:
                ratio = spec.delta.value_heads // spec.delta.key_heads
                rows = _split_groups(spec.delta.key_heads, [ratio, ratio])["ba".index(letter)]
                return TensorSource((joint,), rows)
    if name in _PREDICTOR_NAMES:
        return TensorSource((f"blk.{spec.layers}.{_PREDICTOR_NAMES[name]}",))
    name = name.replace("mtp.layers.0.", f"model.layers.{spec.layers}.")
    return TensorSource(
        (gguf_name(name, GGUF_NAMES),),
        flat=name.endswith(".bias"),
        single_row=name.endswith(".shared_expert_gate.weight"),
    )


FAMILY = Family(
    name="qwen3_next",
    title="Qwen3-Next",
    huggingface=("Qwen3NextForCausalLM",),
    gguf="qwen3next",
    read_config=read_config,
    read_gguf=lambda file: read_hybrid_gguf(file, "qwen3_next", experts=read_shared_gguf_experts(file)),
    source=source,
    gguf_source=gguf_source,
    predicts=True,
)
