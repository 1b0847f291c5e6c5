from __future__ import annotations

import platform
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from keystroke.engine.onnx.quantise import Quantised, quantise
from keystroke.errors import ModelDamaged

Array = np.ndarray[Any, Any]
LAYOUTS = [
    (bits, block, symmetric) for bits in (4, 8) for block in (32, 64, 128) for symmetric in (True, False)
]


def _weight(rows: int, columns: int, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    spread = random.uniform(0.01, 1.0, (rows, 1))
    return (random.standard_normal((rows, columns)) * spread).astype(np.float32)


def dequantise(quantised: Quantised) -> Array:
    """The matrix the codes stand for."""
    rows, columns = quantised.shape
    bits, blocks = quantised.bits, quantised.packed.shape[1]
    codes = _unpacked(quantised.packed, bits).astype(np.float32)
    if quantised.zero_points is None:
        codes -= 1 << (bits - 1)
    else:
        zeros = _unpacked(quantised.zero_points.reshape(rows, -1), bits)[:, :blocks]
        codes -= zeros[..., None].astype(np.float32)
    codes *= quantised.scales.reshape(rows, blocks, 1)
    return codes.reshape(rows, -1)[:, :columns]


def _unpacked(packed: Array, bits: int) -> Array:
    if bits == 8:
        return packed
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def _session(quantised: Quantised, accuracy: int) -> ort.InferenceSession:
    """One MatMulNBits node, nothing around it."""
    rows, columns = quantised.shape
    weights = {"packed": quantised.packed, "scales": quantised.scales}
    if quantised.zero_points is not None:
        weights["zeros"] = quantised.zero_points
    node = helper.make_node(
        "MatMulNBits",
        ["x", *weights],
        ["y"],
        domain="com.microsoft",
        K=columns,
        N=rows,
        bits=quantised.bits,
        block_size=quantised.block,
        accuracy_level=accuracy,
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", rows])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("columns", [576, 100, 1536])
@pytest.mark.parametrize(("bits", "block", "symmetric"), LAYOUTS)
def test_onnx_runtime_multiplies_by_exactly_the_dequantised_matrix(
    columns: int, bits: int, block: int, symmetric: bool
) -> None:
    quantised = quantise(_weight(96, columns), bits=bits, block=block, symmetric=symmetric)
    rows = _weight(3, columns, seed=1)
    expected = rows.astype(np.float64) @ dequantise(quantised).astype(np.float64).T
    largest = np.abs(expected).max()
    plain = _session(quantised, 0).run(None, {"x": rows})[0]
    np.testing.assert_allclose(plain, expected, atol=largest * 5e-6)
    # Level 4 also rounds the activations to 8 bits.
    fast = _session(quantised, 4).run(None, {"x": rows})[0]
    np.testing.assert_allclose(fast, expected, atol=largest * 0.03)


@pytest.mark.skipif(
    platform.machine() not in ("aarch64", "arm64"),
    reason="measured on 64-bit ARM; other processors have other kernels",
)
@pytest.mark.parametrize(("bits", "block", "symmetric"), [layout for layout in LAYOUTS if layout[1] < 128])
def test_a_row_does_not_depend_on_its_company(bits: int, block: int, symmetric: bool) -> None:
    """What makes speculation exact: verifying many rows gives each row the bits it would have alone."""
    session = _session(quantise(_weight(192, 576), bits=bits, block=block, symmetric=symmetric), 4)
    rows = _weight(32, 576, seed=1)
    alone = np.concatenate([session.run(None, {"x": rows[i : i + 1]})[0] for i in range(len(rows))])
    for count in (2, 3, 4, 5, 8, 9, 16, 17, 31, 32):
        np.testing.assert_array_equal(session.run(None, {"x": rows[:count]})[0], alone[:count])


@pytest.mark.parametrize(("bits", "block", "symmetric"), LAYOUTS)
def test_no_value_moves_further_than_its_block_allows(bits: int, block: int, symmetric: bool) -> None:
    weight = _weight(64, block * 4)
    error = np.abs(dequantise(quantise(weight, bits=bits, block=block, symmetric=symmetric)) - weight)
    blocks = weight.reshape(64, 4, block)
    span = 2 * np.abs(blocks).max(-1) if symmetric else np.ptp(blocks, axis=-1)
    # Half a step for rounding; at 4 bits the range may shrink by a fifth to serve the many over the few.
    allowed = span / (1 << bits) + (0.2 * span if bits == 4 else 0)
    assert (error.reshape(64, 4, block).max(-1) <= allowed * 1.05).all()


@pytest.mark.parametrize(
    ("bits", "block", "symmetric", "bound"),
    [
        (4, 32, True, 0.084),
        (4, 32, False, 0.080),
        (4, 64, False, 0.089),
        (8, 32, True, 0.0052),
        (8, 64, False, 0.0055),
    ],
)
def test_the_error_on_normal_weights_stays_under_its_bound(
    bits: int, block: int, symmetric: bool, bound: float
) -> None:
    weight = _weight(256, 512)
    error = dequantise(quantise(weight, bits=bits, block=block, symmetric=symmetric)) - weight
    assert np.sqrt(np.square(error / weight.std(1, keepdims=True)).mean()) < bound


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False)])
def test_searching_the_scale_beats_covering_the_whole_range(bits: int, symmetric: bool) -> None:
    weight = _weight(64, 256)
    found = np.square(dequantise(quantise(weight, bits=bits, block=32, symmetric=symmetric)) - weight).sum()
    blocks = weight.reshape(64, -1, 32)
    low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
    scale = np.abs(blocks).max(-1, keepdims=True) / 7 if symmetric else (high - low) / 15
    zero = 0 if symmetric else np.rint(-low / scale)
    plain = (np.rint(blocks / scale + zero) - zero) * scale
    assert found < np.square(plain - blocks).sum()


