"""Reads what Hugging Face configurations have in common: sizes, rotary embeddings, sliding windows."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.rope import yarn_attention_factor
from keystroke.engine.checkpoint.spec import Architecture, ModelSpec, RopeSpec
from keystroke.engine.families.family import ELSEWHERE, ConfigFile, TensorSource
from keystroke.errors import ModelDamaged, UnsupportedModel

Windows = tuple[int, frozenset[int]]


def read_llama(
    file: ConfigFile,
    architecture: Architecture,
    *,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    ropes: tuple[RopeSpec, RopeSpec | None] | None = None,
    windowed: frozenset[int] = frozenset(),
    window: int | None = None,
    activations: tuple[str, str, tuple[str, ...]] = ("hidden_act", "silu", ("silu", "swish")),
    intermediate: str = "intermediate_size",
    **changes: Any,
) -> ModelSpec:
    """The spec of a family whose configuration is laid out like Llama's. `head_dim` is the default of a
    missing one; `windowed` are the layers with a sliding window unless layer_types lists them, and `window`
    is the default of its size. `changes` are further fields of the spec."""
    config, generation = file.config, file.generation
    hidden = config.integer("hidden_size", 1 << 20)
    heads = config.integer("num_attention_heads", 4096)
    size = config.integer("head_dim", 4096, default=head_dim or max(hidden // heads, 1))
    if "head_dim" not in config and head_dim is None and hidden % heads:
        raise ModelDamaged(
            f"{config.origin} has {hidden} dimensions that {heads} heads cannot share; download it again"
        )
    layers = config.integer("num_hidden_layers", 1024)
    vocab_size = config.integer("vocab_size", 1 << 24)
    _refuse_variants(config, *activations)
    context = config.integer("max_position_embeddings", 1 << 30)
    span, local = read_windows(config, layers, context, windowed, window, linear="delta" in changes)
    rope, window_rope = ropes or (read_rope(config, context, theta), None)
    partial = _partial_factor(config)
    if rope.scaling == "yarn":  # the stated context may be the one before or after scaling
        context = max(context, round(rope.factor * rope.original_context))
    eos = {*config.tokens("eos_token_id", vocab_size), *generation.tokens("eos_token_id", vocab_size)}
    bos = config.tokens("bos_token_id", vocab_size) or generation.tokens("bos_token_id", vocab_size)
    bias = changes.pop("attention_bias", config.flag("attention_bias", False))
    if partial != 1.0 and "rotary" not in changes:
        raise UnsupportedModel(
            f"the model rotates only a part of each head, which this engine does not run; {ELSEWHERE}"
        )
    spec = ModelSpec(
        architecture=architecture,
        name=file.name,
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", 4096, default=heads),
        head_dim=size,
        intermediate=config.integer(intermediate, 1 << 22, default=None if intermediate else 1),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        context_length=context,
        tied=config.flag("tie_word_embeddings", file.tied),
        qkv_bias=bias,
        o_bias=bias,
        bos=bos[0] if bos else None,
        eos=frozenset(eos),
        window=span,
        windowed=local,
        window_rope=window_rope if local else None,
    )
    return replace(spec, **changes)


def partial_rotary(config: Fields, head_dim: int, usual: float) -> int:
    """How many dimensions of a head are rotated; 0 for all."""
    factor = _partial_factor(config, usual)
    if not 0 < factor <= 1:
        raise ModelDamaged(f"{config.origin} rotates {factor} of each head; download it again")
    size = int(head_dim * factor)
    return 0 if size == head_dim else size


def _partial_factor(config: Fields, usual: float = 1.0) -> float:
    table = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    return table.number("partial_rotary_factor", config.number("partial_rotary_factor", usual))


def _refuse_variants(config: Fields, key: str, usual: str, known: tuple[str, ...]) -> None:
    method = quantisation_method(config)
    if method not in (None, "fp8", "mxfp4"):
        raise UnsupportedModel(
            f"{config.origin} describes weights that are already quantised in another program's format; "
            f"use the original model or a GGUF file, or {ELSEWHERE}"
        )
    if (activation := config.text(key, usual)) not in known:
        raise UnsupportedModel(f"the activation {activation} is not one this engine runs; {ELSEWHERE}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            raise UnsupportedModel(
                f"{config.origin} sets {name}, which this engine does not run; {ELSEWHERE}"
            )


def quantisation_method(config: Fields) -> str | None:
    """The format of weights that are already quantised; None if they are not. Folders of MLX describe theirs
    twice, under `quantization` and without a method under the name that is read here."""
    if config.get("quantization_config") is None or config.get("quantization") is not None:
        return None
    return config.table("quantization_config").text("quant_method", "?")


def read_windows(
    config: Fields, layers: int, context: int, usual: frozenset[int], size: int | None, *, linear: bool
) -> Windows:
    """The size of the sliding window and the layers that have one. A window as long as the context is
    ignored. `linear`: whether layers may have linear attention."""
    kinds = config.get("layer_types")
    windowed = usual
    if isinstance(kinds, list):
        known = ("full_attention", "sliding_attention", *(("linear_attention",) if linear else ()))
        if len(kinds) < layers:
            raise config.error("layer_types", "a list with one kind for each layer")
        if any(kind not in known for kind in kinds[:layers]):
            raise UnsupportedModel(f"{config.origin} has layer_types this engine does not run; {ELSEWHERE}")
        windowed = frozenset(n for n, kind in enumerate(kinds[:layers]) if kind == "sliding_attention")
    unbounded = config.has("sliding_window") and "sliding_window" not in config
    window = context if unbounded else config.integer("sliding_window", 1 << 30, default=size or context)
    return (window, windowed) if windowed and window < context else (0, frozenset())


def linear_layers(config: Fields, layers: int) -> frozenset[int]:
    """The layers that layer_types calls linear attention."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list):
        every = config.integer("full_attention_interval", 1024, default=4)
        return frozenset(n for n in range(layers) if (n + 1) % every)
    return frozenset(n for n, kind in enumerate(kinds[:layers]) if kind == "linear_attention")


