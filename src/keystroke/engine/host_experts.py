"""Experts of a mixture in host memory, computed by the compiled CPU operators for a GPU that does not hold
them.

A thread of the operators waits for messages of the GPU's kernel in memory that both share, computes the
experts and answers; Python takes no part. Weights stay as the file stores them, mapped into memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.ggml_types import STORAGE_TYPES
from keystroke.engine.checkpoint.spec import Checkpoint, ExpertsSpec, ModelSpec
from keystroke.engine.cores import usable_cores
from keystroke.engine.onnx.native import operators_library, unavailable_reason
from keystroke.errors import EngineError, ModelError, UnsupportedModel

_TYPES = {known.name: number for number, known in STORAGE_TYPES.items()}
_COUNT_BITS, _FIXED_ONE, _LARGEST_TERM = 12, float(1 << 28), 1.0e6  # as in kernels/layout.cuh
_FEW_CORES = 4  # up to so many all compute; of more, one is left to the engine's own thread
_NO_MEMORY, _NOT_FINITE = 1, 2
_Size, _Pointer = ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True)
class ExpertTable:
    """One matrix of all experts of a layer, one below the other, as stored: rows of bytes or of numbers."""

    rows: npt.NDArray[np.generic]
    kind: str


@dataclass(frozen=True)
class ExpertLayer:
    gate: ExpertTable
    up: ExpertTable
    down: ExpertTable
    biases: tuple[npt.NDArray[np.float32], ...] = ()  # of the same, if the model has them


@dataclass(frozen=True)
class ExpertStore:
    """The experts of every layer in host memory, and the library that computes them."""

    library: Path
    layers: tuple[ExpertLayer, ...]
    threads: int = 0  # that compute them; 0: as many as there are cores


class _Table(ctypes.Structure):
    _fields_ = [("at", _Pointer), ("type", _Size), ("height", _Size)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Table) for name in ("gate", "up", "down")),
        *((name, _Pointer) for name in ("gate_bias", "up_bias", "down_bias")),
    ]


class _Model(ctypes.Structure):
    """As HostModel in native/host_experts.h."""

    _fields_ = [
        *((name, _Size) for name in ("layers", "hidden", "width", "count", "top", "most_rows", "type")),
        *((name, _Size) for name in ("count_bits", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "limit", "fixed_one", "largest")),
        ("layer", ctypes.POINTER(_Layer)),
        *((name, _Pointer) for name in ("mail", "rows", "sums")),
    ]


def mail_words(rows: int, used: int) -> int:
    """Words of the messages about so many rows with so many experts each."""
    return 66 + 2 * rows * used


def expert_store(checkpoint: Checkpoint, cache: Path, threads: int = 0) -> ExpertStore:
    """The experts of a file. Raises UnsupportedModel, and ModelError if the operators cannot be compiled."""
    spec = checkpoint.spec
    assert spec.experts is not None
    library = operators_library(cache)
    if library is None:
        raise ModelError(
            f"experts in host memory need compiled operators, and {unavailable_reason(cache)}; set "
            "engine.experts to gpu"
        )
    layers = []
    for index in range(spec.layers):
        at = f"model.layers.{index}.mlp.experts"
        tables = []
        for name in ("gate_proj", "up_proj", "down_proj"):
            rows, kind = checkpoint.raw(f"{at}.{name}.weight")
            if kind not in _TYPES or rows.ndim != 2 or not _is_mapped(rows):
                raise UnsupportedModel(
                    f"{spec.name} does not store its experts so that the CPU can compute them in place; use "
                    "a GGUF file, or set engine.experts to gpu"
                )
            tables.append(ExpertTable(rows, kind))
        biases: tuple[npt.NDArray[np.float32], ...] = ()
        if spec.experts.bias:
            names = ("gate_proj", "up_proj", "down_proj")
            biases = tuple(np.ascontiguousarray(checkpoint.tensor(f"{at}.{name}.bias")) for name in names)
        layers.append(ExpertLayer(tables[0], tables[1], tables[2], biases))
    return ExpertStore(library, tuple(layers), threads)


def _is_mapped(array: npt.NDArray[np.generic]) -> bool:
    """Whether the array is part of a mapped file, contiguous, rather than a copy."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base is not None and array.flags.c_contiguous


class ExpertServer:
    """Computes experts for a GPU until it is closed. `mail`, `rows` and `sums` are memory that both share
    (kernels/host_experts.cuh); `half`: rows are float16 times 1/64, otherwise bf16."""

    _server: int | None = None  # until it is open, and once it is closed

    def __init__(
        self,
        store: ExpertStore,
        spec: ModelSpec,
        experts: ExpertsSpec,
        mail: npt.NDArray[np.int32],
        rows: npt.NDArray[np.uint16],
        sums: npt.NDArray[np.int64],
        *,
        half: bool,
    ) -> None:
        """Raises EngineError."""
        self._kept = (store, mail, rows, sums)
        cores = usable_cores()
        layers = (_Layer * spec.layers)()
        for layer, given in zip(layers, store.layers, strict=True):
            for name in ("gate", "up", "down"):
                table: ExpertTable = getattr(given, name)
                setattr(layer, name, _Table(table.rows.ctypes.data, _TYPES[table.kind], len(table.rows)))
            if given.biases:
                layer.gate_bias, layer.up_bias, layer.down_bias = (b.ctypes.data for b in given.biases)
        model = _Model(
            layers=spec.layers,
            hidden=spec.hidden,
            width=experts.width,
            count=experts.count,
            top=experts.top + (experts.shared > 0),
            most_rows=len(rows),
            type=_TYPES["F16" if half else "BF16"],
            count_bits=_COUNT_BITS,
            threads=store.threads or (cores if cores <= _FEW_CORES else cores - 1),
            scale=64.0 if half else 1.0,
            limit=experts.limit,
            fixed_one=_FIXED_ONE,
            largest=_LARGEST_TERM,
            layer=layers,
            mail=mail.ctypes.data,
            rows=rows.ctypes.data,
            sums=sums.ctypes.data,
        )
        library = ctypes.CDLL(str(store.library))
        library.open_host_experts.restype = _Pointer
        library.open_host_experts.argtypes = [ctypes.POINTER(_Model)]
        for name in ("wake_host_experts", "close_host_experts", "host_experts_failure"):
            getattr(library, name).argtypes = [_Pointer]
        library.host_experts_counts.argtypes = [_Pointer, _Pointer]
        self._library = library
        self._wake = library.wake_host_experts
        self._server = library.open_host_experts(ctypes.byref(model))
        if not self._server:
            raise EngineError(f"the experts of {spec.name} could not be prepared: there is too little memory")

    def wake(self) -> None:
        """Call before a step is launched."""
        self._wake(self._server)

    def check(self) -> None:
        """Raises EngineError if an answer since the last call was wrong."""
        failure = self._library.host_experts_failure(self._server)
        if failure == _NO_MEMORY:
            raise EngineError("the system ran out of memory while it computed experts; close other programs")
        if failure == _NOT_FINITE:
            raise EngineError("the model produced numbers that are not finite; its weights may be damaged")

    def counts(self) -> tuple[int, int]:
        """Messages answered, and pairs of a row and an expert computed."""
        found = (_Size * 2)()
        self._library.host_experts_counts(self._server, found)
        return found[0], found[1]

    def close(self) -> None:
        """End the thread; no step that uses it may run. Idempotent."""
        server, self._server = self._server, None
        if server:
            self._library.close_host_experts(server)

    def __del__(self) -> None:
        self.close()
