"""gpt-oss: experts with biases and clamped gates, stored as MXFP4; attention with sinks and biases, and a
sliding window in every other layer."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import numpy as np

from keystroke.engine.checkpoint.spec import ExpertsSpec, ModelSpec
from keystroke.engine.families.config_file import read_llama
from keystroke.engine.families.family import ConfigFile, Family, GGUFFile, TensorSource
from keystroke.engine.families.gguf_fields import read_gguf_experts, read_gguf_rope, read_llama_gguf

_HEAD_DIM, _THETA, _WINDOW, _LIMIT = 64, 150_000.0, 128, 7.0


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    layers = config.integer("num_hidden_layers", 1024)
    experts = ExpertsSpec(
        count=config.integer("num_local_experts", 1 << 16),
        top=config.integer("num_experts_per_tok", 1 << 10),
        width=config.integer("intermediate_size", 1 << 22),
        router_bias=True,
        bias=True,
        limit=config.number("swiglu_limit", _LIMIT),
    )
    return read_llama(
        file,
        "gpt_oss",
        head_dim=_HEAD_DIM,
        theta=_THETA,
        windowed=frozenset(range(0, layers, 2)),
        window=_WINDOW,
        attention_bias=config.flag("attention_bias", True),
        sinks=True,
        experts=experts,
    )


def source(spec: ModelSpec, name: str, stored: Container[str]) -> TensorSource:
    """Gate and up are one tensor with their rows in turns; matrices are stored by columns, or as MXFP4 by
    rows."""
    name = name.replace(".mlp.gate.", ".mlp.router.")
    if spec.experts is None or ".mlp.experts." not in name:
        return TensorSource((name,))
    before, _, after = name.partition(".experts.")
    part, ending = after.split("_proj.")
    whole = f"{before}.experts.{'down' if part == 'down' else 'gate_up'}_proj"
    whole += "_bias" if ending == "bias" else ""
    rows = None
    if part != "down":
        rows = np.arange(spec.experts.count * spec.experts.width) * 2 + (part == "up")
    by_columns = ending == "weight" and whole in stored
    return TensorSource((whole,), rows, transposed=by_columns, flat=ending == "bias")


def read_gguf(file: GGUFFile) -> ModelSpec:
    fields, stated = file.fields, file.stated
    layers = fields.integer(f"{stated}.block_count", 1024)
    context = fields.integer(f"{stated}.context_length", 1 << 30)
    rope = replace(read_gguf_rope(fields, stated, context), truncate=False)
    return read_llama_gguf(
        file,
        "gpt_oss",
        experts=read_gguf_experts(file, router_bias=True, bias=True, limit=_LIMIT),
        ignored=frozenset({"attention.sliding_window"}),
        rope=rope,
        window=fields.integer(f"{stated}.attention.sliding_window", 1 << 30, default=_WINDOW),
        windowed=frozenset(range(0, layers, 2)),
        sinks=True,
    )


FAMILY = Family(
    name="gpt_oss",
    title="gpt-oss",
    huggingface=("GptOssForCausalLM",),
    gguf="gpt-oss",
    read_config=read_config,
    read_gguf=read_gguf,
    source=source,
    gguf_names={"post_attention_layernorm": "post_attention_norm", "self_attn.sinks": "attn_sinks.weight"},
)
