"""A target of a few thousand parameters, and texts that it wrote."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from keystroke.engine.checkpoint.spec import Architecture, ModelSpec, RopeSpec, tensor_shapes
from keystroke_lab.draft_heads.generation import BatchGenerator, GenerationPrompt
from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.draft_heads.texts import TokenText

END = 1


def tiny_spec(family: Architecture = "qwen2") -> ModelSpec:
    return ModelSpec(
        architecture=family,
        name="tiny",
        vocab_size=256,
        hidden=48,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=64,
        norm_eps=1e-6,
        rope=RopeSpec(),
        context_length=256,
        tied=family == "llama",
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        eos=frozenset({END}),
    )


def tiny_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in tensor_shapes(spec).items():
        noise = torch.randn(shape, generator=generator)
        found[name] = noise * 0.1 + 1 if name.endswith("norm.weight") else noise * shape[-1] ** -0.5 * 1.5
    return found


def tiny_target(family: Architecture = "qwen2") -> TargetModel:
    spec = tiny_spec(family)
    return TargetModel(spec, tiny_tensors(spec).__getitem__, 256)


def tiny_asks(count: int, heat: float = 0.0) -> list[GenerationPrompt]:
    dice = random.Random(1)
    return [
        GenerationPrompt([dice.randrange(2, 256) for _ in range(dice.randrange(3, 20))], "x", heat, n)
        for n in range(count)
    ]


def tiny_texts(target: TargetModel, count: int, heat: float = 0.0) -> list[TokenText]:
    writer = BatchGenerator(
        target, slots=8, longest_prompt=20, longest_answer=24, ends=frozenset({END}), coupled=heat > 0
    )
    return list(writer.generate(tiny_asks(count, heat)))
