"""The plain model against transformers: the truth that all else is held against must be true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from cuda_models import FAMILIES, tiny_spec

from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec
from keystroke.engine.cuda.reference import forward

_CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
_MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def peer(spec: ModelSpec, rope: dict[str, Any] | None = None) -> Any:
    config = getattr(transformers, _CONFIGS[spec.architecture])(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context_length,
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied,
        attention_dropout=0.0,
        **(
            {"rope_parameters": rope}
            if rope
            else {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
        ),
    )
    torch.manual_seed(0)
    model = getattr(transformers, _MODELS[spec.architecture])(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(family: str, tied: bool) -> None:
    spec = tiny_spec(family, tied=tied)
    model = peer(spec)
    tokens = torch.randint(0, spec.vocab_size, (33,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    found = forward(spec, model.state_dict().__getitem__, tokens)
    assert torch.allclose(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (
            RopeSpec(10_000.0, "yarn", 4.0, 64, attention_factor=1.138629436),
            {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            RopeSpec(10_000.0, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
            {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
    ids=["yarn", "llama3"],
)
def test_stretched_contexts_equal_transformers(rope: RopeSpec, parameters: dict[str, Any]) -> None:
    spec = replace(tiny_spec("llama"), rope=rope, context_length=256)
    model = peer(spec, parameters)
    tokens = torch.randint(0, spec.vocab_size, (200,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    found = forward(spec, model.state_dict().__getitem__, tokens)
    assert torch.allclose(found, expected, atol=2e-4, rtol=1e-4)
