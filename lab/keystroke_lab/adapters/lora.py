"""The adapter: two thin matrices beside each of a layer's four products, and the base run with them.

The base's weights are frozen in their own type; the adapter's are float32 and are rounded only where they are
multiplied. Batches are laid out flat and padded to one size, so everything but attention sees one shape. A
new adapter changes nothing: its second matrices are zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from keystroke.engine.adapter import PRODUCTS, AdapterFile, AdapterShape, product_sizes
from keystroke.errors import InputError
from keystroke_lab.draft_heads.target import LayerWeights, TargetModel, causal
from keystroke_lab.training.rotary import rotate_halves

_ROWS = 2048  # of logits at a time


class Adapter(nn.Module):
    """`down` [rank, in] and `up` [out, rank] of each product of each layer; what is added to the product of a
    weight is scale * up(down(x))."""

    def __init__(
        self, shape: AdapterShape, *, seed: int = 0, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        rng = torch.Generator().manual_seed(seed)
        self.down, self.up = nn.ParameterList(), nn.ParameterList()
        for _ in range(shape.layers):
            for rows, columns in product_sizes(shape):
                drawn = torch.randn(shape.rank, columns, generator=rng) / math.sqrt(columns)
                self.down.append(nn.Parameter(drawn.to(device)))
                self.up.append(nn.Parameter(torch.zeros(rows, shape.rank, device=device)))

    def pairs_of(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """The pairs of one layer, in the order of `PRODUCTS`."""
        first = layer * len(PRODUCTS)
        return [(self.down[first + i], self.up[first + i]) for i in range(len(PRODUCTS))]

    @torch.no_grad()
    def continue_from(self, held: AdapterFile) -> None:
        """Go on from a trained one, which is at its full strength again if it was weakened. Raises InputError
        where it has another shape."""
        if held.shape != self.shape:
            raise InputError(
                f"the adapter to begin with has rank {held.shape.rank} and {held.shape.layers} layers, not "
                f"{self.shape.rank} and {self.shape.layers}; train with its rank, on its base"
            )
        scale = self.shape.scale * held.strength
        for layer in range(self.shape.layers):
            for product, (down, up) in zip(PRODUCTS, self.pairs_of(layer), strict=True):
                held_down, held_up = held.pairs[layer, product]
                down.copy_(torch.from_numpy(held_down))
                up.copy_(torch.from_numpy(held_up / scale))

    def deltas(self) -> Iterator[tuple[int, str, Tensor]]:
        """What each weight would have to be changed by."""
        for layer in range(self.shape.layers):
            for name, (down, up) in zip(PRODUCTS, self.pairs_of(layer), strict=True):
                yield layer, name, self.shape.scale * (up @ down)


def _added(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scale: float) -> Tensor:
    thin = F.linear(x, down.to(x.dtype))
    return F.linear(x, weight, bias) + F.linear(thin * scale, up.to(x.dtype))


def _normed(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return F.rms_norm(x, (x.size(-1),), weight, eps).to(dtype)


def _before(
    x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor,
    cosines: Tensor, sines: Tensor, eps: float, scale: float, heads: int, kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries, keys and values [tokens, heads, size], rotated."""
    size = weight.size(0) // (heads + 2 * kv_heads)
    qkv = _added(_normed(x, norm, eps, weight.dtype), weight, bias, down, up, scale).view(len(x), -1, size)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 1)
    return rotate_halves(q, cosines, sines), rotate_halves(k, cosines, sines), v.contiguous()


def _after(
    x: Tensor, mixed: Tensor, out: Tensor, out_down: Tensor, out_up: Tensor, norm: Tensor,
    gate_up: Tensor, wide_down: Tensor, wide_up: Tensor, back: Tensor, back_down: Tensor, back_up: Tensor,
    eps: float, scale: float,
) -> Tensor:  # fmt: skip
    x = x + _added(mixed, out, None, out_down, out_up, scale)
    h = _normed(x, norm, eps, out.dtype)
    gate, up = _added(h, gate_up, None, wide_down, wide_up, scale).chunk(2, -1)
    return x + _added(F.silu(gate) * up, back, None, back_down, back_up, scale)


