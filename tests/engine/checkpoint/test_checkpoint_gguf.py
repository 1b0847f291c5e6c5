from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_models import reference, saved, write_gguf
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keystroke.engine.checkpoint import (
    RopeSpec,
    gguf_header,
    inverse_frequencies,
    open_checkpoint,
    rope_tables,
)
from keystroke.engine.checkpoint.ggml_types import STORAGE_TYPES
from keystroke.errors import InputError, ModelDamaged, ModelError, UnsupportedModel


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_the_folder_it_was_made_from(tmp_path: Path, family: str, tied: bool) -> None:
    model = saved(tmp_path / "model", family, tie_word_embeddings=tied)
    write_gguf(tmp_path / "model.gguf", model, family)
    with open_checkpoint(tmp_path / "model") as folder, open_checkpoint(tmp_path / "model.gguf") as file:
        assert file.spec == folder.spec
        assert file.names() == folder.names()
        for name in folder.names():
            np.testing.assert_array_equal(file.tensor(name), folder.tensor(name), err_msg=name)


@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K]
)
def test_a_quantised_tensor_is_the_dequantised_rows_in_canonical_order(tmp_path: Path, kind: Kind) -> None:
    model = reference("llama", hidden_size=256, num_attention_heads=4, intermediate_size=256)
    if kind in (
        Kind.Q4_K,
        Kind.Q6_K,
    ):  # the package reads these but does not write them: any bytes are a valid block
        _write_random_blocks(tmp_path / "model.gguf", model, kind)
    else:
        write_gguf(tmp_path / "model.gguf", model, "llama", kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        down = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
        plain = stored["blk.0.ffn_down.weight"]
        np.testing.assert_array_equal(down, gguf.dequantize(plain.data, plain.tensor_type))
        queries = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
        paired = gguf.dequantize(stored["blk.0.attn_q.weight"].data, kind)
        for head in range(4):
            for pair in range(32):
                for half in range(2):
                    canonical, theirs = head * 64 + half * 32 + pair, head * 64 + pair * 2 + half
                    np.testing.assert_array_equal(queries[canonical], paired[theirs])
        assert checkpoint.raw("model.layers.0.self_attn.q_proj.weight")[1] == kind.name


def _write_random_blocks(path: Path, model: Any, kind: Kind) -> None:
    random = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    original = gguf.quantize

    def quantize(data: np.ndarray[Any, Any], _: Kind) -> np.ndarray[Any, Any]:
        blocks = random.integers(0, 256, (data.size // block, size), dtype=np.uint8)
        ends = (slice(208, 210),) if kind is Kind.Q6_K else (slice(0, 2), slice(2, 4))
        for end in ends:  # the block's float16 scales: small and finite
            blocks[:, end] = np.full((len(blocks), 1), 0.01, np.float16).view(np.uint8)
        return blocks.reshape(data.shape[0], -1)

    gguf.quantize = quantize
    try:
        write_gguf(path, model, "llama", kind)
    finally:
        gguf.quantize = original


def test_biases_of_a_llama_are_put_back_in_order_too(tmp_path: Path) -> None:
    model = reference("llama", attention_bias=True)
    write_gguf(tmp_path / "model.gguf", model, "llama")
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert checkpoint.spec.qkv_bias
        for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"):
            full = f"model.layers.1.self_attn.{name}"
            np.testing.assert_array_equal(checkpoint.tensor(full), model.state_dict()[full].numpy())


def test_rope_factors_in_the_file_equal_the_rule_that_made_them(tmp_path: Path) -> None:
    rule = RopeSpec(10_000.0, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    model = saved(tmp_path / "model", "llama")
    plain = open_checkpoint(tmp_path / "model").spec
    divisors = inverse_frequencies(plain) / inverse_frequencies(replace(plain, rope=rule))
    write_gguf(
        tmp_path / "model.gguf", model, "llama", tensors={"rope_freqs.weight": divisors.astype(np.float32)}
    )
    spec = open_checkpoint(tmp_path / "model.gguf").spec
    assert spec.rope.scaling == "llama3"
    for actual, expected in zip(
        rope_tables(spec, 256), rope_tables(replace(plain, rope=rule), 256), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize("values", [[1.0] * 7, [0.0] * 8, [float("nan")] * 8])
def test_unusable_rope_factors_are_damage(tmp_path: Path, values: list[float]) -> None:
    factors = np.array(values, np.float32)
    write_gguf(tmp_path / "model.gguf", reference("llama"), "llama", tensors={"rope_freqs.weight": factors})
    with pytest.raises(ModelDamaged, match="rotary factors"):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("extra", "expected", "context"),
    [
        ({"qwen2.rope.scaling.type": "none"}, RopeSpec(), 256),
        (
            {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0},
            RopeSpec(1e4, "linear", 2.0),
            256,
        ),
        ({"qwen2.rope.scale_linear": 4.0}, RopeSpec(1e4, "linear", 4.0), 256),
        (
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 256,
            },
            RopeSpec(1e4, "yarn", 4.0, 256, attention_factor=pytest.approx(1.1386294361)),  # type: ignore[arg-type]
            1024,
        ),
    ],
)
def test_scaling_keys_become_a_rope_spec(
    tmp_path: Path, extra: dict[str, Any], expected: RopeSpec, context: int
) -> None:
    write_gguf(tmp_path / "model.gguf", reference("qwen2"), "qwen2", extra=extra)
    spec = open_checkpoint(tmp_path / "model.gguf").spec
    assert (spec.rope, spec.context_length) == (expected, context)


@pytest.mark.parametrize(
    "extra",
    [
        {"llama.expert_count": 8},
        {"llama.rope.scaling.type": "longrope"},
        {"llama.rope.dimension_count": 8},
        {"llama.attention.sliding_window": 128},
    ],
)
def test_a_variant_we_cannot_compute_is_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    write_gguf(tmp_path / "model.gguf", reference("llama"), "llama", extra=extra)
    with pytest.raises(UnsupportedModel):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_split_file_reads_like_a_whole_one(tmp_path: Path) -> None:
    model = reference("qwen2")
    write_gguf(tmp_path / "whole.gguf", model, "qwen2")
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts" / "small.gguf", model, "qwen2", split=8)
    parts = sorted((tmp_path / "parts").glob("*.gguf"))
    assert len(parts) > 2
    with open_checkpoint(tmp_path / "whole.gguf") as whole:
        for given in (parts[0], parts[1], tmp_path / "parts"):
            with open_checkpoint(given) as checkpoint:
                assert checkpoint.spec == replace(whole.spec, name="small")
                for name in whole.names():
                    np.testing.assert_array_equal(checkpoint.tensor(name), whole.tensor(name))
    parts[1].unlink()
    with pytest.raises(ModelDamaged, match=f"lacks {parts[1].name}"):
        open_checkpoint(parts[0])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelDamaged, match="its name does not say which"):
        open_checkpoint(tmp_path / "renamed.gguf")


def test_another_architecture_is_refused_with_a_way_out(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", reference("llama"), "gemma2")
    with pytest.raises(UnsupportedModel, match=r"gemma2 .* Ollama or vLLM and add it as a remote model"):
        open_checkpoint(tmp_path / "model.gguf")


def test_gemma_4_is_refused_with_its_reason(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", reference("llama"), "gemma4")
    with pytest.raises(UnsupportedModel, match=r"heads of two sizes.* add it as a remote model"):
        open_checkpoint(tmp_path / "model.gguf")


def test_every_end_of_turn_token_is_an_end(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 100_000}
    write_gguf(tmp_path / "model.gguf", reference("qwen2"), "qwen2", extra=extra)
    spec = open_checkpoint(tmp_path / "model.gguf").spec
    assert (spec.bos, spec.eos) == (1, frozenset({2, 7}))


def test_a_folder_with_one_file_is_that_file_and_with_two_is_a_question(tmp_path: Path) -> None:
    write_gguf(tmp_path / "one.gguf", reference("llama"), "llama")
    assert open_checkpoint(tmp_path).spec.name == "one"
    write_gguf(tmp_path / "two.gguf", reference("llama"), "llama")
    with pytest.raises(InputError, match=r"one\.gguf"):
        open_checkpoint(tmp_path)


def test_arrays_stay_valid_after_the_checkpoint_is_closed(tmp_path: Path) -> None:
    model = reference("llama")
    write_gguf(tmp_path / "model.gguf", model, "llama")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    values = checkpoint.tensor("model.norm.weight")
    checkpoint.close()
    checkpoint.close()
    np.testing.assert_array_equal(values, model.state_dict()["model.norm.weight"].numpy())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, reference("llama", num_hidden_layers=1), "llama")
    return path.read_bytes()


def test_a_cut_file_is_damage_wherever_the_cut(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    header = gguf_data_start(whole)
    for cut in {*range(0, header, 11), *range(header, len(whole), len(whole) // 50), len(whole) - 33}:
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelDamaged):
            open_checkpoint(path)


def gguf_data_start(whole: bytes) -> int:
    return whole.index(b"output_norm.weight") + 200


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_header_bytes_never_raise_anything_but_our_errors(
    tmp_path: Path, whole: bytes, data: st.DataObject
) -> None:
    broken = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, gguf_data_start(whole)))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.gguf"
    path.write_bytes(broken)
    message = ""
    try:
        with open_checkpoint(path) as checkpoint:
            for name in checkpoint.names():
                checkpoint.tensor(name)
    except ModelError as error:
        message = str(error)
    assert not message or message.isprintable()


@pytest.mark.parametrize(
    "start",
    [
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 63, 1 << 63),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 60_000),
        struct.pack("<4sIQQQ", b"GGUF", 3, 1, 1, 1 << 62),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 1 << 23),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 77),
        struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + struct.pack("<Q1sI", 1, b"t", 1 << 30),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 0),
        struct.pack("<4sIQQ", b"GGML", 3, 0, 0),
        b"",
    ],
)
def test_absurd_counts_are_damage_and_cost_nothing(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(start + (bytes(4096) if start else b""))
    with pytest.raises(ModelDamaged):
        open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(("version", "word"), [(1, "version 1"), (3 << 24, "big-endian")])
def test_other_versions_are_refused_by_name(tmp_path: Path, version: int, word: str) -> None:
    (tmp_path / "model.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", version, 0, 0))
    with pytest.raises(UnsupportedModel, match=word):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_wrong_shape_is_damage(tmp_path: Path) -> None:
    model = reference("llama")
    model.config.intermediate_size = 96
    write_gguf(tmp_path / "model.gguf", model, "llama")
    with pytest.raises(ModelDamaged, match="has shape 128x64 where its configuration asks for 96x64"):
        open_checkpoint(tmp_path / "model.gguf")


def test_storage_types_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Kind}
    for number, told in theirs.items():
        assert STORAGE_TYPES.get(number, told) == told
    assert set(STORAGE_TYPES) >= {int(kind) for kind in (Kind.F32, Kind.BF16, Kind.Q4_K, Kind.Q8_0)}


def test_a_header_is_read_once_while_it_is_held_and_again_when_the_file_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, reference("llama"), "llama")
    reads = []
    plain = gguf_header.GGUFHeader

    class Counted(plain):  # type: ignore[valid-type,misc]
        def __init__(self, path: Path) -> None:
            reads.append(path)
            super().__init__(path)

    monkeypatch.setattr(gguf_header, "GGUFHeader", Counted)
    with gguf_header.cached_header(file):
        gguf_header.read_metadata(file)
        open_checkpoint(file).close()
        assert len(reads) == 1
    gguf_header.read_metadata(file)
    assert len(reads) == 2
    with gguf_header.cached_header(file):
        write_gguf(file, reference("llama"), "llama", extra={"general.author": "another"})
        assert gguf_header.read_metadata(file)["general.author"] == "another"
