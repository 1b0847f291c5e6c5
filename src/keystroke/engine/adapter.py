"""Reads and writes adapter files: low-rank corrections of a model's linear layers.

An adapter is a safetensors file whose metadata name its base model, its tasks and its rank. `up` includes the
scale, so that the correction of a weight is up @ down.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.spec import Checkpoint, ModelSpec
from keystroke.errors import InputError, ModelDamaged
from keystroke.replacing import replace_file

PRODUCTS = ("qkv", "output", "gate_up", "down")  # of a layer; q, k, v and gate, up are joined
_LARGEST_HEADER = 4 << 20
# The product of each weight; the rows of a product are in this order.
_PARTS = {
    "self_attn.q_proj": "qkv", "self_attn.k_proj": "qkv", "self_attn.v_proj": "qkv",
    "self_attn.o_proj": "output", "mlp.gate_proj": "gate_up", "mlp.up_proj": "gate_up",
    "mlp.down_proj": "down",
}  # fmt: skip
Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdapterShape:
    layers: int
    hidden: int
    queries: int  # rows of the joined query, key and value weight
    attended: int  # columns of the output weight
    intermediate: int
    rank: int
    scale: float = 1.0

    @classmethod
    def of(cls, spec: ModelSpec, rank: int, scale: float = 2.0) -> AdapterShape:
        attended = spec.heads * spec.head_dim
        queries = attended + 2 * spec.kv_heads * spec.head_dim
        return cls(spec.layers, spec.hidden, queries, attended, spec.intermediate, rank, scale)


def product_sizes(shape: AdapterShape) -> tuple[tuple[int, int], ...]:
    """Rows and columns of each product's weight, in the order of `PRODUCTS`."""
    return (
        (shape.queries, shape.hidden),
        (shape.hidden, shape.attended),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    )


@dataclass(frozen=True)
class AdapterFile:
    """`pairs`: (down [rank, in], up [out, rank]) by layer and product. `facts`: the metadata, such as `base`,
    `next_edit` and `fim_order`."""

    shape: AdapterShape
    pairs: Mapping[tuple[int, str], tuple[Array, Array]]
    facts: Mapping[str, str]
    digest: str = ""

    @property
    def strength(self) -> float:
        """The factor by which it was scaled after training. Raises ModelDamaged for an invalid value."""
        stated = self.facts.get("strength", "1")
        try:
            strength = float(stated)
        except ValueError:
            strength = 0.0
        if not (math.isfinite(strength) and strength > 0):
            raise ModelDamaged(f"the adapter says that its strength is {stated!r}; get it again")
        return strength

    def delta(self, layer: int, product: str) -> Array:
        """The correction of the product's weight."""
        down, up = self.pairs[layer, product]
        return up @ down

    def check(self, spec: ModelSpec) -> None:
        """Raises InputError if the adapter was made for a model of another shape."""
        wanted = AdapterShape.of(spec, self.shape.rank, self.shape.scale)
        if wanted != self.shape:
            raise InputError(
                f"the adapter is made for {self.facts.get('base', 'another model')}, which {spec.name} is "
                "not; give it the model it belongs to"
            )


def write_adapter(
    path: Path,
    shape: AdapterShape,
    pairs: Mapping[tuple[int, str], tuple[Array, Array]],
    facts: Mapping[str, str],
) -> int:
    """Write the file in float16 with the scale included in `up`. Returns its size in bytes."""
    tensors: dict[str, npt.NDArray[np.float16]] = {}
    for layer in range(shape.layers):
        for product in PRODUCTS:
            down, up = pairs[layer, product]
            tensors[f"layers.{layer}.{product}.down"] = down.astype(np.float16)
            tensors[f"layers.{layer}.{product}.up"] = (up * shape.scale).astype(np.float16)
    header: dict[str, object] = {
        "__metadata__": {**facts, "format": "keystroke-adapter-1", "rank": str(shape.rank)}
    }
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    parts = (struct.pack("<Q", len(packed)), packed, *(tensor.tobytes() for tensor in tensors.values()))
    replace_file(path, b"".join(parts), 0o666)
    return path.stat().st_size