class AdaptedModel:
    """A base with an adapter, for training. `compiled`: fuse what stands between the products; takes some
    seconds once."""

    def __init__(self, target: TargetModel, adapter: Adapter, *, compiled: bool = False) -> None:
        self.target, self.adapter = target, adapter
        self._before: Callable[..., Any] = _before
        self._after: Callable[..., Any] = _after
        if compiled:
            self._before, self._after = torch.compile(_before), torch.compile(_after)

    def last_states(self, tokens: Tensor, rows: int, length: int) -> Tensor:
        """The normed last states of flat `tokens`, of which the first rows * length are that rectangle and
        the rest is filling."""
        target, used = self.target, rows * length
        spec = target.spec
        positions = torch.arange(len(tokens), device=tokens.device) % length
        cosines, sines = target.cosines[positions][:, None], target.sines[positions][:, None]
        x = target.embedding[tokens].float()
        for number, layer in enumerate(target.layers):
            x = self._layer(layer, number, x, cosines, sines, (rows, length, used))
        return _normed(x, target.norm, spec.norm_eps, target.dtype)

    def _layer(
        self,
        layer: LayerWeights,
        number: int,
        x: Tensor,
        cosines: Tensor,
        sines: Tensor,
        box: tuple[int, int, int],
    ) -> Tensor:
        spec, scale = self.target.spec, self.adapter.shape.scale
        rows, length, used = box
        qkv, out, wide, back = self.adapter.pairs_of(number)
        q, k, v = self._before(
            x, layer.attention_norm, layer.qkv, layer.qkv_bias, *qkv, cosines, sines,
            spec.norm_eps, scale, spec.heads, spec.kv_heads,
        )  # fmt: skip
        q, k, v = (t[:used].view(rows, length, -1, spec.head_dim).transpose(1, 2) for t in (q, k, v))
        mixed = causal(number, q, k, v).transpose(1, 2).reshape(used, -1)
        mixed = F.pad(mixed, (0, 0, 0, len(x) - used))
        result: Tensor = self._after(
            x, mixed, layer.output, *out, layer.mlp_norm, layer.gate_up, *wide, layer.down, *back,
            spec.norm_eps, scale,
        )  # fmt: skip
        return result

    def loss(self, tokens: Tensor, weights: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """The sum over `weights` (of guessing what follows each token) times nats, and which of the weighted
        guesses are right."""
        last = self.last_states(tokens, rows, length)
        chosen = weights.nonzero()[:, 0]
        wanted = tokens[chosen + 1]
        total = torch.zeros((), device=tokens.device)
        right = []
        for first in range(0, len(chosen), _ROWS):
            some = slice(first, first + _ROWS)
            states = last[chosen[some]]
            nats, hit = self._nats(states, wanted[some])
            total = total + (nats * weights[chosen[some]]).sum()
            right.append(hit)
        return total, torch.cat(right)

    def drift(self, tokens: Tensor, weights: Tensor, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """The sum over `weights` times the divergence, in nats, of what the base itself guesses after each
        token from what it guesses with the adapter; and where both guess the same first. Costs one more
        forward pass, without gradients, than `loss`."""
        last, used = self.last_states(tokens, rows, length), rows * length
        box = tokens[:used].view(rows, length)
        with torch.no_grad():
            plain, _ = self.target.run(box, torch.arange(length, device=box.device).expand_as(box), causal)
            plain = plain.flatten(0, 1)
        chosen = weights.nonzero()[:, 0]
        total = torch.zeros((), device=tokens.device)
        same = []
        for first in range(0, len(chosen), _ROWS):
            at = chosen[first : first + _ROWS]
            with torch.no_grad():
                wanted = torch.log_softmax(F.linear(plain[at], self.target.head).float(), -1)
            found = torch.log_softmax(F.linear(last[at], self.target.head).float(), -1)
            nats = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
            total = total + (nats * weights[at]).sum()
            same.append(found.argmax(-1) == wanted.argmax(-1))
        return total, torch.cat(same)

    def _nats(self, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(states, self.target.head).float()
        return F.cross_entropy(logits, wanted, reduction="none"), logits.argmax(-1) == wanted


@torch.no_grad()
def merge(target: TargetModel, adapter: Adapter, sign: float = 1.0) -> None:
    """Put the adapter into the base's weights, in place."""
    for layer, name, delta in adapter.deltas():
        _add(target, layer, name, sign * delta)


@contextmanager
def with_strength(target: TargetModel, adapter: AdapterFile | None, strength: float) -> Iterator[None]:
    """The base with `strength` times an adapter in its weights, and afterwards exactly as it was. Less than 1
    forgets less of the base and knows less of what was learned."""
    if adapter is None or not strength:
        yield
        return
    held = {(layer, name): getattr(target.layers[layer], name).clone() for layer, name in adapter.pairs}
    with torch.no_grad():
        for layer, name in adapter.pairs:
            _add(target, layer, name, torch.from_numpy(strength * adapter.delta(layer, name)))
    try:
        yield
    finally:
        for (layer, name), weight in held.items():
            getattr(target.layers[layer], name).copy_(weight)


def _add(target: TargetModel, layer: int, name: str, delta: Tensor) -> None:
    weight: Tensor = getattr(target.layers[layer], name)
    weight.copy_((weight.float() + delta.to(weight.device)).to(weight.dtype))
