"""Shipped weights are compared with the checksums that came with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from keystroke.engine.checksums import NAME, verify_checksums
from keystroke.errors import ModelDamaged, NotFound


def test_whole_files_pass_and_a_changed_byte_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights")
    digest = hashlib.sha256(b"weights").hexdigest()
    (tmp_path / NAME).write_text(f"{digest}  model.gguf\n")
    assert verify_checksums(tmp_path) == ["model.gguf"]
    (tmp_path / "model.gguf").write_bytes(b"weightz")
    with pytest.raises(ModelDamaged, match=r"model\.gguf is not what was published"):
        verify_checksums(tmp_path)
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(ModelDamaged, match=r"model\.gguf is missing"):
        verify_checksums(tmp_path)


@pytest.mark.parametrize("text", ["", "nothing\n", "ab  model.gguf\n", f"{'0' * 64}  ../../etc/passwd\n"])
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ModelDamaged, match="not a list of checksums"):
        verify_checksums(tmp_path)


def test_without_a_list_nothing_can_be_compared(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no readable"):
        verify_checksums(tmp_path)