def read_adapter(path: Path) -> AdapterFile:
    """Read an adapter. Raises InputError if the file cannot be read, ModelDamaged if it is not an adapter."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"the adapter {path} cannot be read ({error.strerror}); check its path") from error
    try:
        (size,) = struct.unpack_from("<Q", data)
        if size > min(_LARGEST_HEADER, len(data) - 8):
            raise ValueError("its header is longer than the file")
        header = json.loads(data[8 : 8 + size])
        facts = {str(k): str(v) for k, v in header.pop("__metadata__").items()}
        if facts.get("format") != "keystroke-adapter-1":
            raise ValueError("its format is not keystroke-adapter-1")
        tensors = {name: _read_tensor(data, 8 + size, entry) for name, entry in header.items()}
        return _assemble(tensors, facts, hashlib.sha256(data).hexdigest())
    except (ValueError, KeyError, TypeError, IndexError, struct.error, AttributeError) as error:
        raise ModelDamaged(
            f"{path} is not an adapter of ours or is cut short ({error}); get it again"
        ) from error


def _read_tensor(data: bytes, start: int, entry: Mapping[str, object]) -> Array:
    if entry["dtype"] != "F16":
        raise ValueError("a tensor is not float16")
    first, last = (int(x) for x in entry["data_offsets"])  # type: ignore[attr-defined]
    rows, columns = (int(x) for x in entry["shape"])  # type: ignore[attr-defined]
    if not 0 <= first <= last <= len(data) - start or last - first != 2 * rows * columns:
        raise ValueError("a tensor is outside the file")
    flat = np.frombuffer(data, np.float16, rows * columns, start + first)
    if not np.isfinite(flat).all():
        raise ValueError("a tensor has values that are not finite")
    return flat.reshape(rows, columns).astype(np.float32)


def _assemble(tensors: Mapping[str, Array], facts: Mapping[str, str], digest: str) -> AdapterFile:
    layers = len(tensors) // (2 * len(PRODUCTS))
    pairs = {
        (layer, product): (tensors[f"layers.{layer}.{product}.down"], tensors[f"layers.{layer}.{product}.up"])
        for layer in range(layers)
        for product in PRODUCTS
    }
    (qkv_down, qkv_up), (out_down, _), (_, wide_up) = (pairs[0, name] for name in PRODUCTS[:3])
    shape = AdapterShape(
        layers, qkv_down.shape[1], len(qkv_up), out_down.shape[1], len(wide_up) // 2, len(qkv_down), 2.0
    )
    sizes = product_sizes(shape)
    for (layer, product), (down, up) in pairs.items():
        rows, columns = sizes[PRODUCTS.index(product)]
        if down.shape != (shape.rank, columns) or up.shape != (rows, shape.rank):
            raise ValueError(f"layer {layer}'s {product} does not fit the others")
    return AdapterFile(shape, pairs, facts, digest)


class AdaptedCheckpoint(Checkpoint):
    """A model with an adapter merged into its weights, for engines that load weights into memory of their
    own. It uses as much memory as a second model."""

    def __init__(self, base: Checkpoint, adapter: AdapterFile) -> None:
        """Raises InputError if the adapter was not made for the base."""
        adapter.check(base.spec)
        self.spec, self._base, self._adapter = base.spec, base, adapter

    def tensor(self, name: str) -> Array:
        delta = self._delta(name)
        plain = self._base.tensor(name)
        return plain if delta is None else plain + delta

    def raw(self, name: str) -> tuple[npt.NDArray[np.generic], str]:
        delta = self._delta(name)
        return self._base.raw(name) if delta is None else (self._base.tensor(name) + delta, "F32")

    def storage(self, name: str) -> str:
        return self._base.storage(name) if _product_of(name) is None else "F32"

    def fingerprint(self) -> str:
        return hashlib.sha256((self._base.fingerprint() + self._adapter.digest).encode()).hexdigest()

    def close(self) -> None:
        self._base.close()

    def _delta(self, name: str) -> Array | None:
        """The correction of a weight; None if there is none."""
        pair = pair_of_weight(self._adapter, self.spec, name)
        return None if pair is None else pair[1] @ pair[0]


def pair_of_weight(adapter: AdapterFile, spec: ModelSpec, name: str) -> tuple[Array, Array] | None:
    """`down` and the rows of `up` that correct one weight of a model; None if the adapter does not."""
    product = _product_of(name)
    if product is None:
        return None
    parts = name.split(".")
    part = ".".join(parts[3:-1])
    keys, queries = spec.kv_heads * spec.head_dim, spec.heads * spec.head_dim
    sizes = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    rows = {
        "qkv": sizes,
        "gate_up": {"mlp.gate_proj": spec.intermediate, "mlp.up_proj": spec.intermediate},
    }.get(product, {part: spec.hidden})
    first = sum(size for other, size in rows.items() if list(rows).index(other) < list(rows).index(part))
    down, up = adapter.pairs[int(parts[2]), product]
    return down, up[first : first + rows[part]]


def _product_of(name: str) -> str | None:
    """The product that a weight belongs to; None if adapters do not change it."""
    parts = name.split(".")
    inside = parts[:2] == ["model", "layers"] and parts[-1] == "weight"
    return _PARTS.get(".".join(parts[3:-1])) if inside else None
