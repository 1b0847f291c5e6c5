"""What a training run says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keystroke.errors import ModelDamaged
from keystroke_lab.training.run_log import append_row


def test_rows_are_kept_in_order_and_reported(tmp_path: Path) -> None:
    heard: list[dict[str, object]] = []
    for step in (1, 2):
        append_row(tmp_path, {"step": step, "loss": 1.0}, heard.append)
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == heard
    assert [row["step"] for row in heard] == [1, 2]


def test_a_loss_that_is_no_number_ends_the_run_after_it_was_kept(tmp_path: Path) -> None:
    with pytest.raises(ModelDamaged, match="no number at step 7"):
        append_row(tmp_path, {"step": 7, "loss": float("nan")})
    assert '"step": 7' in (tmp_path / "log.jsonl").read_text()
