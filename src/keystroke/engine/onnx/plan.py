"""Runs a Llama-like model with stored weights by one native call a step: see native/plan.h.

The bits are those of the graph that `stored_graph` builds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from keystroke.engine.checkpoint import EMBEDDING, ModelSpec, rope_tables
from keystroke.engine.checkpoint.spec import FINAL_NORM, HEAD
from keystroke.engine.cores import usable_cores
from keystroke.engine.onnx.packing import has_memory_to_pack
from keystroke.engine.onnx.stored import NativeWeights
from keystroke.engine.sampler import RankedRow
from keystroke.errors import EngineError, Interrupted, NotEnoughMemory

_DONE, _STOPPED, _NO_MEMORY = range(3)

_Pointer, _Size = ctypes.c_void_p, ctypes.c_int64


class _Table(ctypes.Structure):
    _fields_ = [("at", _Pointer), ("type", _Size), ("height", _Size)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Pointer) for name in ("norm", "query_norm", "key_norm", "mlp_norm", "cosines", "sines")),
        *((name, _Pointer) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        *(("qkv", _Table * 3), ("output", _Table), ("gate_up", _Table * 2), ("down", _Table)),
        ("window", _Size),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _Size) for name in ("layers", "hidden", "heads", "kv_heads", "width")),
        *(("intermediate", _Size), ("positions", _Size)),
        *(("epsilon", ctypes.c_float), ("scale", ctypes.c_float)),
        *(("embedding", _Table), ("head", _Table), ("last_norm", _Pointer)),
        *(("layer", ctypes.POINTER(_Layer)), ("packs", _Size), ("threads", _Size)),
    ]


class _Sequence(ctypes.Structure):
    _fields_ = [(name, _Size) for name in ("rows", "first", "asked", "capacity")] + [("kept", _Pointer)]


class PlannedRun(NamedTuple):
    """One session's part of a run: `rows` tokens from position `start` on, the last `asked` of which give
    logits. `kept` are the addresses of its keys and values, with room for `capacity` tokens."""

    rows: int
    start: int
    asked: int
    kept: ctypes.Array[ctypes.c_void_p]
    capacity: int


class StopFlag(ctypes.Structure):
    """Ends a run between two layers once `terminate` is set."""

    _fields_ = [("terminate", ctypes.c_int32)]


class LogitRows:
    """Memory for the logits of a run, and for the ranking of its rows."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.address = array, int(array.ctypes.data)
        self.tops, self.sums = (_Size * len(array))(), (ctypes.c_double * len(array))()

    def ranked(self) -> list[RankedRow]:
        return list(zip(self.tops, self.sums, strict=True))


