"""Writes GGUF files of random weights in the published sizes of models, quantised as their publishers do it.

Speed does not depend on the values of weights, but for mixtures on which experts tokens use: random ones use
all alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True)
class PublishedSizes:
    """A model's published sizes and how its common GGUF file stores them."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int  # 0: a dense model
    top: int
    width: int
    attention: str = "Q4_K"
    body: str = "Q4_K"
    down: str = "Q6_K"  # of every other layer; `body` in the rest. Values likewise: `head`, then `attention`
    head: str = "Q6_K"
    shared: int = 0
    norm_eps: float = 1e-6
    extra: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "coder-30b-a3b": PublishedSizes("qwen3moe", 2048, 48, 32, 4, 128, 151_936, 128, 8, 768),
    "gpt-oss-20b": PublishedSizes(
        *("gpt-oss", 2880, 24, 64, 8, 64, 201_088, 32, 4, 2880),
        *("Q8_0", "MXFP4", "MXFP4", "Q8_0"),
        norm_eps=1e-5,
        extra={"attention.sliding_window": 128, "rope.freq_base": 150_000.0},
    ),
    "qwen3.6-35b-a3b": PublishedSizes(
        *("qwen35moe", 2048, 40, 16, 2, 256, 248_320, 256, 8, 512),
        shared=512,
        extra={
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 32,
            "ssm.inner_size": 4096,
            "full_attention_interval": 4,
            "rope.dimension_count": 64,
        },
    ),
    "qwen3.6-27b": PublishedSizes(
        *("qwen35", 5120, 64, 24, 4, 256, 248_320, 0, 0, 17_408),
        extra={
            "ssm.conv_kernel": 4,
            "ssm.state_size": 128,
            "ssm.group_count": 16,
            "ssm.time_step_rank": 48,
            "ssm.inner_size": 6144,
            "full_attention_interval": 4,
            "rope.dimension_count": 64,
        },
    ),
    "mellum2": PublishedSizes(
        *("mellum", 2304, 28, 32, 4, 128, 98_304, 64, 8, 896),
        extra={"attention.sliding_window": 1024, "attention.sliding_window_pattern": 4},
    ),
}
# Where a block's half-precision scales lie.
_HALVES = {"Q4_K": (0, 2), "Q6_K": (208,), "Q5_0": (0,), "Q8_0": (0,), "MXFP4": ()}
# What quantisers take instead where rows are no multiple of 256 columns.
_NARROW = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def tensors(shape: PublishedSizes, layers: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and types of a file's tensors."""
    found: list[tuple[str, tuple[int, ...], str]] = []
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    oss, hybrid = shape.architecture == "gpt-oss", shape.architecture.startswith("qwen35")
    found += [("token_embd.weight", (shape.vocab, hidden), "Q8_0" if oss else shape.attention)]
    for layer in range(layers):

        def add(name: str, *size: int, kind: str = "F32", at: str = f"blk.{layer}.") -> None:
            found.append((at + name, size, kind))

        add("attn_norm.weight", hidden)
        add("post_attention_norm.weight" if oss or hybrid else "ffn_norm.weight", hidden)
        if hybrid and (layer + 1) % 4:
            size, values = shape.extra["ssm.state_size"], shape.extra["ssm.inner_size"]
            heads, channels = values // size, 2 * size * shape.extra["ssm.group_count"] + values
            add("attn_qkv.weight", channels, hidden, kind=shape.attention)
            add("attn_gate.weight", values, hidden, kind=shape.attention)
            add("ssm_conv1d.weight", channels, 4)
            for name in ("ssm_dt.bias", "ssm_a"):
                add(name, heads)
            for name in ("ssm_beta.weight", "ssm_alpha.weight"):
                add(name, heads, hidden, kind="Q8_0")
            add("ssm_norm.weight", size)
            add("ssm_out.weight", hidden, values, kind=shape.attention)
        else:
            add("attn_q.weight", queries * (2 if hybrid else 1), hidden, kind=shape.attention)
            add("attn_k.weight", keys, hidden, kind=shape.attention)
            second = layer // 4 % 2 if hybrid else layer % 2  # of the layers with attention
            add("attn_v.weight", keys, hidden, kind=(shape.head, shape.attention)[second])
            add("attn_output.weight", hidden, queries, kind=shape.attention)
            for name, size in (("q", queries), ("k", keys), ("v", keys), ("output", hidden)) if oss else ():
                add(f"attn_{name}.bias", size)
            for name in () if oss else ("attn_q_norm.weight", "attn_k_norm.weight"):
                add(name, shape.head_dim)
        if oss:
            add("attn_sinks.weight", shape.heads)
            add("ffn_gate_inp.bias", shape.experts)
            for name, size in (("gate", shape.width), ("up", shape.width), ("down", hidden)):
                add(f"ffn_{name}_exps.bias", shape.experts, size)
        if not shape.experts:
            for name in ("gate", "up"):
                add(f"ffn_{name}.weight", shape.width, hidden, kind=shape.body)
            add("ffn_down.weight", hidden, shape.width, kind=(shape.down, shape.body)[layer % 2])
            continue
        add("ffn_gate_inp.weight", shape.experts, hidden)
        add("ffn_gate_exps.weight", shape.experts, shape.width, hidden, kind=shape.body)
        add("ffn_up_exps.weight", shape.experts, shape.width, hidden, kind=shape.body)
        add(
            "ffn_down_exps.weight",
            shape.experts,
            hidden,
            shape.width,
            kind=_fitting((shape.down, shape.body)[layer % 2], shape.width),
        )
        if shape.shared:
            add("ffn_gate_inp_shexp.weight", hidden)
            add("ffn_gate_shexp.weight", shape.shared, hidden, kind=shape.body)
            add("ffn_up_shexp.weight", shape.shared, hidden, kind=shape.body)
            add("ffn_down_shexp.weight", hidden, shape.shared, kind=(shape.down, shape.body)[layer % 2])
    return [
        *found,
        ("output_norm.weight", (hidden,), "F32"),
        ("output.weight", (shape.vocab, hidden), shape.head),
    ]


def _fitting(kind: str, columns: int) -> str:
    return _NARROW.get(kind, kind) if columns % 256 else kind


def random_tensor(
    dice: np.random.Generator, shape: tuple[int, ...], kind: str, name: str
) -> np.ndarray[Any, Any]:
    """Values around zero for matrices, ones for norms; large tensors repeat one pattern of random blocks."""
    if kind == "F32":
        values = dice.standard_normal(shape).astype(np.float32)
        return (
            np.ones(shape, np.float32)
            if "norm" in name
            else -np.abs(values)
            if "ssm_a" in name
            else values * 0.02
        )
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    count = int(np.prod(shape)) // values
    pattern = dice.integers(0, 256, (min(count, 1 << 14), size), dtype=np.uint8)
    for at in _HALVES[kind]:
        pattern[:, at : at + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
    if kind == "MXFP4":
        pattern[:, 0] = 120
    blocks = np.resize(pattern, (count, size))
    return blocks.reshape(*shape[:-1], -1)


def _experts(shape: PublishedSizes) -> dict[str, int]:
    found = {
        "expert_feed_forward_length": shape.width,
        "expert_count": shape.experts,
        "expert_used_count": shape.top,
    }
    return found | ({"expert_shared_feed_forward_length": shape.shared} if shape.shared else {})


def write_model(path: Path, shape: PublishedSizes, layers: int, vocabulary: Path | None = None) -> None:
    """A file of random weights, with the tokens and the chat template of another file, or without any."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    at = shape.architecture
    for key, value in {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.width,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "vocab_size": shape.vocab,
        **(_experts(shape) if shape.experts else {}),
        **shape.extra,
    }.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{at}.{key}", value)
    if shape.architecture.startswith("qwen35"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    if vocabulary is None:
        writer.add_tokenizer_model("none")
    for key, entry in gguf.GGUFReader(vocabulary).fields.items() if vocabulary is not None else ():
        if key.startswith("tokenizer."):
            writer.add_key_value(key, entry.contents(), *entry.types[:2])
    wanted, dice = tensors(shape, layers), np.random.default_rng(0)
    for name, size, kind in wanted:
        values, block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        nbytes = int(np.prod(size)) // values * block
        stored = size if kind == "F32" else (*size[:-1], size[-1] // values * block)
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        writer.add_tensor_info(name, stored, dtype, nbytes, GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size, kind in wanted:
        writer.write_tensor_data(np.ascontiguousarray(random_tensor(dice, size, kind, name)))
    writer.close()
