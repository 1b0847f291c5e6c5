"""The target model in plain torch, for many sequences at a time.

Weights come from a checkpoint under Hugging Face's names and never change. The residual stream is float32, as
in the engines; products are in the weights' own type.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from keystroke.engine.checkpoint.rope import rope_tables
from keystroke.engine.checkpoint.spec import EMBEDDING, FINAL_NORM, HEAD, Checkpoint, ModelSpec, tensor_shapes
from keystroke_lab.training.rotary import rotate_halves

# How a layer attends: its number, and rotated queries, keys and values [rows, heads, length, head_dim].
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Angles = tuple[Tensor, Tensor]  # cosines and sines of each position


@dataclass(frozen=True)
class LayerWeights:
    """One layer's weights, those that are multiplied together joined."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norms: tuple[Tensor, Tensor] | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def load(cls, spec: ModelSpec, number: int, named: Callable[[str], Tensor]) -> LayerWeights:
        at = f"model.layers.{number}"

        def joined(names: Sequence[str], kind: str) -> Tensor:
            return torch.cat([named(f"{at}.{name}.{kind}") for name in names])

        def norm(name: str) -> Tensor:
            return named(f"{at}.{name}.weight").float()

        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        mlp = ("mlp.gate_proj", "mlp.up_proj")
        return cls(
            attention_norm=norm("input_layernorm"),
            qkv=joined(attention, "weight"),
            qkv_bias=joined(attention, "bias") if spec.qkv_bias else None,
            qk_norms=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if spec.qk_norm else None,
            output=named(f"{at}.self_attn.o_proj.weight"),
            output_bias=named(f"{at}.self_attn.o_proj.bias") if spec.o_bias else None,
            mlp_norm=norm("post_attention_layernorm"),
            gate_up=joined(mlp, "weight"),
            gate_up_bias=joined(mlp, "bias") if spec.mlp_bias else None,
            down=named(f"{at}.mlp.down_proj.weight"),
            down_bias=named(f"{at}.mlp.down_proj.bias") if spec.mlp_bias else None,
        )

    def forward(self, spec: ModelSpec, number: int, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """The residual stream [rows, length, hidden], float32, behind this layer."""
        rows, length, _ = x.shape
        heads, kv_heads, size = spec.heads, spec.kv_heads, spec.head_dim
        dtype = self.qkv.dtype

        def normed(t: Tensor, weight: Tensor) -> Tensor:
            return F.rms_norm(t.float(), (t.size(-1),), weight, spec.norm_eps).to(dtype)

        h = normed(x, self.attention_norm)
        qkv = F.linear(h, self.qkv, self.qkv_bias).view(rows, length, -1, size).transpose(1, 2)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
        if self.qk_norms is not None:
            q, k = normed(q, self.qk_norms[0]), normed(k, self.qk_norms[1])
        q, k = rotate_halves(q, *angles), rotate_halves(k, *angles)
        mixed = attend(number, q, k, v).transpose(1, 2).reshape(rows, length, -1)
        x = x + F.linear(mixed, self.output, self.output_bias)
        gate, up = F.linear(normed(x, self.mlp_norm), self.gate_up, self.gate_up_bias).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down, self.down_bias)


