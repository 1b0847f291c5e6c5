from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from keystroke.engine.checkpoint import ModelSpec, RopeSpec, extend_context, rope_tables
from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.huggingface import read_spec
from keystroke.errors import UsageError

LENGTH = 2048
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.9,
    },
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn with its own ramp": {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}


def _tables(config: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """transformers' cosines and sines, computed from its own frequencies in float64."""
    embedding = Qwen2RotaryEmbedding(config=config)
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * embedding.inv_freq.double()[None, :]
    factor = embedding.attention_scaling
    return (angles.cos() * factor).numpy(), (angles.sin() * factor).numpy()


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_equal_those_of_transformers(scaling: str, head_dim: int, theta: float) -> None:
    config = transformers.Qwen2Config(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={**SCALINGS[scaling], "rope_theta": theta},
    )
    config.architectures = ["Qwen2ForCausalLM"]
    spec = read_spec(Fields(config.to_dict(), "config.json"), Fields({}, ""), "model")
    for actual, expected in zip(rope_tables(spec, LENGTH), _tables(config), strict=True):
        assert actual.shape == (LENGTH, head_dim // 2)
        # Their float32 frequencies carry a relative error of 1e-7, which position 2048 multiplies.
        np.testing.assert_allclose(actual, expected, atol=6e-4)
        np.testing.assert_allclose(actual[:32], expected[:32], atol=1e-5)


def _spec(**changes: Any) -> ModelSpec:
    spec = ModelSpec(
        architecture="qwen2",
        name="model",
        vocab_size=10,
        hidden=256,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=10,
        norm_eps=1e-6,
        rope=RopeSpec(1e6),
        context_length=32_768,
        tied=True,
    )
    return replace(spec, **changes)


def test_an_extended_context_is_the_published_yarn_setting() -> None:
    stretched = extend_context(_spec(), 131_072)
    assert stretched.context_length == 131_072
    assert stretched.rope.scaling == "yarn"
    assert (stretched.rope.factor, stretched.rope.original_context) == (4.0, 32_768)
    assert stretched.rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    assert rope_tables(stretched, 131_072)[0].shape == (131_072, 32)


def test_qwen3_is_stretched_from_the_context_it_was_trained_on() -> None:
    stretched = extend_context(_spec(architecture="qwen3", context_length=40_960), 131_072)
    assert (stretched.rope.factor, stretched.rope.original_context) == (4.0, 32_768)


def test_a_context_that_fits_changes_nothing() -> None:
    assert extend_context(_spec(), 32_768) == _spec()


def test_stretching_further_starts_from_the_original_context() -> None:
    assert extend_context(extend_context(_spec(), 65_536), 131_072) == extend_context(_spec(), 131_072)


def test_a_model_stretched_by_another_rule_is_refused() -> None:
    with pytest.raises(UsageError, match="at most 32768"):
        extend_context(_spec(rope=RopeSpec(1e6, "linear", 2.0)), 65_536)
