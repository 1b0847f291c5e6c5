"""Reads GGUF models: metadata to a ModelSpec, llama.cpp's tensor names and row order to canonical ones.

Block-quantised tensors are dequantised one at a time, or returned as stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.digest import quick_digest
from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.gguf_header import SPLIT, GGUFHeader, TensorInfo, open_header, split_parts
from keystroke.engine.checkpoint.safetensors_file import to_float32
from keystroke.engine.checkpoint.spec import Checkpoint, ModelSpec, RopeSpec, check_shapes
from keystroke.engine.families import BY_GGUF, family_of, family_of_gguf
from keystroke.engine.families.family import GGUFFile, TensorSource
from keystroke.engine.families.gguf_fields import gguf_name
from keystroke.errors import ModelDamaged, UnsupportedModel

_FLOATS: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class GGUFCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        self._paths = _find_parts(path)
        self._path = self._paths[0]
        self._headers = [open_header(part) for part in self._paths]
        self._tensors: dict[str, tuple[npt.NDArray[np.uint8], TensorInfo]] = {}
        for header in self._headers:
            data = np.frombuffer(header.view, dtype=np.uint8)
            self._tensors.update({name: (data, info) for name, info in header.tensors.items()})
        self.spec = _read_spec(
            self._headers[0], {name: info.shape for name, (_, info) in self._tensors.items()}
        )
        if "rope_freqs.weight" in self._tensors:
            self.spec = replace(self.spec, rope=self._with_divisors(self.spec.rope))
        check_shapes(self.spec, self._shape)

    def _with_divisors(self, rope: RopeSpec) -> RopeSpec:
        """Llama 3.1 and later: the file contains the results of the llama3 rule, one divisor per
        frequency."""
        stored, kind = self._stored_array("rope_freqs.weight")
        divisors = to_float32(stored, kind) if stored.dtype != np.uint8 else np.zeros(1, np.float32)
        if divisors.size > 4096 or not np.all(np.isfinite(divisors) & (divisors > 0)):
            raise ModelDamaged(f"{self._path} has unusable rotary factors; download it again")
        return replace(rope, scaling=rope.scaling or "llama3", divisors=tuple(divisors.ravel().tolist()))

    def _source(self, name: str) -> TensorSource:
        family = family_of(self.spec.architecture)
        if family.gguf_source is not None:
            return family.gguf_source(self.spec, name, self._tensors)
        return TensorSource((gguf_name(name, family.gguf_names),), flat=name.endswith(".bias"))

    def _shape(self, name: str) -> tuple[int, ...] | None:
        source = self._source(name)
        if any(part not in self._tensors for part in source.names):
            return None
        shapes = [_stack_shape(self._tensors[part][1].shape) for part in source.names]
        if source.single_row:
            return (1, *shapes[0])
        if source.flat:
            return (sum(math.prod(shape) for shape in shapes),)
        rows = sum(shape[0] for shape in shapes) if source.rows is None else len(source.rows)
        return (rows, *shapes[0][1:])

    def _has_predictor(self) -> bool:
        known = family_of(self.spec.architecture).predicts
        return known and f"blk.{self.spec.layers}.nextn.eh_proj.weight" in self._tensors

    def _stored_array(self, stored: str) -> tuple[npt.NDArray[np.generic], str]:
        file, info = self._tensors[stored]
        data = file[info.start : info.start + info.size]
        dtype = _FLOATS.get(info.type.name)
        if dtype is not None:
            return data.view(dtype).reshape(_stack_shape(info.shape)), info.type.name
        return data.reshape(*_stack_shape(info.shape)[:-1], -1), info.type.name

    def raw(self, name: str) -> tuple[npt.NDArray[np.generic], str]:
        source, spec = self._source(name), self.spec
        parts = [self._stored_array(part) for part in source.names]
        data, kind = parts[0]
        if len(parts) > 1:
            data = np.concatenate([array for array, _ in parts])
        if source.single_row:
            data = data.reshape(1, -1)
        if source.flat:
            data = data.ravel()
        if source.rows is not None:
            data = data[source.rows]
        paired = family_of(spec.architecture).paired
        if paired and ".self_attn.q_proj." in name:
            return _unpair_rows(data, spec.heads), kind
        if paired and ".self_attn.k_proj." in name:
            return _unpair_rows(data, spec.kv_heads), kind
        return data, kind

    def storage(self, name: str) -> str:
        return self._tensors[self._source(name).names[0]][1].type.name

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
        return quick_digest(self._paths)

    def close(self) -> None:
        self._headers.clear()
        self._tensors.clear()


def gguf_architectures() -> frozenset[str]:
    """The architectures that can be read, as GGUF files name them."""
    return frozenset(BY_GGUF)


def _unpair_rows(data: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """Undo llama.cpp's row order. Its Llama kernels rotate neighbouring rows (0,1), (2,3), ...; the canonical
    order pairs row i with row i + head_dim / 2. Rows are whole blocks, so that quantised rows can be
    moved."""
    paired = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:])
    return paired.swapaxes(1, 2).reshape(data.shape)


def _stack_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of stacked experts as one matrix: their rows follow one another."""
    return (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape


def _read_spec(header: GGUFHeader, shapes: Mapping[str, tuple[int, ...]]) -> ModelSpec:
    fields = Fields(header.metadata, str(header.path))
    stated = fields.text("general.architecture")
    family = family_of_gguf(stated)
    name = SPLIT.sub("", header.path.stem)
    return family.read_gguf(GGUFFile(fields, stated, name, shapes))


def _find_parts(path: Path) -> list[Path]:
    """The files of a model: `path`, or all parts of a model that is split over several, which need not be
    joined. Raises ModelDamaged if one is missing."""
    count = open_header(path).metadata.get("split.count")
    if not isinstance(count, int) or count <= 1:
        return [path]
    parts = split_parts(path)
    if len(parts) != count:
        raise ModelDamaged(
            f"{path} is one of {count} parts of a model, but its name does not say which; give the files "
            "their names of the form NAME-00001-of-00003.gguf again"
        )
    return parts
