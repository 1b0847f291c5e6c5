"""Computes the cosine and sine tables of rotary embeddings for all supported scaling rules.

Computed in float64. The tables include YaRN's attention factor, so that engines need no scaling rules.
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
    """Cosine and sine, each [length, rotated dimensions / 2], for positions 0 to length - 1. For windowed
    layers with another rotary embedding, pass a spec with that one."""
    angles = np.arange(length, dtype=np.float64)[:, None] * inverse_frequencies(spec)[None, :]
    scale = spec.rope.attention_factor if spec.rope.scaling == "yarn" else 1.0
    return (np.cos(angles) * scale).astype(np.float32), (np.sin(angles) * scale).astype(np.float32)


def inverse_frequencies(spec: ModelSpec) -> Float64:
    """Radians per position for each pair of dimensions, [rotated dimensions / 2]."""
    rope, size = spec.rope, spec.rotated
    frequencies = rope.theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
    if rope.divisors:
        frequencies = frequencies / np.asarray(rope.divisors, dtype=np.float64)
        return frequencies if rope.scaling in (None, "llama3") else _scale(frequencies, rope, size)
    return _scale(frequencies, rope, size)


def _scale(frequencies: Float64, rope: RopeSpec, size: int) -> Float64:
    match rope.scaling:
        case None:
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _scale_llama3(frequencies, rope)
        case "yarn":
            return _scale_yarn(frequencies, rope, size)


def _scale_llama3(frequencies: Float64, rope: RopeSpec) -> Float64:
    """Keep short wavelengths, divide long ones by the factor, and blend those between."""
    turns = rope.original_context * frequencies / (2 * math.pi)  # full turns within the original context
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _scale_yarn(frequencies: Float64, rope: RopeSpec, size: int) -> Float64:
    """Like llama3, but blended linearly over the dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        return size * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # avoids a division by zero
    kept = 1 - np.clip((np.arange(size // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def yarn_attention_factor(factor: float, mscale: float = 0.0, mscale_all_dim: float = 0.0) -> float:
    """YaRN's attention factor: 0.1 ln(factor) + 1, or the ratio of two such terms if the configuration
    weights them."""

    def term(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return term(mscale) / term(mscale_all_dim) if mscale and mscale_all_dim else term(1.0)


def extend_context(spec: ModelSpec, context: int) -> ModelSpec:
    """The model extended by YaRN to `context` tokens; unchanged if its context is long enough.

    The extension is static: it also changes the results of short prompts a little. Raises UsageError for a
    model that is extended by another rule."""
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
