"""Rotary embedding as tables of cosines and sines, for every scaling rule we read.

Pure arithmetic on a spec, in float64 until the end. The attention factor of YaRN is folded into both
tables, so an engine multiplies and adds and knows no scaling rule.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec
from keystroke.errors import UsageError

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


def rope_tables(spec: ModelSpec, length: int) -> tuple[Float32, Float32]:
    """Cosine and sine, each [length, head_dim / 2], for positions 0 to length - 1. (For layers of a window
    with a rotary embedding of their own, ask with that in the spec.)"""
    angles = np.arange(length, dtype=np.float64)[:, None] * inverse_frequencies(spec)[None, :]
    scale = spec.rope.attention_factor if spec.rope.scaling == "yarn" else 1.0
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def inverse_frequencies(spec: ModelSpec) -> Float64:
    """Radians per position for each pair of dimensions, [head_dim / 2]."""
    rope, size = spec.rope, spec.head_dim
    frequencies = rope.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    if rope.divisors:
        frequencies = frequencies / np.asarray(rope.divisors, dtype=np.float64)
        return frequencies if rope.scaling in (None, "llama3") else _scaled(frequencies, rope, size)
    return _scaled(frequencies, rope, size)


def _scaled(frequencies: Float64, rope: RopeSpec, size: int) -> Float64:
    match rope.scaling:
        case None:
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(frequencies, rope)
        case "yarn":
            return _yarn(frequencies, rope, size)


def _llama3(frequencies: Float64, rope: RopeSpec) -> Float64:
    """Short wavelengths stay, long ones are divided by the factor, those between are blended."""
    turns = rope.original_context * frequencies / (2 * math.pi)  # full turns within the original context
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn(frequencies: Float64, rope: RopeSpec, size: int) -> Float64:
    """The same idea, blended linearly over the dimensions between two counts of turns."""

    def dimension(turns: float) -> float:
        return size * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    kept = 1 - np.clip((np.arange(size // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """How much YaRN sharpens attention: 0.1 ln(factor) + 1, or the ratio of two such terms where a
    configuration weights them."""

    def term(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)


def extend_context(spec: ModelSpec, context: int) -> ModelSpec:
    """The same model stretched by YaRN to hold `context` tokens; unchanged if it already does.

    The stretch is static: it also changes short prompts a little, so callers ask for it only when a
    longer context is wanted. Raises UsageError for a model stretched by another rule."""
    if context <= spec.context_length:
        return spec
    if spec.rope.scaling not in (None, "yarn") or spec.rope.divisors:
        raise UsageError(
            f"{spec.name} stretches its context to {spec.context_length} tokens by a rule other than YaRN; "
            f"ask for at most {spec.context_length}",
            param="context",
        )
    original = spec.rope.original_context or _trained_context(spec)
    factor = context / original
    rope = replace(
        spec.rope,
        scaling="yarn",
        factor=factor,
        original_context=original,
        attention_factor=yarn_attention_factor(factor),
    )
    return replace(spec, rope=rope, context_length=context)


def _trained_context(spec: ModelSpec) -> int:
    # Qwen3 states 40,960 (32,768 of prompt and 8,192 of answer) but was trained on 32,768.
    return 32_768 if spec.architecture == "qwen3" and spec.context_length == 40_960 else spec.context_length
