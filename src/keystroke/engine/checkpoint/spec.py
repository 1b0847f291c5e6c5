"""The specification of a model (sizes, rotary embedding, tensors) and the interface of checkpoints.

Independent of file formats and engines. Tensors have Hugging Face's names, row order and shapes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from keystroke.engine.base import ModelInfo
from keystroke.errors import ModelDamaged

Architecture = Literal[
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
    "gemma3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "mellum",
    "ministral3",
    "glm4_moe_lite",
]
Activation = Literal["silu", "gelu"]  # gelu: by its tanh approximation
Scaling = Literal["linear", "llama3", "yarn"]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding: its base and, if the context was extended, the scaling rule."""

    theta: float = 10_000.0
    scaling: Scaling | None = None
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn: the context the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    divisors: tuple[float, ...] = ()  # per frequency, if the file contains them instead of the rule
    query_growth: float = 0.0  # queries grow by this times ln(1 + position // original_context)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of the feed-forward network of every layer but the `dense` ones. A router
    scores all experts; each token uses the `top` best, weighted by the softmax of their scores."""

    count: int
    top: int
    width: int  # intermediate size of one expert
    normalised: bool = True  # the weights of the chosen experts add up to one
    dense: frozenset[int] = frozenset()  # the layers with an ordinary feed-forward network
    sigmoid: bool = False  # scores are sigmoids instead of a softmax
    selection_bias: bool = False  # a bias decides which experts are chosen, not how much they weigh
    router_bias: bool = False
    scale: float = 1.0  # multiplies the weights of the chosen experts
    bias: bool = False  # the experts' matrices have biases
    limit: float = 0.0  # above 0: gate and up are clamped, and the gate's sigmoid is steeper (gpt-oss)
    shared: int = 0  # intermediate size of an expert that every token uses
    shared_gate: bool = False  # a sigmoid weighs the shared expert
    fused: bool = False  # gate and up are one tensor, expert after expert

    @property
    def is_plain(self) -> bool:
        """Whether only sizes and normalisation differ from Qwen3-MoE."""
        return self == ExpertsSpec(self.count, self.top, self.width, self.normalised)

    def __post_init__(self) -> None:
        if not 0 < self.top <= self.count:
            raise ModelDamaged(
                f"the model uses {self.top} of {self.count} experts, which cannot be; its configuration is "
                "inconsistent, so download it again"
            )


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated delta net (linear attention) in place of the attention of some layers: a short convolution, then
    a state per value head, [key_size, value_size], that decays and is corrected by each token."""

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int  # tokens of the convolution, including the current one
    tiled: bool = False  # value head v reads key head v % key_heads; otherwise neighbours share one

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Queries, keys and values, which pass the convolution."""
        return 2 * self.keys + self.values

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelDamaged(
                f"the model's {self.value_heads} linear attention heads cannot share {self.key_heads} keys; "
                "its configuration is inconsistent, so download it again"
            )


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention: all heads read one latent vector per token, and one rotated key. A head's
    query is brought to the size of latents before attention, its result to the size of values after it, so
    that to attention there is a single key-value head of `rank` + `rotated` dimensions, the rotated first."""

    query_rank: int  # queries are made through a vector of this size; 0: directly
    rank: int  # of latents
    unrotated: int  # dimensions of a head's query
    rotated: int
    value: int  # dimensions of a head's result
    interleaved: bool = True  # neighbours are rotated together
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama family: RMSNorm, rotary attention with grouped KV heads, a gated feed-forward.
    Where families differ, the default is the behaviour of Llama."""

    architecture: Architecture
    name: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope: RopeSpec
    context_length: int
    tied: bool  # the output head is the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of Q and K, before the rotary embedding
    bos: int | None = None
    eos: frozenset[int] = frozenset()
    window: int = 0  # tokens that attention sees in windowed layers, including the current one
    windowed: frozenset[int] = frozenset()  # the layers with a sliding window
    window_rope: RopeSpec | None = None  # the rotary embedding of windowed layers, if it differs
    unrotated: frozenset[int] = frozenset()  # layers without any rotary embedding
    activation: Activation = "silu"
    post_norms: bool = False  # the outputs of attention and feed-forward are normalised
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0: one over the root of the head size
    experts: ExpertsSpec | None = None  # `intermediate` means nothing where there are some
    rotary: int = 0  # dimensions of a head that are rotated; 0: all
    sinks: bool = False  # every head has a score of its own that takes a part of attention
    gated_attention: bool = False  # the query projection also makes a gate of attention's output
    delta: DeltaSpec | None = None
    latent: LatentSpec | None = None
    predictor: bool = False  # a further layer that predicts the token after the next one (MTP) is read

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelDamaged(
                f"the model's {self.heads} attention heads cannot share {self.kv_heads} key-value heads; "
                "its configuration is inconsistent, so download it again"
            )
        if self.head_dim % 2:
            raise ModelDamaged(
                f"the model's head size {self.head_dim} is odd, which rotary embedding cannot use"
            )
        if self.rope.divisors and len(self.rope.divisors) != self.rotated // 2:
            raise ModelDamaged(
                f"the model carries {len(self.rope.divisors)} rotary factors where its head size "
                f"{self.rotated} needs {self.rotated // 2}; download it again"
            )
        if self.rotated % 2 or self.rotated > self.head_dim:
            raise ModelDamaged(
                f"the model rotates {self.rotated} of {self.head_dim} dimensions, which cannot be; its "
                "configuration is inconsistent, so download it again"
            )

    @property
    def rotated(self) -> int:
        """How many dimensions of a head are rotated."""
        return self.rotary or self.head_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with keys and values; the predictor's is the last."""
        recurrent = self.delta.layers if self.delta is not None else frozenset()
        return tuple(n for n in range(self.layers + self.predictor) if n not in recurrent)

    def info(
        self,
        *,
        weight_bytes: int,
        kv_bytes_per_token: int,
        precision: str,
        context: int | None = None,
        mapped: bool = False,
        host_bytes: int = 0,
    ) -> ModelInfo:
        """The properties of an engine that has loaded the model, to hold at most `context` tokens."""
        return ModelInfo(
            name=self.name,
            architecture=self.architecture,
            context_length=min(context or self.context_length, self.context_length),
            vocab_size=self.vocab_size,
            layers=self.layers,
            parameters=self.parameters,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv_bytes_per_token,
            precision=precision,
            bos=self.bos,
            eos=self.eos,
            mapped=mapped,
            host_bytes=host_bytes,
            experts=self.experts.count if self.experts is not None else 0,
            active_experts=self.experts.top if self.experts is not None else 0,
        )

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer not in self.experts.dense

    @property
    def query_scale(self) -> float:
        """The factor of attention scores."""
        return self.attention_scale or float(self.head_dim**-0.5)

    def unsupported_feature(self) -> str | None:
        """The first feature that a plain Llama does not have; None if there is none. For engines that only
        support Llama's layer."""
        named = (
            ("sliding-window attention", bool(self.windowed)),
            ("layers without rotary embedding", bool(self.unrotated)),
            ("GELU", self.activation != "silu"),
            ("norms after attention", self.post_norms),
            ("a scaled embedding", self.embedding_scale != 1.0),
            ("a scale of its own for attention", self.query_scale != float(self.head_dim**-0.5)),
            ("attention with sinks", self.sinks),
            ("linear attention", self.delta is not None),
            ("latent attention", self.latent is not None),
            ("gated attention", self.gated_attention),
            ("heads that are rotated in part", self.rotated != self.head_dim),
            ("queries that grow with their position", self.rope.query_growth != 0.0),
            ("a mixture of experts", self.experts is not None),
        )
        return next((name for name, there in named if there), None)

    @property
    def parameters(self) -> int:
        """Without the predictor, as authors count."""
        return sum(math.prod(shape) for shape in tensor_shapes(replace(self, predictor=False)).values())


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors, in the order of a forward pass."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden)}
    for layer in range(spec.layers):
        shapes.update(_layer_shapes(spec, layer, f"model.layers.{layer}"))
    shapes[FINAL_NORM] = (spec.hidden,)
    if not spec.tied:
        shapes[HEAD] = (spec.vocab_size, spec.hidden)
    if spec.predictor:
        shapes["mtp.pre_fc_norm_embedding.weight"] = shapes["mtp.pre_fc_norm_hidden.weight"] = (spec.hidden,)
        shapes["mtp.fc.weight"] = (spec.hidden, 2 * spec.hidden)
        shapes.update(_layer_shapes(spec, spec.layers, "mtp.layers.0"))
        shapes["mtp.norm.weight"] = (spec.hidden,)
    return shapes


