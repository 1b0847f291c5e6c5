"""Gemma 3 (text): norms on both sides of attention and feed-forward, GELU, and five layers with a sliding
window to every one without. Norms are stored minus one, except in GGUF files."""

from __future__ import annotations

from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec
from keystroke.engine.families.config_file import norms_less_one, read_llama, read_two_ropes, scaled_rope
from keystroke.engine.families.family import ConfigFile, Family, GGUFFile
from keystroke.engine.families.gguf_fields import read_llama_gguf

_FULL_EVERY, _WINDOW, _THETA, _LOCAL_THETA = 6, 4096, 1_000_000.0, 10_000.0


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    layers = config.integer("num_hidden_layers", 1024)
    every = config.integer("sliding_window_pattern", 1024, default=_FULL_EVERY)
    hidden = config.integer("hidden_size", 1 << 20)
    return read_llama(
        file,
        "gemma3",
        ropes=_read_ropes(config),
        windowed=frozenset(n for n in range(layers) if (n + 1) % every),
        window=_WINDOW,
        activations=("hidden_activation", "gelu_pytorch_tanh", ("gelu_pytorch_tanh",)),
        tied=config.flag("tie_word_embeddings", True),
        qk_norm=True,
        activation="gelu",
        post_norms=True,
        embedding_scale=float(hidden**0.5),
        attention_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
    )


def _read_ropes(config: Fields) -> tuple[RopeSpec, RopeSpec]:
    """The rotary embeddings of full and windowed layers, in both formats of the configuration."""
    context = config.integer("max_position_embeddings", 1 << 30)
    if (both := read_two_ropes(config, context, (_THETA, _LOCAL_THETA))) is not None:
        return both
    theta = config.number("rope_theta", _THETA)
    local = RopeSpec(config.number("rope_local_base_freq", _LOCAL_THETA))
    return scaled_rope(config.table("rope_scaling"), theta, context), local


def read_gguf(file: GGUFFile) -> ModelSpec:
    fields = file.fields
    layers = fields.integer("gemma3.block_count", 1024)
    context = fields.integer("gemma3.context_length", 1 << 30)
    window = fields.integer("gemma3.attention.sliding_window", 1 << 30, default=context)
    windowed = frozenset(n for n in range(layers) if (n + 1) % _FULL_EVERY)
    windowed = windowed if window < context else frozenset()
    hidden = fields.integer("gemma3.embedding_length", 1 << 20)
    return read_llama_gguf(
        file,
        "gemma3",
        ignored=frozenset({"attention.sliding_window"}),
        window=window if windowed else 0,
        windowed=windowed,
        window_rope=RopeSpec(_LOCAL_THETA) if windowed else None,
        activation="gelu",
        post_norms=True,
        embedding_scale=float(hidden**0.5),
    )


FAMILY = Family(
    name="gemma3",
    title="Gemma 3 (text)",
    huggingface=("Gemma3ForCausalLM",),
    gguf="gemma3",
    read_config=read_config,
    read_gguf=read_gguf,
    source=norms_less_one,
    gguf_names={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
)
