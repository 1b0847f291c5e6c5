"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-Coder): Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.spec import ExpertsSpec, ModelSpec
from keystroke.engine.families.config_file import read_llama
from keystroke.engine.families.family import ConfigFile, Family, TensorSource
from keystroke.engine.families.gguf_fields import read_gguf_experts, read_llama_gguf
from keystroke.engine.families.llama import windowed_layers
from keystroke.engine.families.qwen3 import HEAD_DIM


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    layers = config.integer("num_hidden_layers", 1024)
    experts = read_experts(
        config, normalised=config.flag("norm_topk_prob", False), dense=dense_layers(config, layers)
    )
    return read_llama(
        file,
        "qwen3_moe",
        head_dim=HEAD_DIM,
        windowed=windowed_layers(file, layers),
        qk_norm=True,
        experts=experts,
    )


def read_experts(config: Fields, **changes: Any) -> ExpertsSpec:
    """The mixture that a configuration of Qwen's kind describes."""
    counts = ("num_local_experts", "n_routed_experts", "num_experts")
    return ExpertsSpec(
        count=config.integer(next((name for name in counts if name in config), counts[-1]), 1 << 16),
        top=config.integer("num_experts_per_tok", 1 << 10),
        width=config.integer("moe_intermediate_size", 1 << 22),
        **changes,
    )


def dense_layers(config: Fields, layers: int) -> frozenset[int]:
    """The layers without experts."""
    kinds, listed = config.get("mlp_layer_types"), config.get("mlp_only_layers") or []
    if isinstance(kinds, list):
        if len(kinds) < layers or any(kind not in ("dense", "sparse") for kind in kinds[:layers]):
            raise config.error("mlp_layer_types", 'a list of "dense" and "sparse", one for each layer')
        return frozenset(n for n, kind in enumerate(kinds[:layers]) if kind == "dense")
    if not isinstance(listed, list) or not all(type(each) is int for each in listed):
        raise config.error("mlp_only_layers", "a list of layers")
    every = config.integer("decoder_sparse_step", 1024, default=1)
    return frozenset(n for n in range(layers) if n in listed or (n + 1) % every)


def source(spec: ModelSpec, name: str, stored: Container[str]) -> TensorSource:
    """Experts are stored one by one, or stacked, with gate and up in one tensor."""
    if spec.experts is None or ".mlp.experts." not in name:
        return TensorSource((name,))
    before, _, after = name.partition(".experts.")
    count, width = spec.experts.count, spec.experts.width
    part = after.partition("_proj.")[0]
    if f"{before}.experts.down_proj" not in stored:
        return TensorSource(tuple(f"{before}.experts.{expert}.{after}" for expert in range(count)))
    if part == "down":
        return TensorSource((f"{before}.experts.down_proj",))
    start = np.arange(count)[:, None] * 2 * width + (width if part == "up" else 0)
    return TensorSource((f"{before}.experts.gate_up_proj",), (start + np.arange(width)).ravel())


FAMILY = Family(
    name="qwen3_moe",
    title="Qwen3-MoE",
    huggingface=("Qwen3MoeForCausalLM",),
    gguf="qwen3moe",
    read_config=read_config,
    read_gguf=lambda file: read_llama_gguf(file, "qwen3_moe", experts=read_gguf_experts(file)),
    source=source,
)
