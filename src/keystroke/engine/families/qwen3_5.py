"""Qwen3.5, 3.6 and 3.8 (text), dense and as mixtures: Qwen3-Next with separate tensors for the parts of its
delta nets. In GGUF files, value heads are in turns of their key heads."""

from __future__ import annotations

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.families.config_file import partial_rotary, read_llama
from keystroke.engine.families.family import ConfigFile, Family, GGUFFile
from keystroke.engine.families.qwen3_next import (
    HEAD_DIM,
    gguf_source,
    hybrid_source,
    read_delta,
    read_hybrid_gguf,
    read_shared_experts,
    read_shared_gguf_experts,
)

_ROTATED = 0.25


def read_config(file: ConfigFile) -> ModelSpec:
    return _read(file, mixture=False)


def read_mixture_config(file: ConfigFile) -> ModelSpec:
    return _read(file, mixture=True)


def _read(file: ConfigFile, *, mixture: bool) -> ModelSpec:
    config = file.config
    layers = config.integer("num_hidden_layers", 1024)
    head_dim = config.integer("head_dim", 4096, default=HEAD_DIM)
    return read_llama(
        file,
        "qwen3_5_moe" if mixture else "qwen3_5",
        head_dim=HEAD_DIM,
        intermediate="" if mixture else "intermediate_size",
        rotary=partial_rotary(config, head_dim, _ROTATED),
        qk_norm=True,
        gated_attention=True,
        delta=read_delta(config, layers),
        experts=read_shared_experts(config, normalised=True, dense=frozenset()) if mixture else None,
    )


def read_gguf(file: GGUFFile) -> ModelSpec:
    return read_hybrid_gguf(file, "qwen3_5", tiled=True)


def read_mixture_gguf(file: GGUFFile) -> ModelSpec:
    return read_hybrid_gguf(file, "qwen3_5_moe", experts=read_shared_gguf_experts(file), tiled=True)


FAMILY = Family(
    name="qwen3_5",
    title="Qwen3.5",
    huggingface=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    gguf="qwen35",
    read_config=read_config,
    read_gguf=read_gguf,
    source=hybrid_source,
    gguf_source=gguf_source,
    predicts=True,
)
MIXTURE = Family(
    name="qwen3_5_moe",
    title="Qwen3.5-MoE",
    huggingface=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    gguf="qwen35moe",
    read_config=read_mixture_config,
    read_gguf=read_mixture_gguf,
    source=hybrid_source,
    gguf_source=gguf_source,
    predicts=True,
)