@pytest.mark.parametrize(("bits", "half"), [(4, 8), (8, 127)])
def test_weights_already_on_a_symmetric_grid_are_kept(bits: int, half: int) -> None:
    """Files quantised as Q4_0 or Q8_0 lose nothing on the way through."""
    random = np.random.default_rng(0)
    codes = random.integers(-half, half if bits == 4 else half + 1, (32, 8, 32))
    codes[..., 0] = -half
    weight = (
        (codes * random.uniform(0.01, 0.1, (32, 8, 1)).astype(np.float16)).astype(np.float32).reshape(32, -1)
    )
    result = dequantise(quantise(weight, bits=bits, block=32, symmetric=True))
    np.testing.assert_allclose(result, weight, rtol=1e-6)


@pytest.mark.parametrize(("bits", "block", "symmetric"), LAYOUTS)
def test_zeros_tiny_values_and_one_sided_blocks_survive(bits: int, block: int, symmetric: bool) -> None:
    weight = np.zeros((4, 256), np.float32)
    weight[1] = 1e-42
    weight[2] = np.linspace(1.0, 2.0, 256)
    weight[3] = -weight[2]
    result = dequantise(quantise(weight, bits=bits, block=block, symmetric=symmetric))
    assert np.isfinite(result).all()
    np.testing.assert_array_equal(result[0], 0)
    np.testing.assert_allclose(result, weight, atol=0.2)


def test_the_result_does_not_depend_on_how_the_rows_are_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(200, 576)
    expected = quantise(weight, bits=4, block=32, symmetric=False)
    monkeypatch.setattr("keystroke.engine.onnx.quantise._SLICE", 576 * 7)
    actual = quantise(weight, bits=4, block=32, symmetric=False)
    np.testing.assert_array_equal(actual.packed, expected.packed)
    np.testing.assert_array_equal(actual.scales, expected.scales)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_that_are_not_numbers_are_damage(bad: float, symmetric: bool) -> None:
    weight = _weight(8, 64)
    weight[3, 5] = bad
    with pytest.raises(ModelDamaged, match="finite"):
        quantise(weight, bits=4, block=32, symmetric=symmetric)