def _layer_shapes(spec: ModelSpec, layer: int, at: str) -> dict[str, tuple[int, ...]]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{at}.input_layernorm.weight": (spec.hidden,)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    if spec.delta is not None and layer in spec.delta.layers:
        shapes.update(_delta_shapes(spec.delta, f"{at}.linear_attn", spec.hidden))
    elif spec.latent is not None:
        shapes.update(_latent_shapes(spec.latent, f"{at}.self_attn", spec.hidden, spec.heads))
    else:
        gates = 2 if spec.gated_attention else 1
        linear(f"{at}.self_attn.q_proj", gates * queries, spec.hidden, spec.qkv_bias)
        linear(f"{at}.self_attn.k_proj", keys, spec.hidden, spec.qkv_bias)
        linear(f"{at}.self_attn.v_proj", keys, spec.hidden, spec.qkv_bias)
        if spec.qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (spec.head_dim,)
        if spec.sinks:
            shapes[f"{at}.self_attn.sinks"] = (spec.heads,)
        linear(f"{at}.self_attn.o_proj", spec.hidden, queries, spec.o_bias)
    shapes[f"{at}.post_attention_layernorm.weight"] = (spec.hidden,)
    if spec.post_norms:
        shapes[f"{at}.pre_feedforward_layernorm.weight"] = (spec.hidden,)
        shapes[f"{at}.post_feedforward_layernorm.weight"] = (spec.hidden,)
    if spec.experts is not None and layer not in spec.experts.dense:
        shapes.update(_expert_shapes(spec.experts, f"{at}.mlp", spec.hidden))
        return shapes
    linear(f"{at}.mlp.gate_proj", spec.intermediate, spec.hidden, spec.mlp_bias)
    linear(f"{at}.mlp.up_proj", spec.intermediate, spec.hidden, spec.mlp_bias)
    linear(f"{at}.mlp.down_proj", spec.hidden, spec.intermediate, spec.mlp_bias)
    return shapes


