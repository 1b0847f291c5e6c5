"""Small random models for the checkpoint tests, saved by transformers or written by the gguf package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.constants import GGMLQuantizationType

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


def reference(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model with random weights, biases and norms included."""
    extra: dict[str, Any] = {"head_dim": 16} if family in ("qwen3", "mistral") else {}
    if family == "mistral":
        extra["sliding_window"] = None
    if family == "smollm3":
        extra |= {"no_rope_layer_interval": 2, "pad_token_id": 0}
    if family == "gemma3":
        extra |= {
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
        }
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **extra, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


def saved(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "50MB", **changes: Any
) -> Any:
    model = reference(family, dtype, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def paired(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's row order, stated row by row: pair i of a head is its rows i and i + head_dim / 2."""
    head_dim = rows.shape[0] // heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return rows[order]


_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, family: str = "") -> str:
    for theirs, ours in {**_NAMES, **(_GEMMA_NAMES if family == "gemma3" else {})}.items():
        name = name.replace(theirs, ours)
    return name.replace("model.layers.", "blk.")


def write_gguf(
    path: Path,
    model: Any,
    family: str,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    replaced: dict[str, tuple[str, np.ndarray[Any, Any]]] | None = None,
    split: int = 0,
) -> None:
    """A GGUF file as llama.cpp's converter would lay it out: matrices as `kind`, vectors as float32,
    `replaced` tensors as the stored bytes of the type given with them. `split`: at most so many tensors in
    each of several files."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, family, split_max_tensors=split)
    writer.add_name("a small model")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if family == "gemma3":
        writer.add_sliding_window(config.sliding_window)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_token_list([f"token {index}" for index in range(config.vocab_size)])
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    state = {name: value.float().numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, value in state.items():
        if family in ("llama", "smollm3") and ".q_proj." in name:
            value = paired(value, config.num_attention_heads)
        if family in ("llama", "smollm3") and ".k_proj." in name:
            value = paired(value, config.num_key_value_heads)
        if family == "gemma3" and name.endswith("norm.weight"):
            value = value + 1  # as the converter does
        stored_name = gguf_name(name, family)
        if stored_name in (replaced or {}):
            stored, data = (replaced or {})[stored_name]
            writer.add_tensor(stored_name, data, raw_dtype=GGMLQuantizationType[stored])
        elif value.ndim == 1:
            writer.add_tensor(stored_name, np.ascontiguousarray(value))
        else:
            writer.add_tensor(stored_name, gguf.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
