"""What is said of GPUs that are none of NVIDIA's."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from keystroke.engine.cuda import backend
from keystroke.engine.unsupported_gpu import unsupported_gpu
from keystroke.errors import ModelError


def card(folder: Path, name: str, vendor: str) -> None:
    device = folder / name / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")


def test_an_amd_gpu_is_named_with_what_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert unsupported_gpu(tmp_path) is None
    card(tmp_path, "card0", "0x8086")
    assert unsupported_gpu(tmp_path) is None
    card(tmp_path, "card1", "0x1002")
    said = unsupported_gpu(tmp_path)
    assert said is not None
    assert said.startswith("AMD GPU")
    assert "embedded engine" in said
    assert "base_url" in said


@pytest.mark.parametrize(("processor", "named"), [("arm64", True), ("x86_64", False)])
def test_apple_silicon_is_named_with_what_to_use(
    processor: str, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: processor)
    said = unsupported_gpu()
    assert (said is not None and said.startswith("Apple GPU") and "MLX" in said) == named


def test_the_cuda_engine_says_it_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_DRIVERS", (tmp_path / "none",))
    monkeypatch.setattr(backend, "unsupported_gpu", lambda: "AMD GPU: use another")
    with pytest.raises(ModelError, match="use another"):
        backend.check_machine()
