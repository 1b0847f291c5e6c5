"""Our own operators: what they compute against float64, and that a row's result is its own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from onnx import TensorProto, helper

from keystroke.config import load_settings
from keystroke.engine.disk_prefixes import whole_blocks
from keystroke.engine.onnx import native
from keystroke.engine.onnx.kv import KEY_BLOCK

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from stored_models import COMPILED_KINDS, KINDS, random_blocks, widened

Array = np.ndarray[Any, Any]
# A product's error against float64: its activations are rounded to 8 bits, everything else to 24.
EIGHT_BITS, SINGLE = 0.01, 2e-6


# What takes the newer instructions of a processor away: AVX-512, or the dot products of ARMv8.2.
OLDER = "-U__ARM_FEATURE_DOTPROD" if native._NATIVE == "-mcpu=native" else "-mno-avx512f"


@pytest.fixture(scope="module", params=["this processor", "an older one"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operators for this processor, and for one without its newer instructions."""
    if request.param == "this processor":
        found = native.operators_library(load_settings().paths.cache)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CC", " ".join([*(native._compiler() or ["cc"]), OLDER]))
            found = native.operators_library(tmp_path_factory.mktemp("native"))
    if found is None:
        pytest.skip(f"no C compiler here, or not the vectors ({platform.machine()})")
    return found


def session(library: Path, op: str, inputs: dict[str, int], optional: str = "", **attributes: Any) -> Any:
    """One node; `inputs` are names and types, `optional` the ones that stay empty."""
    names = ["" if name == optional else name for name in inputs]
    node = helper.make_node(op, names, ["y"], domain="keystroke", **attributes)
    infos = [
        helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items() if name in names
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "one node", infos, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("keystroke", 1)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(library))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def number(kind: str) -> int:
    return int(GGMLQuantizationType[kind])


def block_scales(blocks: Array, *, large: bool) -> Array:
    """What the codes of each block of 32 are multiples of: a 127th of its largest, and for formats of 256
    weights a share of what its unit of eight blocks has, such that no half block is too heavy for 16 bits."""
    scale: Array = np.abs(blocks).max(-1) / np.float32(127)
    if not large:
        return scale
    quarters = np.abs(blocks).reshape(*scale.shape, 2, 4, 4)
    four = quarters[..., 0, :] + quarters[..., 1, :] + quarters[..., 2, :] + quarters[..., 3, :]
    heavy = (four[..., 0] + four[..., 1]) + (four[..., 2] + four[..., 3])
    least = np.maximum(scale, heavy.max(-1) / np.float32(1014)).reshape(scale.shape[0], -1, 8)
    unit = least.max(-1, keepdims=True) / np.float32(15)
    share = np.clip(np.ceil(least / np.where(unit > 0, unit, np.float32(1))), 1, 15)
    return np.asarray(unit * share, np.float32).reshape(scale.shape)


def once(x: Array, *, large: bool) -> Array:
    """8 bits in blocks of 32."""
    blocks = x.reshape(x.shape[0], -1, 32)
    scale = block_scales(blocks, large=large)[..., None]
    codes = np.rint(blocks * (np.float32(1) / np.where(scale > 0, scale, np.float32(1))))
    assert np.abs(codes).max() <= 127
    assert not large or np.abs(codes).reshape(-1, 16).sum(-1).max() <= 1023
    wide: Array = codes.astype(np.float64) * scale
    return wide.reshape(x.shape)


def uneven(x: Array, *, large: bool) -> Array:
    """Rows where the error of 8 bits is a hundredth and more of what is small."""
    blocks = np.abs(x.reshape(x.shape[0], -1, 32)).astype(np.float64)
    largest = blocks.max(-1, keepdims=True)
    small = (np.minimum(blocks, largest / 16) ** 2).sum((-1, -2))
    if large:
        least = largest.reshape(x.shape[0], -1, 8).max(-1, keepdims=True) / 15
        largest = np.maximum(largest, np.repeat(least, 8, 1).reshape(largest.shape))
    found: Array = (largest**2).sum((-1, -2)) * 32 / (12 * 127**2) > 0.01 * small
    return found


