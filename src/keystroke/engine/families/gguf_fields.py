"""Reads what the metadata of GGUF files has in common, and llama.cpp's names of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.rope import yarn_attention_factor
from keystroke.engine.checkpoint.spec import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Architecture,
    ExpertsSpec,
    ModelSpec,
    RopeSpec,
)
from keystroke.engine.families.family import ELSEWHERE, GGUFFile
from keystroke.errors import ModelDamaged, UnsupportedModel

OUTSIDE = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.gate_up_proj": "ffn_gate_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?")


def gguf_name(name: str, changed: Mapping[str, str]) -> str:
    """llama.cpp's name for a canonical tensor name. `changed`: the family's own names, of a tensor with its
    ending or of a layer's part without it. Raises KeyError."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        raise KeyError(name)
    layer, part, ending = match[1], match[2], match[3]
    whole = f"{part}.{ending}" if ending else part
    if whole in changed:
        return f"blk.{layer}.{changed[whole]}"
    names = {**LAYER_NAMES, **changed}
    if part not in names or not ending:
        raise KeyError(name)
    return f"blk.{layer}.{names[part]}.{ending}"


def read_llama_gguf(
    file: GGUFFile,
    architecture: Architecture,
    *,
    experts: ExpertsSpec | None = None,
    ignored: frozenset[str] = frozenset(),
    **changes: Any,
) -> ModelSpec:
    """The spec of a family whose metadata is laid out like Llama's. `ignored`: keys that the caller reads
    itself; `changes` are further fields of the spec."""
    fields, stated, shapes = file.fields, file.stated, file.shapes
    refuse_variants(fields, stated, experts=experts is not None, ignored=ignored)
    hidden = fields.integer(f"{stated}.embedding_length", 1 << 20)
    heads = fields.integer(f"{stated}.attention.head_count", 4096)
    head_dim = fields.integer(f"{stated}.attention.key_length", 4096, default=max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if key not in ignored and fields.integer(f"{stated}.{key}", 4096, default=head_dim) != head_dim:
            value = fields.get(f"{stated}.{key}")
            raise UnsupportedModel(
                f"{fields.origin} says {stated}.{key} is {value} where its heads have "
                f"{head_dim} dimensions, which this engine does not run; {ELSEWHERE}"
            )
    embedding = shapes.get(OUTSIDE[EMBEDDING])
    if embedding is None:
        raise ModelDamaged(f"{fields.origin} lacks tensor token_embd.weight; download it again")
    vocab_size = embedding[0]
    context = fields.integer(f"{stated}.context_length", 1 << 30)
    rope = changes.pop("rope", None) or read_gguf_rope(fields, stated, context)
    if rope.scaling == "yarn":
        context = max(context, round(rope.factor * rope.original_context))
    ends = ("eos", "eot", "eom")
    eos = {each for end in ends for each in fields.tokens(f"tokenizer.ggml.{end}_token_id", vocab_size)}
    bos = fields.tokens("tokenizer.ggml.bos_token_id", vocab_size)
    spec = ModelSpec(
        architecture=architecture,
        name=file.name,
        vocab_size=vocab_size,
        hidden=hidden,
        layers=changes.pop("layers", None) or fields.integer(f"{stated}.block_count", 1024),
        heads=heads,
        kv_heads=fields.integer(f"{stated}.attention.head_count_kv", 4096, default=heads),
        head_dim=head_dim,
        intermediate=fields.integer(f"{stated}.feed_forward_length", 1 << 22, default=1 if experts else None),
        norm_eps=round_float32(fields.number(f"{stated}.attention.layer_norm_rms_epsilon")),
        rope=rope,
        context_length=context,
        tied=OUTSIDE[HEAD] not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        bos=bos[0] if bos else None,
        eos=frozenset(eos),
        experts=experts,
    )
    return replace(spec, **changes)


def read_gguf_experts(file: GGUFFile, **changes: Any) -> ExpertsSpec:
    fields, stated = file.fields, file.stated
    made = ExpertsSpec(
        count=fields.integer(f"{stated}.expert_count", 1 << 16),
        top=fields.integer(f"{stated}.expert_used_count", 1 << 10),
        width=fields.integer(f"{stated}.expert_feed_forward_length", 1 << 22),
        fused=any(name.endswith(".ffn_gate_up_exps.weight") for name in file.shapes),
    )
    return replace(made, **changes)


def without_predicting(file: GGUFFile) -> int:
    """The number of layers without those that predict further tokens (MTP), which come last."""
    layers = file.fields.integer(f"{file.stated}.block_count", 1024)
    predicting = file.fields.get(f"{file.stated}.nextn_predict_layers") or 0
    return layers - (predicting if isinstance(predicting, int) and predicting < layers else 0)


def round_float32(value: float) -> float:
    """The decimal that a float32 in the file stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def refuse_variants(fields: Fields, stated: str, *, experts: bool, ignored: frozenset[str]) -> None:
    if not experts and fields.get(f"{stated}.expert_count") not in (None, 0):
        raise UnsupportedModel(
            f"{fields.origin} is a mixture of experts, which this engine does not run; {ELSEWHERE}"
        )
    scales = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale")
    caps = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
    for key in (*scales, *caps):
        if key not in ignored and fields.get(f"{stated}.{key}") not in (None, 0, 1.0):
            raise UnsupportedModel(
                f"{fields.origin} sets {stated}.{key}, which this engine does not run; {ELSEWHERE}"
            )


def read_gguf_rope(fields: Fields, stated: str, context: int) -> RopeSpec:
    at = f"{stated}.rope"
    theta = fields.number(f"{at}.freq_base", 10_000.0)
    kind = fields.text(f"{at}.scaling.type", "none")
    if kind == "none":
        factor = fields.number(f"{at}.scale_linear", 1.0)  # how older files wrote it
        return RopeSpec(theta, "linear", factor) if factor != 1.0 else RopeSpec(theta)
    factor = fields.number(f"{at}.scaling.factor", 1.0)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor)
    if kind == "yarn":
        original = fields.integer(f"{at}.scaling.original_context_length", 1 << 30, default=context)
        fast = fields.number(f"{at}.scaling.yarn_beta_fast", 32.0)
        slow = fields.number(f"{at}.scaling.yarn_beta_slow", 1.0)
        attention = yarn_attention_factor(factor) * fields.number(f"{at}.scaling.attn_factor", 1.0)
        return RopeSpec(
            theta, "yarn", factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention
        )
    raise UnsupportedModel(f"the rotary scaling {kind!r} is not one this engine runs; {ELSEWHERE}")
