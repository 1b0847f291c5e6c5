"""Qwen3.5, 3.6 and 3.8 (text), dense and as mixtures: Qwen3-Next with separate tensors for the parts of its
delta nets. In GGUF files, value heads are in turns of their key heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.families.family import ConfigFile, Family, GGUFFile
from keystroke.engine.families.qwen3_next import (
    gguf_source,
    hybrid_source,
    read_hybrid,
    read_hybrid_gguf,
    read_shared_experts,
    read_shared_gguf_experts,
)


def read_config(file: ConfigFile, *, mixture: bool) -> ModelSpec:
    if not mixture:
        return read_hybrid(file, "qwen3_5")
    experts = read_shared_experts(file.config, normalised=True, dense=frozenset())
    return read_hybrid(file, "qwen3_5_moe", intermediate="", experts=experts)


def read_gguf(file: GGUFFile, *, mixture: bool) -> ModelSpec:
    if not mixture:
        return read_hybrid_gguf(file, "qwen3_5", tiled=True)
    return read_hybrid_gguf(file, "qwen3_5_moe", experts=read_shared_gguf_experts(file), tiled=True)


FAMILY = Family(
    name="qwen3_5",
    title="Qwen3.5",
    huggingface=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    gguf="qwen35",
    read_config=partial(read_config, mixture=False),
    read_gguf=partial(read_gguf, mixture=False),
    source=hybrid_source,
    gguf_source=gguf_source,
    predicts=True,
)
MIXTURE = replace(
    FAMILY,
    name="qwen3_5_moe",
    title="Qwen3.5-MoE",
    huggingface=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    gguf="qwen35moe",
    read_config=partial(read_config, mixture=True),
    read_gguf=partial(read_gguf, mixture=True),
)
