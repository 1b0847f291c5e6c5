"""The real code model on a GPU: what fewer bits, drafts, 8-bit keys and sparse attention cost it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench.cuda_rows import coder_quality as quality
from gpu_models import DEVICE, needs_hopper

from coder_model import needed_coder
from keystroke.engine.cuda.engine import load_cuda
from keystroke.engine.cuda.plan import Precision
from keystroke.engine.tokenizer import load_tokenizer

pytestmark = [*needs_hopper, pytest.mark.coder, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def coder() -> Path:
    return needed_coder()


@pytest.fixture(scope="module")
def text(coder: Path) -> list[int]:
    return load_tokenizer(coder).encode(quality.source_text()[20_000:60_000])[: quality.TEXT]


@pytest.fixture(scope="module")
def exact(coder: Path, text: list[int]) -> torch.Tensor:
    found = quality.truth(coder, text, DEVICE)
    quality.freed()
    return found


@pytest.mark.parametrize(
    ("precision", "most"), [("bf16", 0.002), ("int8", 0.005), ("int4", 0.1), ("stored", 0.002)]
)
def test_the_model_says_what_its_file_says(
    coder: Path, text: list[int], exact: torch.Tensor, precision: Precision, most: float
) -> None:
    with load_cuda(coder, precision=precision, kv_tokens=16_384) as engine:
        alone = quality.divergence(engine, text, exact)
        behind = quality.divergence(engine, text, exact, len(text) // 2)
    assert 0 <= alone["kl"] < most
    assert 0 <= behind["kl"] < most


@pytest.mark.parametrize("precision", ["bf16", "stored"])
def test_fifty_answers_are_the_same_with_and_without_drafts(coder: Path, precision: Precision) -> None:
    for row in quality.draft_rows(coder, precision):
        assert row["same"] == row["answers"] == 50, row


# What leaving out keys may cost where it is never doubted ("always"), in nats a token.
LEFT_OUT = {8_192: 0.02, 24_576: 0.1, 120_000: 0.4}


@pytest.mark.parametrize("length", quality.LENGTHS)
def test_long_contexts_survive_eight_bits_and_chosen_keys(coder: Path, length: int) -> None:
    rows = {(row["kv"], row["attention"]): row for row in quality.long_rows(coder, length)}
    exact = rows["bf16", "dense"]["nll"]
    assert abs(rows["int8", "dense"]["nll"] - exact) < 0.02
    for kv in quality.KV_PRECISIONS:
        dense, sparse = rows[kv, "dense"], rows[kv, "sparse"]
        assert sparse["nll"] - dense["nll"] < LEFT_OUT[length]
        if length < 30_000:  # beyond, a model of this size hardly finds them itself
            assert dense["retrieved"] >= 4
            assert sparse["retrieved"] >= dense["retrieved"] - 2
