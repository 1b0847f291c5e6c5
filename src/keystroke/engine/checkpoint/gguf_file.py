"""Reads GGUF models: metadata to a ModelSpec, llama.cpp's tensor names and row order to canonical ones.

Block-quantised tensors are dequantised one at a time, or returned as stored.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.digest import quick_digest
from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.gguf_header import GGUFHeader, open_header
from keystroke.engine.checkpoint.huggingface import ELSEWHERE, known_architecture
from keystroke.engine.checkpoint.rope import yarn_attention_factor
from keystroke.engine.checkpoint.safetensors_file import to_float32
from keystroke.engine.checkpoint.spec import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Architecture,
    Checkpoint,
    ExpertsSpec,
    ModelSpec,
    RopeSpec,
    check_shapes,
)
from keystroke.errors import ModelDamaged, UnsupportedModel

_ARCHITECTURES: dict[str, Architecture] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "smollm3": "smollm3",
    "gemma3": "gemma3",
}
# Which layers differ, as GGUF files do not state it.
_SMOLLM3_UNROTATED_EVERY, _GEMMA3_FULL_EVERY, _GEMMA3_LOCAL_THETA = 4, 6, 10_000.0
_OUTSIDE = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_INSIDE = {
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
    "mlp.experts.down_proj": "ffn_down_exps",
}
_POST_NORMED = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_FLOATS: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: GGUFHeader | None = open_header(path)
        self._bytes = np.frombuffer(self._header.view, dtype=np.uint8)
        self.spec = _spec(self._header)
        if "rope_freqs.weight" in self._header.tensors:
            self.spec = replace(self.spec, rope=self._with_divisors(self.spec.rope))
        check_shapes(self.spec, self._shape)

    def _with_divisors(self, rope: RopeSpec) -> RopeSpec:
        """Llama 3.1 and later: the file contains the results of the llama3 rule, one divisor per
        frequency."""
        stored, kind = self._stored("rope_freqs.weight")
        divisors = to_float32(stored, kind) if stored.dtype != np.uint8 else np.zeros(1, np.float32)
        if divisors.size > 4096 or not np.all(np.isfinite(divisors) & (divisors > 0)):
            raise ModelDamaged(f"{self._path} has unusable rotary factors; download it again")
        return replace(rope, scaling=rope.scaling or "llama3", divisors=tuple(divisors.ravel().tolist()))

    @property
    def header(self) -> GGUFHeader:
        assert self._header is not None, "the checkpoint is closed"
        return self._header

    def _shape(self, name: str) -> tuple[int, ...] | None:
        info = self.header.tensors.get(self._name(name))
        return _stacked(info.shape) if info else None

    def _name(self, name: str) -> str:
        return stored_name(name, post_norms=self.spec.post_norms)

    def _stored(self, stored: str) -> tuple[npt.NDArray[np.generic], str]:
        info = self.header.tensors[stored]
        data = self._bytes[info.start : info.start + info.size]
        dtype = _FLOATS.get(info.type.name)
        if dtype is not None:
            return data.view(dtype).reshape(_stacked(info.shape)), info.type.name
        return data.reshape(*_stacked(info.shape)[:-1], -1), info.type.name

    def raw(self, name: str) -> tuple[npt.NDArray[np.generic], str]:
        data, kind = self._stored(self._name(name))
        spec = self.spec
        paired = spec.architecture in ("llama", "smollm3")
        if paired and ".self_attn.q_proj." in name:
            return _unpaired(data, spec.heads), kind
        if paired and ".self_attn.k_proj." in name:
            return _unpaired(data, spec.kv_heads), kind
        return data, kind

    def storage(self, name: str) -> str:
        return self.header.tensors[stored_name(name)].type.name

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        data, kind = self.raw(name)
        if data.dtype != np.uint8:
            return to_float32(data, kind)
        from gguf.constants import GGMLQuantizationType  # imported here: a converted model runs without it
        from gguf.quants import dequantize

        try:
            values: npt.NDArray[np.float32] = dequantize(data, GGMLQuantizationType[kind])
        except (NotImplementedError, KeyError) as error:
            raise UnsupportedModel(
                f"tensor {name} in {self._path} is stored as {kind}, which cannot be dequantised here; "
                "use another quantisation of the model, such as Q4_K_M or Q8_0"
            ) from error
        return values

    def fingerprint(self) -> str:
        return quick_digest([self._path])

    def close(self) -> None:
        self._header = None
        self._bytes = np.empty(0, dtype=np.uint8)


def stored_name(name: str, *, post_norms: bool = False) -> str:
    """llama.cpp's name for a canonical tensor name. `post_norms`: the model has norms after attention."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    match = _LAYER_TENSOR.fullmatch(name)
    inside = {**_INSIDE, **_POST_NORMED} if post_norms else _INSIDE
    if match is None or match[2] not in inside:
        raise KeyError(name)
    return f"blk.{match[1]}.{inside[match[2]]}.{match[3]}"