def _expert_shapes(experts: ExpertsSpec, at: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """A router, and the experts' matrices one below the other."""
    count, width = experts.count, experts.width
    shapes: dict[str, tuple[int, ...]] = {f"{at}.gate.weight": (count, hidden)}
    if experts.router_bias:
        shapes[f"{at}.gate.bias"] = (count,)
    if experts.selection_bias:
        shapes[f"{at}.gate.e_score_correction_bias"] = (count,)
    rows = {"gate_up": 2 * width} if experts.fused else {"gate": width, "up": width}
    for name, each, columns in (*((n, r, hidden) for n, r in rows.items()), ("down", hidden, width)):
        shapes[f"{at}.experts.{name}_proj.weight"] = (count * each, columns)
        if experts.bias:
            shapes[f"{at}.experts.{name}_proj.bias"] = (count * each,)
    if experts.shared:
        shapes[f"{at}.shared_expert.gate_proj.weight"] = (experts.shared, hidden)
        shapes[f"{at}.shared_expert.up_proj.weight"] = (experts.shared, hidden)
        shapes[f"{at}.shared_expert.down_proj.weight"] = (hidden, experts.shared)
        if experts.shared_gate:
            shapes[f"{at}.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _latent_shapes(latent: LatentSpec, at: str, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
    """The matrices of k_b_proj and v_b_proj lie head below head."""
    queries, rank = heads * (latent.unrotated + latent.rotated), latent.rank
    shapes: dict[str, tuple[int, ...]] = {f"{at}.q_proj.weight": (queries, hidden)}
    if latent.query_rank:
        shapes = {
            f"{at}.q_a_proj.weight": (latent.query_rank, hidden),
            f"{at}.q_a_layernorm.weight": (latent.query_rank,),
            f"{at}.q_b_proj.weight": (queries, latent.query_rank),
        }
    return {
        **shapes,
        f"{at}.kv_a_proj_with_mqa.weight": (rank + latent.rotated, hidden),
        f"{at}.kv_a_layernorm.weight": (rank,),
        f"{at}.k_b_proj.weight": (heads * rank, latent.unrotated),
        f"{at}.v_b_proj.weight": (heads * latent.value, rank),
        f"{at}.o_proj.weight": (hidden, heads * latent.value),
    }


def _delta_shapes(delta: DeltaSpec, at: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.in_proj_qkv.weight": (delta.channels, hidden),
        f"{at}.in_proj_z.weight": (delta.values, hidden),
        f"{at}.in_proj_b.weight": (delta.value_heads, hidden),
        f"{at}.in_proj_a.weight": (delta.value_heads, hidden),
        f"{at}.conv1d.weight": (delta.channels, delta.kernel),
        f"{at}.dt_bias": (delta.value_heads,),
        f"{at}.decay": (delta.value_heads,),
        f"{at}.norm.weight": (delta.value_size,),
        f"{at}.out_proj.weight": (hidden, delta.values),
    }


class Checkpoint(ABC):
    """A model's memory-mapped weights; a tensor uses memory only while the caller holds it."""

    spec: ModelSpec

    def names(self) -> tuple[str, ...]:
        """The names of all tensors. A tied head is not listed."""
        return tuple(tensor_shapes(self.spec))

    @abstractmethod
    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """One tensor as float32, rows in Hugging Face's order. The caller must not write to it: a float32
        file is shared with the page cache."""

    @abstractmethod
    def raw(self, name: str) -> tuple[npt.NDArray[np.generic], str]:
        """One tensor as stored, and its type: "F32", "F16", "BF16" (as uint16), or a GGUF block type such as
        "Q4_K" (rows of bytes). Rows are in Hugging Face's order."""

    def storage(self, name: str) -> str:
        """The type of one tensor, as `raw` names it."""
        return self.raw(name)[1]

    def read_predictor(self) -> None:
        """Read the predictor too, if the files hold one; see `spec.predictor`. Raises ModelDamaged."""
        if self._has_predictor():
            self.spec = replace(self.spec, predictor=True)
            check_shapes(self.spec, self._shape)

    def _has_predictor(self) -> bool:
        return False

    def _shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor in the files; None if it is missing."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A content hash over sizes, headers and samples of each file, which reads a few megabytes. Equal
        files have equal fingerprints, wherever they are."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. Arrays that were returned stay valid. Idempotent."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_shapes(spec: ModelSpec, found: Callable[[str], tuple[int, ...] | None]) -> None:
    """Raise ModelDamaged unless every tensor of `spec` exists with its shape. `found` returns None for a
    missing tensor."""
    missing: list[str] = []
    for name, shape in tensor_shapes(spec).items():
        actual = found(name)
        if actual is None:
            missing.append(name)
        elif actual != shape:
            raise ModelDamaged(
                f"tensor {name} of {spec.name} has shape {_shape(actual)} where its configuration asks for "
                f"{_shape(shape)}; the files do not belong together, so download the model again"
            )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelDamaged(f"{spec.name} lacks tensor {missing[0]}{more}; download the model again")


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"
