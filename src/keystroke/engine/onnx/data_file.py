"""Writes the weights of a graph into one file beside it.

Arrays are written as they are produced, so that converting a model needs the memory of one tensor.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

_INLINE = 1 << 12  # smaller arrays stay in the graph, where shape inference can see them
# Large arrays begin on a page of any system, others on a cache line.
_LARGE, _PAGE, _LINE = 1 << 20, 1 << 16, 1 << 6


class DataFile:
    """Appends arrays to a file and returns an initializer for each that refers to it."""

    def __init__(self, file: BinaryIO, location: str) -> None:
        """`location` is the file's name relative to the graph."""
        self._file = file
        self._location = location
        self._at = 0

    def add(self, name: str, array: npt.NDArray[np.generic]) -> TensorProto:
        if array.nbytes < _INLINE:
            inline: TensorProto = numpy_helper.from_array(array, name)
            return inline
        alignment = _PAGE if array.nbytes >= _LARGE else _LINE
        self._write(bytes(-self._at % alignment))
        offset = self._at
        self._write(np.ascontiguousarray(array).data.cast("B"))
        tensor = TensorProto(
            name=name,
            data_type=onnx.helper.np_dtype_to_tensor_dtype(array.dtype),
            dims=array.shape,
            data_location=TensorProto.EXTERNAL,
        )
        for key, value in (("location", self._location), ("offset", offset), ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._at += len(data)