def is_large(kind: str) -> bool:
    """Whether activations are rounded in units of 256."""
    return kind.endswith("K") and kind != "Q2_K"


def rounded(x: Array, kind: str) -> Array:
    """Activations as the product sees them: what rounding loses of an uneven row is rounded too."""
    large = is_large(kind)
    first = once(x, large=large)
    second = once((x - first).astype(np.float32), large=large)
    return first + np.where(uneven(x, large=large)[:, None], second, 0)


def relative(actual: Array, expected: Array) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("kind", COMPILED_KINDS)
@pytest.mark.parametrize(("height", "odd"), [(80, 0), (37, 1)])
def test_a_product_is_that_of_the_stored_weights(library: Path, kind: str, height: int, odd: int) -> None:
    # One and a bit more than a unit of 256, in blocks of 32: single rows may take these by twos.
    width = 768 if kind.endswith(("K", "XS")) else 384 - 32 * odd
    stored = random_blocks(kind, height, width)
    x = np.random.default_rng(1).standard_normal((1, 150, width)).astype(np.float32)
    x[0, 3] = 0
    x[0, 5, :40:13] *= 1000
    run = session(
        library, "StoredMatMul", {"x": 1, "b": 1, "w": 2}, optional="b", types=[number(kind)], gated=0
    )
    y = run.run(None, {"x": x, "w": stored})[0]
    assert y.shape == (1, 150, height)
    weights = widened(kind, stored)
    live = [i for i in range(150) if i != 3]
    assert not y[0, 3].any()
    assert uneven(x[0], large=is_large(kind)).nonzero()[0].tolist() == [5]
    assert relative(y[0, live], rounded(x[0, live], kind) @ weights.T) < SINGLE
    huge, fine = x[0, 5].astype(np.float64), x[0, 5].copy()
    fine[:40:13] = 0  # what one rounding would have lost next to its neighbours
    assert np.abs(y[0, 5] - huge @ weights.T).max() < EIGHT_BITS * np.abs(fine @ weights.T).max()
    exact = x[0].astype(np.float64) @ weights.T
    assert np.linalg.norm(y[0] - exact) < EIGHT_BITS * np.linalg.norm(exact)
    for start, end in ((0, 1), (1, 3), (3, 7), (7, 40), (40, 57), (57, 150), (0, 129)):
        part = run.run(None, {"x": x[:, start:end], "w": stored})[0]
        assert np.array_equal(part[0], y[0, start:end]), "a row's result depends on its company"


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("filled", [0x00, 0x7F, 0x80, 0xFF])
def test_the_heaviest_sums_are_exact(library: Path, kind: str, filled: int) -> None:
    """Every code, scale and minimum at an end of its range, and activations as large as can be."""
    width, height = 512, 20
    stored = random_blocks(kind, height, width)
    size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    blocks = stored.reshape(-1, size)
    blocks[:, : size - 2] = np.where(
        np.arange(size - 2) < 4 * (kind != "Q6_K"), blocks[:, : size - 2], filled
    )
    if kind == "Q6_K":
        blocks[: len(blocks) // 2, 192:208] = 0x80
    else:
        blocks[:, size - 2 :] = filled
    x = np.ones((1, 9, width), np.float32)
    x[0, 1] = -1
    x[0, 2, ::2] = -1
    x[0, 3, 40:300] = 0
    x[0, 4, :32] *= 1000
    x[0, 5] = np.repeat(2.0 ** np.arange(16), 32)
    x[0, 6] = np.linspace(-3, 3, width)
    x[0, 7:] = np.random.default_rng(5).uniform(0.9, 1, (2, width))
    run = session(
        library, "StoredMatMul", {"x": 1, "b": 1, "w": 2}, optional="b", types=[number(kind)], gated=0
    )
    y = run.run(None, {"x": x, "w": stored})[0][0]
    expected = rounded(x[0], kind) @ widened(kind, stored).T
    reach = np.abs(rounded(x[0], kind)) @ np.abs(widened(kind, stored)).T
    assert (np.abs(y - expected) <= SINGLE * reach).all()
    for row in range(len(x[0])):
        assert np.array_equal(run.run(None, {"x": x[:, row : row + 1], "w": stored})[0][0, 0], y[row])


def test_projections_of_different_types_share_one_input_and_one_bias(library: Path) -> None:
    kinds, heights, width = ("Q4_K", "Q6_K", "Q8_0"), (64, 16, 24), 512
    tables = [random_blocks(kind, height, width) for kind, height in zip(kinds, heights, strict=True)]
    dice = np.random.default_rng(2)
    x = dice.standard_normal((1, 9, width)).astype(np.float32)
    bias = dice.standard_normal(sum(heights)).astype(np.float32)
    inputs = {"x": 1, "b": 1, "w0": 2, "w1": 2, "w2": 2}
    run = session(library, "StoredMatMul", inputs, types=[number(kind) for kind in kinds], gated=0)
    y = run.run(None, {"x": x, "b": bias, **{f"w{i}": table for i, table in enumerate(tables)}})[0]
    products = [
        rounded(x[0], kind) @ widened(kind, table).T for kind, table in zip(kinds, tables, strict=True)
    ]
    assert relative(y[0], np.concatenate(products, axis=1) + bias) < SINGLE


@pytest.mark.parametrize("biased", [True, False])
def test_a_gate_is_silu_times_the_other(library: Path, biased: bool) -> None:
    height, width = 48, 512
    gate, up = random_blocks("Q4_K", height, width, 0.4), random_blocks("Q5_K", height, width)
    dice = np.random.default_rng(3)
    x = dice.standard_normal((1, 21, width)).astype(np.float32)
    x[0, 0] *= 100  # where silu is flat, and where it is straight
    bias = dice.standard_normal(2 * height).astype(np.float32)
    inputs = {"x": 1, "b": 1, "w0": 2, "w1": 2}
    run = session(library, "StoredMatMul", inputs, optional="" if biased else "b", types=[12, 13], gated=1)
    feeds = {"x": x, "w0": gate, "w1": up} | ({"b": bias} if biased else {})
    y = run.run(None, feeds)[0]
    g, u = (rounded(x[0], kind) @ widened(kind, table).T for kind, table in (("Q4_K", gate), ("Q5_K", up)))
    if biased:
        g, u = g + bias[:height], u + bias[height:]
    with np.errstate(over="ignore"):
        assert relative(y[0], g / (1 + np.exp(-g)) * u) < SINGLE


@pytest.mark.parametrize("kind", COMPILED_KINDS)
def test_rows_of_a_table_are_the_stored_weights_themselves(library: Path, kind: str) -> None:
    width = 512 if kind.endswith(("K", "XS")) else 288
    stored = random_blocks(kind, 40, width)
    run = session(library, "StoredRows", {"ids": 7, "w": 2}, type=number(kind), width=width)
    ids = np.array([[0, 39, 7, 7]])
    assert np.array_equal(run.run(None, {"ids": ids, "w": stored})[0][0], widened(kind, stored)[ids[0]])
    with pytest.raises(Exception, match="outside of the vocabulary"):
        run.run(None, {"ids": np.array([[40]]), "w": stored})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "rows", "past", "window"),
    [
        (12, 2, 128, 5, 300, 0),
        (4, 4, 64, 1, 70, 0),
        (9, 3, 64, 40, 1010, 0),
        (6, 2, 80, 17, 2050, 0),
        (8, 1, 16, 3, 0, 0),
        (4, 2, 64, 40, 1100, 7),
        (4, 2, 64, 9, 2100, 300),
        (2, 1, 32, 70, 3, 64),
    ],
)
def test_attention_is_that_of_the_kept_keys_however_it_is_cut(
    library: Path, heads: int, kv_heads: int, width: int, rows: int, past: int, window: int
) -> None:
    dice = np.random.default_rng(4)
    capacity, group = whole_blocks(past + rows + 9), heads // kv_heads
    names = {"x": 1, "cos": 1, "sin": 1, "keys": 10, "values": 10, "last": 6}
    shape: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "scale": float(width**-0.5),
        "window": window,
    }
    run = session(library, "HalfAttention", names, **shape)
    angle = dice.uniform(0, 6, (capacity, width // 2))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    before = [dice.standard_normal((1, kv_heads, capacity, width)).astype(np.float16) for _ in range(2)]
    x = dice.standard_normal((1, rows, (heads + 2 * kv_heads) * width)).astype(np.float32)

    def attended(cuts: list[int]) -> tuple[Array, Array, Array]:
        keys, values = (each.copy() for each in before)
        found = []
        for start, end in zip([0, *cuts], [*cuts, rows], strict=True):
            last = np.array([past + end - 1], np.int32)
            feeds = {"x": x[:, start:end], "cos": cos, "sin": sin, "keys": keys, "values": values}
            found.append(run.run(None, {**feeds, "last": last})[0])
        return np.concatenate(found, axis=1), keys, values

    def by_token(blocks: Array) -> Array:
        """Keys as attention stores them, token by token: each block is transposed."""
        shape = (1, kv_heads, capacity // KEY_BLOCK, width, KEY_BLOCK)
        return blocks.reshape(shape).swapaxes(3, 4).reshape(1, kv_heads, capacity, width)

    y, keys, values = attended([])
    stored = keys
    keys = by_token(keys)
    split = x[0].reshape(rows, heads + 2 * kv_heads, width).astype(np.float64)
    place = np.arange(past, past + rows)

    def turned(vectors: Array) -> Array:
        a, b = vectors[..., : width // 2], vectors[..., width // 2 :]
        c, s = cos[place][:, None].astype(np.float64), sin[place][:, None].astype(np.float64)
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    queries = turned(split[:, :heads])
    kept = keys[0, :, past : past + rows].transpose(1, 0, 2).astype(np.float64)
    assert np.abs(kept - turned(split[:, heads : heads + kv_heads])).max() < 2e-3
    fresh = values[0, :, past : past + rows].transpose(1, 0, 2)
    assert np.array_equal(fresh, split[:, heads + kv_heads :].astype(np.float16))
    for each, old in ((keys, by_token(before[0])), (values, before[1])):
        assert np.array_equal(each[:, :, :past], old[:, :, :past]), "what was there is left alone"
        assert np.array_equal(each[:, :, past + rows :], old[:, :, past + rows :])
    for row in range(rows):
        for head in range(heads):
            end = past + row + 1
            seen = slice(max(end - window, 0) if window else 0, end)
            scores = keys[0, head // group, seen].astype(np.float64) @ queries[row, head] * width**-0.5
            weights = np.exp(scores - scores.max())
            expected = weights @ values[0, head // group, seen].astype(np.float64) / weights.sum()
            actual = y[0, row, head * width : (head + 1) * width]
            assert np.abs(actual - expected).max() < 2e-6
    for cuts in ([1], [2, 3], [rows - 1], list(range(1, rows))):
        if all(0 < cut < rows for cut in cuts):
            assert all(map(np.array_equal, attended(cuts), (y, stored, values)))


@pytest.mark.parametrize("seed", range(12))
def test_a_product_of_any_size_is_right_and_reads_nothing_outside_of_its_table(
    library: Path, seed: int
) -> None:
    """The table ends where a page ends that cannot be read behind: reading on would end the process."""
    dice = np.random.default_rng(seed)
    kind = KINDS[int(dice.integers(len(KINDS)))]
    values = 256 if kind.endswith(("K", "XS")) else 32
    width = values * int(dice.integers(1, 1 + 2048 // values))
    height, rows = int(dice.integers(16, 90)), int(dice.integers(1, 150))
    stored = random_blocks(kind, height, width, seed=seed)
    with fence_text(stored) as table:
        x = dice.standard_normal((1, rows, width)).astype(np.float32)
        run = session(
            library, "StoredMatMul", {"x": 1, "b": 1, "w": 2}, optional="b", types=[number(kind)], gated=0
        )
        y = run.run(None, {"x": x, "w": table})[0]
        gather = session(library, "StoredRows", {"ids": 7, "w": 2}, type=number(kind), width=width)
        last = gather.run(None, {"ids": np.array([[height - 1]]), "w": table})[0]
    weights = widened(kind, stored)
    assert relative(y[0], rounded(x[0], kind) @ weights.T) < SINGLE
    assert np.array_equal(last[0, 0], weights[-1])


@contextlib.contextmanager
def fence_text(array: Array) -> Iterator[Array]:
    """A copy whose last byte is the last of its page, with a page behind it that cannot be read."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    place = np.frombuffer(memory, np.uint8)
    copy = place[size - array.nbytes : size].reshape(array.shape)
    copy[...] = array
    address = place.ctypes.data + size
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert protect(address, page, 0) == 0
    try:
        yield copy
    finally:
        protect(address, page, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_weights_give_numbers_or_none_and_never_a_crash(library: Path, kind: str) -> None:
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    dice = np.random.default_rng(6)
    table = dice.integers(
        0, 256, (24, 512 // values * size), dtype=np.uint8
    )  # scales may be infinite or no numbers
    inputs = {"x": 1, "b": 1, "w0": 2, "w1": 2}
    run = session(library, "StoredMatMul", inputs, optional="b", types=[number(kind)] * 2, gated=1)
    x = dice.standard_normal((1, 3, 512)).astype(np.float32)
    x[0, 1, 7], x[0, 2, 9] = np.inf, np.nan
    assert run.run(None, {"x": x, "w0": table, "w1": table})[0].shape == (1, 3, 24)


def test_what_does_not_fit_is_an_error_and_not_a_crash(library: Path) -> None:
    x = np.zeros((1, 1, 512), np.float32)
    run = session(library, "StoredMatMul", {"x": 1, "b": 1, "w": 2}, optional="b", types=[12], gated=0)
    for table in (np.zeros((32, 287), np.uint8), np.zeros((32, 144), np.uint8), np.zeros((3, 288), np.uint8)):
        with pytest.raises(Exception, match="a table of StoredMatMul"):
            run.run(None, {"x": x, "w": table})
    with pytest.raises(Exception, match="storage type"):
        session(library, "StoredMatMul", {"x": 1, "b": 1, "w": 2}, optional="b", types=[16], gated=0)
    names = {"x": 1, "cos": 1, "sin": 1, "keys": 10, "values": 10, "last": 6}
    run = session(library, "HalfAttention", names, heads=2, kv_heads=1, scale=1.0, window=0)
    for capacity, last, positions, message in (
        (KEY_BLOCK, KEY_BLOCK, 99, "outside of its memory"),
        (KEY_BLOCK, 0, 99, "outside of its memory"),
        (KEY_BLOCK, -5, 99, "outside of its memory"),
        (KEY_BLOCK, 7, 4, "outside of its memory"),
        (KEY_BLOCK + 1, 7, 99, "whole blocks of keys"),
    ):
        table = np.zeros((positions, 8), np.float32)
        keys = np.zeros((1, 1, capacity, 16), np.float16)
        feeds = {"x": np.zeros((1, 2, 64), np.float32), "keys": keys, "values": keys.copy()}
        with pytest.raises(Exception, match=message):
            run.run(None, {**feeds, "cos": table, "sin": table, "last": np.array([last], np.int32)})