def read_rope(config: Fields, context: int, usual: float) -> RopeSpec:
    """Supports both formats: `rope_theta` with `rope_scaling`, and `rope_parameters`."""
    table = config.table("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    return scaled_rope(table, table.number("rope_theta", config.number("rope_theta", usual)), context)


def read_two_ropes(
    config: Fields, context: int, usual: tuple[float, float]
) -> tuple[RopeSpec, RopeSpec] | None:
    """The rotary embeddings of full and windowed layers; None if the configuration does not list both."""
    both = config.table("rope_parameters")
    if "full_attention" not in both and "sliding_attention" not in both:
        return None
    far, near = both.table("full_attention"), both.table("sliding_attention")
    return (
        scaled_rope(far, far.number("rope_theta", usual[0]), context),
        scaled_rope(near, near.number("rope_theta", usual[1]), context),
    )


def scaled_rope(table: Fields, theta: float, context: int) -> RopeSpec:
    kind = table.text("rope_type", table.text("type", "default"))
    match kind:
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, "linear", table.number("factor"))
        case "llama3":
            low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
            if high <= low:
                raise ModelDamaged(
                    f"{table.origin} has high_freq_factor no larger than low_freq_factor; download it again"
                )
            original = table.integer("original_max_position_embeddings", 1 << 30, default=context)
            return RopeSpec(
                theta, "llama3", table.number("factor"), original, low_freq_factor=low, high_freq_factor=high
            )
        case "yarn":
            original = table.integer("original_max_position_embeddings", 1 << 30, default=context)
            factor = table.number("factor", context / original)
            implied = yarn_attention_factor(
                factor, _number_or_zero(table, "mscale"), _number_or_zero(table, "mscale_all_dim")
            )
            return RopeSpec(
                theta,
                "yarn",
                factor,
                original,
                beta_fast=table.number("beta_fast", 32.0),
                beta_slow=table.number("beta_slow", 1.0),
                truncate=table.flag("truncate", True),
                attention_factor=table.number("attention_factor", implied),
                query_growth=_number_or_zero(table, "llama_4_scaling_beta"),
            )
        case _:
            raise UnsupportedModel(f"the rotary scaling {kind!r} is not one this engine runs; {ELSEWHERE}")


def _number_or_zero(table: Fields, key: str) -> float:
    return table.number(key) if table.get(key) else 0.0


def norms_less_one(spec: ModelSpec, name: str, stored: Container[str]) -> TensorSource:
    """For families whose norms are stored minus one."""
    return TensorSource((name,), change="plus one" if name.endswith("norm.weight") else "")