class StepPlan:
    """An opened plan. `run` is called by one thread at a time."""

    def __init__(self, spec: ModelSpec, weights: NativeWeights, threads: int) -> None:
        """Raises EngineError if the plan refuses the model's sizes, or there is no memory for it."""
        self._arrays: list[np.ndarray] = []
        self._sequences = (_Sequence * 1)()
        self._weights = weights
        self._library = ctypes.CDLL(str(weights.library))
        self._library.open_plan.restype = _Pointer
        self._library.open_plan.argtypes = [ctypes.POINTER(_Model)]
        self._library.close_plan.argtypes = [_Pointer]
        self._run = self._library.run_plan
        self._run.argtypes = [_Pointer, _Pointer, _Pointer, _Size, *[_Pointer] * 4]
        self._rank = self._library.rank_rows
        self._rank.argtypes = [_Pointer, _Pointer, _Size, _Size, _Pointer, _Pointer]
        self._rank.restype = None
        self._library.cheap_sequences.restype = _Size
        self.cheap_sequences = int(
            self._library.cheap_sequences()
        )  # that take about two steps of one, or less
        cos, sin = (self._keep(table) for table in rope_tables(spec, spec.context_length))
        ones = zeros = None
        if spec.unrotated:
            half = (spec.context_length, spec.head_dim // 2)
            ones, zeros = self._keep(np.ones(half, np.float32)), self._keep(np.zeros(half, np.float32))
        layers = (_Layer * spec.layers)()
        for index, layer in enumerate(layers):
            self._fill(layer, spec, index)
            turned = index not in spec.unrotated
            layer.cosines, layer.sines = (cos, sin) if turned else (ones, zeros)
        model = _Model(
            layers=spec.layers,
            hidden=spec.hidden,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            width=spec.head_dim,
            intermediate=spec.intermediate,
            positions=spec.context_length,
            epsilon=spec.norm_eps,
            scale=spec.query_scale,
            embedding=self._table(EMBEDDING),
            head=self._table(EMBEDDING if spec.tied else HEAD),
            last_norm=self._vector(FINAL_NORM),
            layer=layers,
            packs=has_memory_to_pack(self._library, spec, weights.tables, weights.types),
            threads=threads or usable_cores(),
        )
        self._plan = self._library.open_plan(model)
        if not self._plan:
            raise EngineError(f"{spec.name} could not be prepared: there is too little memory")

    def _fill(self, layer: _Layer, spec: ModelSpec, index: int) -> None:
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = [f"{attention}.{part}_proj" for part in "qkv"]
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        layer.norm = self._vector(f"{prefix}.input_layernorm.weight")
        layer.mlp_norm = self._vector(f"{prefix}.post_attention_layernorm.weight")
        if spec.qk_norm:
            layer.query_norm = self._vector(f"{attention}.q_norm.weight")
            layer.key_norm = self._vector(f"{attention}.k_norm.weight")
        layer.qkv = tuple(self._table(f"{name}.weight") for name in qkv)
        layer.output = self._table(f"{attention}.o_proj.weight")
        layer.gate_up = tuple(self._table(f"{name}.weight") for name in gate_up)
        layer.down = self._table(f"{mlp}.down_proj.weight")
        layer.qkv_bias = self._bias(qkv, spec.qkv_bias)
        layer.output_bias = self._bias([f"{attention}.o_proj"], spec.o_bias)
        layer.gate_up_bias = self._bias(gate_up, spec.mlp_bias)
        layer.down_bias = self._bias([f"{mlp}.down_proj"], spec.mlp_bias)
        layer.window = spec.window if index in spec.windowed else 0

    def _keep(self, array: np.ndarray) -> int:
        self._arrays.append(np.ascontiguousarray(array))
        return int(self._arrays[-1].ctypes.data)

    def _vector(self, name: str) -> int:
        return self._keep(self._weights.vectors[name])

    def _bias(self, names: Sequence[str], there: bool) -> int | None:
        vectors = self._weights.vectors
        return self._keep(np.concatenate([vectors[f"{name}.bias"] for name in names])) if there else None

    def _table(self, name: str) -> _Table:
        table = self._weights.tables[name]
        return _Table(table.ctypes.data, self._weights.types[name], len(table))

    def bind(self, arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
        """The addresses of a session's keys and values, for `run`."""
        return (_Pointer * len(arrays))(*(array.ctypes.data for array in arrays))

    def run(self, ids: int, parts: Sequence[PlannedRun], logits: LogitRows, stop: StopFlag) -> None:
        """Compute the tokens at the address `ids`, in the order of the parts, and the logits asked for.
        Raises Interrupted, NotEnoughMemory, EngineError."""
        if len(parts) > len(self._sequences):
            self._sequences = (_Sequence * len(parts))()
        for sequence, part in zip(self._sequences, parts, strict=False):
            sequence.rows, sequence.first, sequence.asked, kept, sequence.capacity = part
            sequence.kept = ctypes.addressof(kept)
        code = self._run(
            self._plan,
            ids,
            self._sequences,
            len(parts),
            logits.address,
            logits.tops,
            logits.sums,
            ctypes.byref(stop),
        )
        if code == _STOPPED:
            raise Interrupted("stopped on request")
        if code == _NO_MEMORY:
            raise NotEnoughMemory("the system ran out of memory during a run; shorten the prompt")
        if code != _DONE:
            raise EngineError(
                "a token lies outside of the vocabulary, or its position outside of the context"
            )

    def rank(self, logits: LogitRows) -> None:
        """Rank the rows, as a run does."""
        rows, count = logits.array.shape
        self._rank(self._plan, logits.address, rows, count, logits.tops, logits.sums)

    def close(self) -> None:
        """Ends the threads; called once, and no run follows."""
        self._library.close_plan(self._plan)
