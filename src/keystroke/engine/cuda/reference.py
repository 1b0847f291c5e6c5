"""The reference forward pass that kernels and caches are tested against: plain torch, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from keystroke.engine.checkpoint.rope import rope_tables
from keystroke.engine.checkpoint.spec import EMBEDDING, FINAL_NORM, HEAD, DeltaSpec, ExpertsSpec, ModelSpec

TensorLookup = Callable[[str], Tensor]
# (layer, keys, values) -> the keys and values that are attended to
KvTransform = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def forward(
    spec: ModelSpec,
    tensor: TensorLookup,
    tokens: Sequence[int],
    dtype: torch.dtype = torch.float32,
    kv_transform: KvTransform | None = None,
) -> Tensor:
    """Logits [len(tokens), vocab] after each token. `tensor` gives weights by their Hugging Face names;
    `kv_transform` emulates a lossy KV cache."""
    embedding = tensor(EMBEDDING)
    x = embedding[torch.tensor(tokens, device=embedding.device)].to(dtype)
    angles = window_angles = _angles(spec, x)
    if spec.window_rope is not None:
        window_angles = _angles(replace(spec, rope=spec.window_rope), x)
    for layer in range(spec.layers):
        at = f"model.layers.{layer}"
        h = _norm(x, tensor(f"{at}.input_layernorm.weight"), spec)
        turns = window_angles if layer in spec.windowed else angles
        if spec.delta is not None and layer in spec.delta.layers:
            x = x + _delta_net(spec, spec.delta, tensor, f"{at}.linear_attn", h)
        else:
            x = x + _attention(spec, tensor, layer, h, turns, kv_transform)
        h = _norm(x, tensor(f"{at}.post_attention_layernorm.weight"), spec)
        if spec.experts is not None:
            x = x + _experts(spec.experts, tensor, f"{at}.mlp", h)
            continue
        gate = _linear(tensor, f"{at}.mlp.gate_proj", h, spec.mlp_bias)
        up = _linear(tensor, f"{at}.mlp.up_proj", h, spec.mlp_bias)
        x = x + _linear(tensor, f"{at}.mlp.down_proj", F.silu(gate) * up, spec.mlp_bias)
    x = _norm(x, tensor(FINAL_NORM), spec)
    return F.linear(x, (embedding if spec.tied else tensor(HEAD)).to(dtype))


def _angles(spec: ModelSpec, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(t).to(x.device, x.dtype) for t in rope_tables(spec, len(x)))


def _attention(
    spec: ModelSpec,
    tensor: TensorLookup,
    layer: int,
    x: Tensor,
    angles: tuple[Tensor, ...],
    kv_transform: KvTransform | None,
) -> Tensor:
    count, at = len(x), f"model.layers.{layer}"
    q = _linear(tensor, f"{at}.self_attn.q_proj", x, spec.qkv_bias).view(count, spec.heads, -1)
    q, gate = torch.split(q, [spec.head_dim, q.shape[-1] - spec.head_dim], -1)
    k = _linear(tensor, f"{at}.self_attn.k_proj", x, spec.qkv_bias).view(count, spec.kv_heads, spec.head_dim)
    v = _linear(tensor, f"{at}.self_attn.v_proj", x, spec.qkv_bias).view(count, spec.kv_heads, spec.head_dim)
    if spec.qk_norm:
        q = _norm(q, tensor(f"{at}.self_attn.q_norm.weight"), spec)
        k = _norm(k, tensor(f"{at}.self_attn.k_norm.weight"), spec)
    q, k = rotate(q, *angles), rotate(k, *angles)
    if kv_transform is not None:
        k, v = kv_transform(layer, k, v)
    k, v = (t.repeat_interleave(spec.heads // spec.kv_heads, 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * spec.head_dim**-0.5
    visible = torch.ones(count, count, dtype=torch.bool, device=x.device)
    hidden = visible.triu(1)
    if layer in spec.windowed:
        hidden |= visible.tril(-spec.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks:
        sinks = tensor(f"{at}.self_attn.sinks").to(x.dtype)[:, None, None].expand(-1, count, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :count]
    mixed = torch.einsum("hts,shd->thd", weights, v).reshape(count, -1)
    if spec.gated_attention:
        mixed = mixed * gate.reshape(count, -1).sigmoid()
    return _linear(tensor, f"{at}.self_attn.o_proj", mixed, spec.o_bias)


def _delta_net(spec: ModelSpec, delta: DeltaSpec, tensor: TensorLookup, at: str, x: Tensor) -> Tensor:
    """A gated delta net, row by row from an empty state."""
    count, ratio = len(x), delta.value_heads // delta.key_heads
    inputs = _linear(tensor, f"{at}.in_proj_qkv", x, False)
    z = _linear(tensor, f"{at}.in_proj_z", x, False).view(count, delta.value_heads, -1)
    beta = _linear(tensor, f"{at}.in_proj_b", x, False).sigmoid()
    steps = _linear(tensor, f"{at}.in_proj_a", x, False) + tensor(f"{at}.dt_bias").to(x.dtype)
    keep = (tensor(f"{at}.decay").to(x.dtype) * F.softplus(steps)).exp()
    seen = F.pad(inputs, (0, 0, delta.kernel - 1, 0)).unfold(0, delta.kernel, 1)
    mixed = F.silu((seen * tensor(f"{at}.conv1d.weight").to(x.dtype)).sum(-1))
    q, k, v = torch.split(mixed, [delta.keys, delta.keys, delta.values], -1)
    q, k = (unit_heads(each.view(count, delta.key_heads, -1)) for each in (q, k))
    q, k = (each.repeat(1, ratio, 1) if delta.tiled else each.repeat_interleave(ratio, 1) for each in (q, k))
    v = v.view(count, delta.value_heads, -1)
    state = x.new_zeros(delta.value_heads, delta.key_size, delta.value_size)
    rows = []
    for row in range(count):
        state = state * keep[row, :, None, None]
        wrong = v[row] - torch.einsum("hkv,hk->hv", state, k[row])
        state = state + torch.einsum("hk,hv->hkv", k[row], wrong * beta[row, :, None])
        rows.append(torch.einsum("hkv,hk->hv", state, q[row]) * delta.key_size**-0.5)
    out = _norm(torch.stack(rows), tensor(f"{at}.norm.weight"), spec) * F.silu(z)
    return _linear(tensor, f"{at}.out_proj", out.reshape(count, -1), False)


def unit_heads(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _experts(experts: ExpertsSpec, tensor: TensorLookup, at: str, x: Tensor) -> Tensor:
    names = [f"{at}.experts.{name}_proj" for name in ("gate", "up", "down")]
    chosen, weights = choose_experts(experts, _linear(tensor, f"{at}.gate", x, experts.router_bias))

    def output(expert: int, row: Tensor) -> Tensor:
        gate, up, down = (_Expert(tensor, name, expert, experts) for name in names)
        return down(gate_activation(experts, gate(row), up(row)))

    outputs = [
        shares @ torch.stack([output(expert, row) for expert in used])
        for row, used, shares in zip(x, chosen.tolist(), weights, strict=True)
    ]
    found = torch.stack(outputs)
    if experts.shared:
        alone = f"{at}.shared_expert"
        gate, up = (_linear(tensor, f"{alone}.{each}_proj", x, False) for each in ("gate", "up"))
        share = _linear(tensor, f"{at}.shared_expert_gate", x, False).sigmoid()
        found = found + share * _linear(tensor, f"{alone}.down_proj", F.silu(gate) * up, False)
    return found


class _Expert:
    """One expert's part of a matrix that stacks those of all."""

    def __init__(self, tensor: TensorLookup, name: str, expert: int, experts: ExpertsSpec) -> None:
        self._weight = tensor(f"{name}.weight").chunk(experts.count)[expert]
        self._bias = tensor(f"{name}.bias").chunk(experts.count)[expert] if experts.bias else None

    def __call__(self, row: Tensor) -> Tensor:
        product = self._weight.to(row.dtype) @ row
        return product if self._bias is None else product + self._bias.to(row.dtype)


def gate_activation(experts: ExpertsSpec, gate: Tensor, up: Tensor) -> Tensor:
    if not experts.limit:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def choose_experts(experts: ExpertsSpec, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The experts of each row [rows, top] and their weights, from the router's scores [rows, count]."""
    best, chosen = scores.topk(experts.top, -1)
    if experts.normalised:
        return chosen, best.softmax(-1)
    return chosen, scores.softmax(-1).gather(-1, chosen)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of the first dimensions of x [rows, heads, head_dim] by tables [rows, rotated / 2]."""
    turned = 2 * cosines.shape[-1]
    x, still = torch.split(x, [turned, x.shape[-1] - turned], -1)
    first, second = x.chunk(2, -1)
    c, s = cosines[:, None], sines[:, None]
    return torch.cat((first * c - second * s, second * c + first * s, still), -1)


def _norm(x: Tensor, weight: Tensor, spec: ModelSpec) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.norm_eps)
    return wide.to(x.dtype) * weight.to(x.dtype)


def _linear(tensor: TensorLookup, name: str, x: Tensor, bias: bool) -> Tensor:
    offset = tensor(f"{name}.bias").to(x.dtype) if bias else None
    return F.linear(x, tensor(f"{name}.weight").to(x.dtype), offset)
