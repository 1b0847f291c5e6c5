"""The model we train: the Llama architecture in plain torch.

Parameter names, shapes and arithmetic are exactly those of Hugging Face's LlamaForCausalLM with tied
embeddings, so an exported checkpoint loads anywhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader knows
from torch import Tensor, nn

from keystroke.errors import InputError
from keystroke_lab.tokenizer.special import END
from keystroke_lab.training.rotary import rotate_halves


@dataclass(frozen=True, slots=True)
class Shape:
    """The model's dimensions. Wide and shallow: on a CPU each layer costs a fixed time besides its
    weights."""

    vocab: int = 32_768
    hidden: int = 768
    layers: int = 8
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 2304
    context: int = 2048
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} heads cannot share {self.kv_heads} key heads evenly; choose a divisor"
            )
        if any(n % 32 for n in (self.vocab, self.hidden, self.head_dim, self.intermediate)):
            raise InputError(
                "vocabulary, hidden, head and intermediate sizes must be multiples of 32 to quantise well"
            )

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return (
            self.vocab * self.hidden
            + self.layers * (attention + 3 * self.hidden * self.intermediate + 2 * self.hidden)
            + self.hidden
        )

    def huggingface(self) -> dict[str, Any]:
        """config.json of the exported folder."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": END,
            "eos_token_id": END,
            "torch_dtype": "bfloat16",
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Shape:
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise InputError(
                f"this is not a model shape ({error}); give the JSON that training wrote"
            ) from error


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), self.weight.to(x.dtype), self.eps)


def rotary_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of each position and frequency, in float32: [length, head_dim / 2]."""
    exponent = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * shape.rope_theta**-exponent
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        cos, sin = cos[:, None, :], sin[:, None, :]
        q = rotate_halves(self.q_proj(x).view(batch, length, self.shape.heads, -1), cos, sin).transpose(1, 2)
        k = rotate_halves(self.k_proj(x).view(batch, length, self.shape.kv_heads, -1), cos, sin)
        k = k.transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.shape.kv_heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class TransformerLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """What Hugging Face calls `model`: embeddings, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TransformerLayer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.norm_eps)


class CodeModel(nn.Module):
    def __init__(self, shape: Shape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self._start(torch.Generator().manual_seed(seed))

    def _start(self, generator: torch.Generator) -> None:
        """Small random weights; what writes to the residual stream starts at zero, so depth starts
        harmless."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif name.endswith("embed_tokens.weight"):
                nn.init.normal_(parameter, std=0.02, generator=generator)
            else:
                nn.init.normal_(parameter, std=0.5 * parameter.size(1) ** -0.5, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states after the last norm: [batch, length, hidden]."""
        cos, sin = rotary_tables(self.shape, tokens.size(1), tokens.device)
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled(tokens.device.type):  # the residual stream too, not only the products
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, tokens: Tensor) -> Tensor:
        return F.linear(self(tokens), self.model.embed_tokens.weight)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats."""
        return self.weighted_loss(tokens, targets, torch.ones(tokens.shape, device=tokens.device))

    def weighted_loss(self, tokens: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The same with a weight for each target."""
        return self._head(self(tokens), targets, weights)

    def _head(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        logits = F.linear(hidden, self.model.embed_tokens.weight)
        each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        return (each * weights.flatten()).sum() / weights.sum()

    def compile_parts(self, backend: str = "inductor") -> None:
        """Compile one layer for all of them, and the head: seconds, where the whole takes a minute."""
        for layer in self.model.layers:
            layer.compile(dynamic=False, backend=backend)
        self._head = torch.compile(self._head, dynamic=False, backend=backend)  # type: ignore[method-assign]
