"""Mellum2: Qwen3-MoE with a sliding window in most layers, which have a rotary embedding of their own. Layers
that predict further tokens (MTP) are not read."""

from __future__ import annotations

from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec
from keystroke.engine.families.config_file import read_llama, read_two_ropes
from keystroke.engine.families.family import ConfigFile, Family, GGUFFile
from keystroke.engine.families.gguf_fields import read_gguf_experts, read_gguf_rope, read_llama_gguf
from keystroke.engine.families.qwen3 import HEAD_DIM
from keystroke.engine.families.qwen3_moe import dense_layers, read_experts, source
from keystroke.errors import UnsupportedModel

_THETA, _LOCAL_THETA, _WINDOW, _FULL_ATTENTION_EVERY = 500_000.0, 10_000.0, 1024, 4


def read_config(file: ConfigFile) -> ModelSpec:
    config = file.config
    layers = config.integer("num_hidden_layers", 1024)
    context = config.integer("max_position_embeddings", 1 << 30)
    both = read_two_ropes(config, context, (_THETA, _LOCAL_THETA))
    experts = read_experts(
        config, normalised=config.flag("norm_topk_prob", True), dense=dense_layers(config, layers)
    )
    return read_llama(
        file,
        "mellum",
        head_dim=HEAD_DIM,
        ropes=both or (RopeSpec(_THETA), RopeSpec(_LOCAL_THETA)),
        window=_WINDOW,
        qk_norm=True,
        experts=experts,
    )


def read_gguf(file: GGUFFile) -> ModelSpec:
    fields, stated = file.fields, file.stated
    layers = fields.integer(f"{stated}.block_count", 1024)
    context = fields.integer(f"{stated}.context_length", 1 << 30)
    window = fields.integer(f"{stated}.attention.sliding_window", 1 << 30, default=context)
    windowed = windowed_layers(file, layers) if window < context else frozenset[int]()
    rope = read_gguf_rope(fields, stated, context)
    local = RopeSpec(fields.number(f"{stated}.rope.freq_base_swa", rope.theta))
    return read_llama_gguf(
        file,
        "mellum",
        experts=read_gguf_experts(file),
        ignored=frozenset({"attention.sliding_window"}),
        window=window if windowed else 0,
        windowed=windowed,
        window_rope=local if windowed else None,
    )


def windowed_layers(file: GGUFFile, layers: int) -> frozenset[int]:
    """The layers with a window: a list of flags, or every how many layers there is one without."""
    pattern = file.fields.get(f"{file.stated}.attention.sliding_window_pattern")
    if pattern is None or isinstance(pattern, int):
        every = pattern or _FULL_ATTENTION_EVERY
        return frozenset(n for n in range(layers) if (n + 1) % every)
    flags = [*pattern] if hasattr(pattern, "__iter__") else []
    if len(flags) < layers:
        raise UnsupportedModel(f"{file.fields.origin} does not say which layers have a sliding window")
    return frozenset(n for n in range(layers) if flags[n])


FAMILY = Family(
    name="mellum",
    title="Mellum2",
    huggingface=("MellumForCausalLM",),
    gguf="mellum",
    read_config=read_config,
    read_gguf=read_gguf,
    source=source,
)