class TargetModel:
    def __init__(self, spec: ModelSpec, named: Callable[[str], Tensor], length: int) -> None:
        """`named` gives tensors, already of the type and on the device to work with; `length` is the longest
        sequence that will be asked for."""
        self.spec = spec
        self.embedding = named(EMBEDDING)
        self.norm = named(FINAL_NORM).float()
        self.head = self.embedding if spec.tied else named(HEAD)
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        cosines, sines = rope_tables(spec, length)
        self.cosines = torch.from_numpy(cosines).to(self.device)
        self.sines = torch.from_numpy(sines).to(self.device)

        self.layers = [LayerWeights.load(spec, number, named) for number in range(spec.layers)]

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, length: int
    ) -> TargetModel:
        """Read every tensor of `checkpoint`, several at a time: widening a quantised file is slow work."""

        def read(name: str) -> Tensor:
            return torch.tensor(checkpoint.tensor(name), dtype=dtype).to(device)

        names = list(tensor_shapes(checkpoint.spec))
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            held = dict(zip(names, pool.map(read, names), strict=True))
        return cls(checkpoint.spec, lambda name: held.pop(name) if name != EMBEDDING else held[name], length)

    def run(
        self, tokens: Tensor, positions: Tensor, attend: Attend, after: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The normed last states of `tokens` [rows, length] at `positions` (the same shape), and the residual
        stream behind each number of layers that `after` names."""
        x = self.embedding[tokens].float()
        angles = self.cosines[positions][:, None], self.sines[positions][:, None]
        features: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x = layer.forward(self.spec, number, x, angles, attend)
            if number + 1 in after:
                features.append(x)
        last = F.rms_norm(x, (x.size(-1),), self.norm, self.spec.norm_eps).to(self.dtype)
        return last, features

    @torch.no_grad()
    def run_sequences(self, tokens: Tensor, after: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Last states [rows, length, hidden] and features [rows, length, len(after), hidden] of whole
        sequences, each token seeing those before it."""
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        last, features = self.run(tokens, positions, causal, after)
        return last, torch.stack([f.to(self.dtype) for f in features], 2)

    def logits(self, last: Tensor) -> Tensor:
        """Float32 [..., vocabulary]: two good tokens are often nearer to each other than 16 bits can tell."""
        if not last.is_cuda or last.dtype == torch.float32:
            return F.linear(last.float(), self.head.float())
        flat = torch.mm(last.reshape(-1, last.size(-1)), self.head.t(), out_dtype=torch.float32)
        return flat.view(*last.shape[:-1], -1)


def causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class KvSlots:
    """Keys and values of `slots` sequences of up to `length` tokens, in place for the whole run."""

    def __init__(self, target: TargetModel, slots: int, length: int) -> None:
        spec = target.spec
        shape = (spec.layers, slots, spec.kv_heads, length, spec.head_dim)
        self.keys = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.values = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self.slots, self.length = slots, length


class BatchDecoder:
    """One token more for every slot at once. On a GPU a step is a recorded graph for each reach of
    attention."""

    REACH = 128  # keys: attention reads this many more at a time

    def __init__(self, target: TargetModel, slots: int, length: int) -> None:
        self.target = target
        self.cache = KvSlots(target, slots, -(-length // self.REACH) * self.REACH)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=target.device)
        self.positions = torch.zeros(slots, dtype=torch.int64, device=target.device)
        self._rows = torch.arange(slots, device=target.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @torch.no_grad()
    def fill(self, slots: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Read new sequences (padded to one length) into `slots`; the logits after each one's last token."""
        cache = self.cache
        length = tokens.size(1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[layer][slots, :, :length] = k
            cache.values[layer][slots, :, :length] = v
            return causal(layer, q, k, v)

        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        last, _ = self.target.run(tokens, positions, attend)
        return self.target.logits(last[torch.arange(len(tokens), device=tokens.device), lengths - 1])

    @torch.no_grad()
    def step(self, longest: int) -> Tensor:
        """The logits after `self.tokens` at `self.positions`, none of which is `longest` or beyond."""
        reach = min(-(-longest // self.REACH) * self.REACH, self.cache.length)
        if self.target.device.type != "cuda":
            return self._step(reach)
        if reach not in self._graphs:
            self._graphs[reach] = self._recorded(reach)
        graph, logits = self._graphs[reach]
        graph.replay()
        return logits

    def _recorded(self, reach: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(reach)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next((known.pool() for known, _ in self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            logits = self._step(reach)
        return graph, logits

    def _step(self, reach: int) -> Tensor:
        spec, cache, at = self.target.spec, self.cache, self.positions
        group = spec.heads // spec.kv_heads
        seen = torch.arange(reach, device=at.device) <= at[:, None]
        mask = torch.zeros(seen.shape, dtype=self.target.dtype, device=at.device).masked_fill_(
            ~seen, -torch.inf
        )
        mask = mask[:, None, None].expand(-1, spec.kv_heads, group, -1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            keys[self._rows, :, at] = k[:, :, 0]
            values[self._rows, :, at] = v[:, :, 0]
            # The heads that share a key are rows of one product: nothing is read twice.
            grouped = q.reshape(-1, spec.kv_heads, group, spec.head_dim)
            with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                mixed = F.scaled_dot_product_attention(
                    grouped, keys[:, :, :reach], values[:, :, :reach], attn_mask=mask
                )
            return mixed.reshape(-1, spec.heads, 1, spec.head_dim)

        last, _ = self.target.run(self.tokens[:, None], at[:, None], attend)
        return self.target.logits(last[:, 0])
