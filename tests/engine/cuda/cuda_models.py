"""Tiny models of every family for the CUDA engine's tests."""

from __future__ import annotations

from functools import cache

import torch
from cuda_emulator import EmulatedLauncher
from torch import Tensor

from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec, tensor_shapes
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.packing import unpack
from keystroke.engine.cuda.plan import KvPrecision, Plan, Precision
from keystroke.engine.cuda.sparse import Sparse
from keystroke.engine.cuda.target import HOPPER, Target
from keystroke.engine.cuda.weights import Weights, attention_rows, build_weights, random_tensor

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "qwen3")


def tiny_spec(family: str = "qwen2", *, layers: int = 2, context: int = 2048, tied: bool = True) -> ModelSpec:
    return ModelSpec(
        architecture=family,  # type: ignore[arg-type]
        name=f"tiny {family}",
        vocab_size=203,
        hidden=128,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate=192,
        norm_eps=1e-6,
        rope=RopeSpec(10_000.0),
        context_length=context,
        tied=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


@cache
def tiny_tensors(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: random_tensor(name, shape, generator) for name, shape in tensor_shapes(spec).items()}


def tiny_weights(
    spec: ModelSpec,
    precision: Precision = "bf16",
    blocks: int = 2,
    kv_precision: KvPrecision = "bf16",
    target: Target = HOPPER,
) -> Weights:
    tensors = tiny_tensors(spec)
    plan = Plan(spec, precision, blocks, kv_precision, target=target)
    return build_weights(plan, lambda name, _: tensors[name], CPU)


def tiny_engine(
    spec: ModelSpec,
    precision: Precision = "bf16",
    blocks: int = 2,
    kv_tokens: int = 4096,
    sparse: Sparse = "off",
    kv_precision: KvPrecision = "bf16",
    target: Target = HOPPER,
) -> CudaEngine:
    weights = tiny_weights(spec, precision, blocks, kv_precision, target)
    return CudaEngine(weights, EmulatedLauncher(weights.plan), kv_tokens, sparse=sparse)


def dense_tensors(weights: Weights, given: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """A model's tensors as its kernel multiplies with them, quantisation included; `given` are those it was
    made from, if it is not a tiny one."""
    spec = weights.plan.spec
    found = dict(tiny_tensors(spec) if given is None else given)
    keys = spec.kv_heads * spec.head_dim
    for layer in range(spec.layers):
        dense, at = weights.dense(layer), f"model.layers.{layer}"
        gate, up = dense.gate_up.chunk(2)
        if weights.plan.is_delta(layer):
            assert spec.delta is not None
            qkv, z = torch.split(dense.qkv, [spec.delta.channels, spec.delta.values])
            mixer = {"linear_attn.in_proj_qkv": qkv, "linear_attn.in_proj_z": z}
            mixer["linear_attn.out_proj"] = dense.output
        else:
            both, v = torch.split(dense.qkv, [len(dense.qkv) - keys, keys])
            if dense.gate is not None:
                both = torch.cat((both, dense.gate))
            stored = torch.empty_like(both)
            stored[attention_rows(spec)] = both
            q, k = torch.split(stored, [len(both) - keys, keys])
            mixer = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
            mixer["self_attn.o_proj"] = dense.output
        mlp = {"gate_proj": gate, "up_proj": up, "down_proj": dense.down}
        where = "mlp.experts" if spec.experts else "mlp"
        if spec.experts is not None and spec.experts.shared:
            for name, tensor in mlp.items():  # the shared expert is the last
                routed = len(tensor) // (spec.experts.count + 1) * spec.experts.count
                mlp[name], found[f"{at}.mlp.shared_expert.{name}.weight"] = tensor[:routed], tensor[routed:]
        found |= {f"{at}.{name}.weight": tensor for name, tensor in mixer.items()}
        found |= {f"{at}.{where}.{name}.weight": tensor for name, tensor in mlp.items()}
    found["lm_head.weight"] = unpack(weights.head, None, weights.plan.head, spec.vocab_size)
    return found
