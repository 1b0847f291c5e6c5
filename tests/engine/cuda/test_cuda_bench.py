"""The benchmark's rows, on the emulator: what they report, not how fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_models import tiny_engine, tiny_spec

ROWS = Path(__file__).resolve().parents[3] / "bench/cuda_rows"
COMMON = {"shape", "precision", "context", "mode", "tok_s", "fraction_of_limit", "peer_tok_s"}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROWS)])
    module = importlib.import_module("cuda_parts")
    for name, value in {"SETTLED": 1, "TOKENS": 2, "ROUNDS": 2, "LAUNCHES": 2}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)
    return module


@pytest.fixture
def run(parts: Any) -> Iterator[Any]:
    spec = tiny_spec(layers=1, context=512)
    with tiny_engine(spec, kv_tokens=2048, sparse="always") as engine:
        yield parts.Run(engine, 1e12)


def test_every_row_of_random_weights_reports_its_columns(
    parts: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []  # rows of each step that the host started
    start = run.engine._stepper.start

    def counted(rows: list[Any]) -> Any:
        given.append(sum(len(row.tokens) for row in rows))
        return start(rows)

    monkeypatch.setattr(run.engine._stepper, "start", counted)
    rows = {
        "decode": parts.decode(run, 60),
        "verify 16 rows": parts.verify(run, 60),
        "3 sessions together": parts.together(run, 40, 3),
        "first token after +16": parts.first_token(run, 64),
        "prefill": parts.prefill(run, 100, rounds=2),
    }
    assert [row["mode"] for row in rows.values()] == list(rows)
    assert all(set(row) >= COMMON and row["tok_s"] > 0 for row in rows.values())
    assert rows["decode"]["fraction_of_limit"] is not None
    assert (
        given.count(16) == 1 + 2 * 3 + 2
    )  # the kernel alone, two rounds of drafts, two times 16 typed tokens
    assert run.engine.sparse_steps == 0
    monkeypatch.setattr(parts, "SPARSE_FROM", 32)
    assert "times_dense" in parts.sparse_decode(run, 60)
    assert run.engine.sparse_steps > 0


def test_the_shapes_of_every_part_suit_the_kernel(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "blocks", lambda: 132)
    for part in parts.PARTS.values():
        assert part.kernels()
