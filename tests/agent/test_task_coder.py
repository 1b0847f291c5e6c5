"""A task done by a real small model: its place, its edit, its check, its undo. CODER_ENGINE names another
engine than the embedded one; MLX's CPU build takes about ten minutes with the 0.5B model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_task import CHECK, Desk

from coder_model import needed_coder
from keystroke.agent.chat.local import LocalChatModel
from keystroke.agent.loop import EndStatus
from keystroke.config import load_settings
from keystroke.engine.load import load_model

pytestmark = [pytest.mark.coder, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def chat() -> Iterator[LocalChatModel]:
    kind = os.environ.get("CODER_ENGINE", "onnx")
    settings = load_settings({"engine.kind": kind, "engine.context": 4096})
    model = load_model(needed_coder(), settings)
    assert type(model.engine).__module__ == f"keystroke.engine.{kind}.engine"
    with model.engine:
        yield LocalChatModel(model)


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_wrong_sum_is_mended_checked_and_taken_back(
    tmp_path: Path, chat: LocalChatModel, attempts: int
) -> None:
    desk = Desk(tmp_path)
    before = desk.project.tree()
    task = desk.task(chat, check=CHECK, attempts=attempts, max_tokens=200)
    ended = task.run("add in calc.py must give the sum of its two numbers")
    assert ended.status is EndStatus.DONE  # only what passes the check lands
    changed = {name for name, text in desk.project.tree().items() if before.get(name) != text}
    assert changed == {"calc.py"}
    assert "-    return a - b\n" in ended.diff
    assert sum(receipt.tokens for receipt in ended.receipts) > 0
    desk.project.journal.undo()
    assert desk.project.tree() == before
    assert not desk.left_behind()