def _unpaired(data: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """Undo llama.cpp's row order. Its Llama kernels rotate neighbouring rows (0,1), (2,3), ...; the canonical
    order pairs row i with row i + head_dim / 2. Rows are whole blocks, so that quantised rows can be
    moved."""
    paired = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:])
    return paired.swapaxes(1, 2).reshape(data.shape)


def _stacked(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Matrices of experts, one below the other, as one matrix."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


def _spec(header: GGUFHeader) -> ModelSpec:
    fields = Fields(header.metadata, str(header.path))
    stated = fields.text("general.architecture")
    architecture = known_architecture(_ARCHITECTURES, stated)
    if fields.get("split.count") not in (None, 0, 1):
        raise UnsupportedModel(
            f"{header.path} is one part of a model split over several files; "
            "join them first with llama-gguf-split --merge"
        )
    _refuse_variants(fields, stated)
    hidden = fields.integer(f"{stated}.embedding_length", 1 << 20)
    heads = fields.integer(f"{stated}.attention.head_count", 4096)
    head_dim = fields.integer(f"{stated}.attention.key_length", 4096, default=max(hidden // heads, 1))
    for key in (f"{stated}.attention.value_length", f"{stated}.rope.dimension_count"):
        if fields.integer(key, 4096, default=head_dim) != head_dim:
            raise UnsupportedModel(
                f"{header.path} says {key} is {fields.get(key)} where its heads have {head_dim} dimensions, "
                f"which this engine does not run; {ELSEWHERE}"
            )
    embedding = header.tensors.get(_OUTSIDE[EMBEDDING])
    if embedding is None:
        raise ModelDamaged(f"{header.path} lacks tensor token_embd.weight; download it again")
    vocab_size = embedding.shape[0]
    context = fields.integer(f"{stated}.context_length", 1 << 30)
    rope = _rope(fields, stated, context)
    if rope.scaling == "yarn":
        context = max(context, round(rope.factor * rope.original_context))
    layers = fields.integer(f"{stated}.block_count", 1024)
    gemma = architecture == "gemma3"
    window, windowed = _windows(fields, layers, context) if gemma else (0, frozenset[int]())
    unrotated = range(_SMOLLM3_UNROTATED_EVERY - 1, layers, _SMOLLM3_UNROTATED_EVERY)
    ends = ("eos", "eot", "eom")
    eos = {each for end in ends for each in fields.tokens(f"tokenizer.ggml.{end}_token_id", vocab_size)}
    bos = fields.tokens("tokenizer.ggml.bos_token_id", vocab_size)
    return ModelSpec(
        architecture=architecture,
        name=header.path.stem,
        vocab_size=vocab_size,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=fields.integer(f"{stated}.attention.head_count_kv", 4096, default=heads),
        head_dim=head_dim,
        intermediate=fields.integer(f"{stated}.feed_forward_length", 1 << 22),
        norm_eps=_rounded(fields.number(f"{stated}.attention.layer_norm_rms_epsilon")),
        rope=rope,
        context_length=context,
        tied="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in header.tensors,
        bos=bos[0] if bos else None,
        eos=frozenset(eos),
        window=window,
        windowed=windowed,
        window_rope=RopeSpec(_GEMMA3_LOCAL_THETA) if windowed else None,
        unrotated=frozenset(unrotated) if architecture == "smollm3" else frozenset(),
        activation="gelu" if gemma else "silu",
        post_norms=gemma,
        embedding_scale=float(hidden**0.5) if gemma else 1.0,
        experts=_experts(fields, stated) if architecture == "qwen3_moe" else None,
    )


def _experts(fields: Fields, stated: str) -> ExpertsSpec:
    return ExpertsSpec(
        count=fields.integer(f"{stated}.expert_count", 1 << 16),
        top=fields.integer(f"{stated}.expert_used_count", 1 << 10),
        width=fields.integer(f"{stated}.expert_feed_forward_length", 1 << 22),
    )


def _windows(fields: Fields, layers: int, context: int) -> tuple[int, frozenset[int]]:
    window = fields.integer("gemma3.attention.sliding_window", 1 << 30, default=context)
    windowed = frozenset(n for n in range(layers) if (n + 1) % _GEMMA3_FULL_EVERY)
    return (window, windowed) if window < context else (0, frozenset())


def _rounded(value: float) -> float:
    """The decimal that a float32 in the file stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _refuse_variants(fields: Fields, stated: str) -> None:
    if stated != "qwen3moe" and fields.get(f"{stated}.expert_count") not in (None, 0):
        raise UnsupportedModel(
            f"{fields.origin} is a mixture of experts, which this engine does not run; {ELSEWHERE}"
        )
    scales = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale")
    windows = () if stated == "gemma3" else ("attention.sliding_window",)
    for key in (*scales, "attn_logit_softcapping", "final_logit_softcapping", *windows):
        if fields.get(f"{stated}.{key}") not in (None, 0, 1.0):
            raise UnsupportedModel(
                f"{fields.origin} sets {stated}.{key}, which this engine does not run; {ELSEWHERE}"
            )


def _rope(fields: Fields, stated: str, context: int) -> RopeSpec:
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
