"""Packed copies of a graph's matrices change no bit, and only matrices that every token reads are copied."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from family_models import TOKENS, engine_logits, engine_on, reference, write_gguf
from gguf.constants import GGMLQuantizationType

from keystroke.config import load_settings
from keystroke.engine.checkpoint import EMBEDDING, open_checkpoint
from keystroke.engine.onnx import packing
from keystroke.engine.onnx.native import operators_library
from keystroke.engine.onnx.stored import TYPES, stored_tables


def _packs(library: Path) -> bool:
    lanes: int = ctypes.CDLL(str(library)).packed_lanes()
    return lanes != 8  # those of AVX2


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "glm4_moe_lite"])
def test_packed_copies_change_no_bit(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, family, reference(family), GGMLQuantizationType.Q8_0)
    with engine_on(path, "stored", tmp_path / "cache") as engine:
        packed = engine_logits(engine, TOKENS, 100)
    monkeypatch.setattr(packing, "available_bytes", lambda: 0)
    with engine_on(path, "stored", tmp_path / "cache") as engine:
        assert np.array_equal(engine_logits(engine, TOKENS, 100), packed)


def test_experts_and_the_embedding_stay_mapped(tmp_path: Path) -> None:
    path, library = tmp_path / "model.gguf", operators_library(load_settings().paths.cache)
    if library is None or not _packs(library):
        pytest.skip("only products on ARM and with AVX-512 have packed matrices")
    write_gguf(path, "gpt_oss", reference("gpt_oss"), GGMLQuantizationType.Q8_0)
    with open_checkpoint(path) as checkpoint:
        tables = stored_tables(checkpoint)
        packed = packing.pack_tables(library, checkpoint, tables, 2)
        copied = {name for name in tables if packed[name] is not tables[name]}
    assert "lm_head.weight" in copied
    assert "model.layers.0.self_attn.q_proj.weight" in copied
    assert EMBEDDING not in copied
    assert not any(".experts." in name for name in copied)


@pytest.mark.parametrize("spare", [0, -1])
def test_copies_are_made_if_they_take_at_most_a_quarter_of_the_free_memory(
    spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, library = tmp_path / "model.gguf", operators_library(load_settings().paths.cache)
    if library is None or not _packs(library):
        pytest.skip("only products on ARM and with AVX-512 have packed matrices")
    write_gguf(path, "qwen3_moe", reference("qwen3_moe"), GGMLQuantizationType.Q8_0)
    with open_checkpoint(path) as checkpoint:
        tables = stored_tables(checkpoint)
        # Of Q8_0 a copy is as large as what is stored.
        copied = [name for name in tables if "_proj" in name and ".experts." not in name] + ["lm_head.weight"]
        needed = sum(tables[name].nbytes for name in copied)
        monkeypatch.setattr(packing, "available_bytes", lambda: 4 * needed + spare)
        packed = packing.pack_tables(library, checkpoint, tables, 2)
        assert all((packed[name] is tables[name]) == (spare < 0) for name in copied)
        types = dict.fromkeys(copied, TYPES["Q8_0"])
        fits = packing.has_memory_to_pack(ctypes.CDLL(str(library)), checkpoint.spec, tables, types)
        assert fits == (spare == 0)


def test_reading_ahead_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3_moe", reference("qwen3_moe"), GGMLQuantizationType.Q8_0)
    with open_checkpoint(path) as checkpoint:
        tables = stored_tables(checkpoint)
        before = {name: table.tobytes() for name, table in tables.items()}
        packing.read_ahead(tables)
        assert {name: table.tobytes() for name, table in tables.items()} == before
