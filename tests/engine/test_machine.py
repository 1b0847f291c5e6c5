"""What a machine has, which models of the catalogue suit it, and what the catalogue states."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench.record import machine as recorded_machine

from keystroke.clients.cli.doctor import machine as reported_machine
from keystroke.config import BACKENDS
from keystroke.engine.builtin import BUILT_IN, CODER, load_catalogue
from keystroke.engine.machine import (
    Machine,
    NvidiaGpu,
    fit,
    look_up_machine,
    memory_bandwidth,
    recommend_deep,
)

LAPTOP = Machine(
    system="Linux",
    processor="a processor",
    architecture="x86_64",
    cores=4,
    memory_bytes=8_000_000_000,
    disk_bytes=200_000_000_000,
    bandwidth=2e10,
)
RTX = replace(LAPTOP, memory_bytes=64 << 30, gpu=NvidiaGpu("NVIDIA GeForce RTX 4090", 24564 << 20))


def test_every_entry_of_the_catalogue_states_what_a_user_must_know() -> None:
    named = {"coder", "coder-small", "qwen3-coder", "gpt-oss-20b", "qwen3.6-35b", "qwen3.6-27b"}
    assert named | {"mellum2", "glm-4.7-flash"} <= set(BUILT_IN)
    for model in BUILT_IN.values():
        assert model.repository if model.sha256 is None else re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert model.file.endswith(".gguf")
        assert model.licence
        assert model.memory_bytes > model.size
        assert 0 < model.read_bytes <= model.size
        assert model.active <= model.parameters
        assert set(model.engines) <= set(BACKENDS)
        assert model.repository or model.package_files


def test_an_unknown_key_in_a_catalogue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[[model]]\nname = "x"\ncolour = "red"\n')
    with pytest.raises(Exception, match="colour"):
        load_catalogue(tmp_path / "c.toml")


def test_a_mixture_runs_on_the_gpu_or_in_memory_and_else_says_how_much_it_needs() -> None:
    mixture = BUILT_IN["qwen3-coder"]
    assert fit(mixture, RTX).engine == "cuda"
    small = NvidiaGpu("NVIDIA GeForce RTX 4070", 12 << 30)
    assert fit(mixture, replace(RTX, gpu=small)).engine == "onnx"
    reason = fit(mixture, replace(LAPTOP, gpu=small)).reason
    assert reason == (
        "needs 31 GB of memory, or a GPU with 23; this machine has 8 and NVIDIA GeForce RTX 4070 with 13"
    )
    assert "C compiler" in str(fit(mixture, replace(RTX, gpu=None, compiler=False)).reason)
    assert fit(CODER, replace(LAPTOP, compiler=False)).reason is None


def test_a_gpu_may_need_more_memory_than_the_file() -> None:
    dense = BUILT_IN["qwen3.6-27b"]
    for size, engine in ((24, "onnx"), (32, "cuda")):
        gpu = NvidiaGpu("NVIDIA GeForce RTX 5090", size << 30)
        assert fit(dense, replace(RTX, gpu=gpu, memory_bytes=64_000_000_000)).engine == engine


def test_a_mac_with_its_engine_uses_it() -> None:
    mac = replace(LAPTOP, system="Darwin", engines=("mlx", "onnx"), memory_bytes=34_000_000_000)
    assert fit(CODER, mac).engine == "mlx"
    assert fit(BUILT_IN["qwen3.6-27b"], mac).engine == "mlx"


def test_memory_and_disk_limit_what_fits() -> None:
    assert fit(CODER, LAPTOP).reason is None
    assert (
        str(fit(CODER, replace(LAPTOP, memory_bytes=2 << 30)).reason)
        == "needs 3 GB of memory, or a GPU with 4; this machine has 2"
    )
    full = replace(LAPTOP, disk_bytes=10_000_000)
    assert "GB of disk" in str(fit(CODER, full).reason)
    assert fit(CODER, full, installed=True).reason is None


def test_a_file_that_nearly_fills_the_memory_runs_mapped_but_is_not_recommended() -> None:
    mixture = BUILT_IN["qwen3-coder"]
    small = replace(LAPTOP, memory_bytes=24 << 30)
    found = fit(mixture, small)
    assert (found.reason, found.engine, found.tight) == (None, "onnx", True)
    assert found.describe() == (
        "yes, mapped, on the onnx engine, about 8.7 tokens a second while other programs leave "
        "its 18.6 GB in memory, else at the speed of the disk"
    )
    recommended = recommend_deep([mixture, CODER], small)
    assert recommended is not None
    assert recommended.model is CODER
    assert not fit(mixture, replace(LAPTOP, memory_bytes=64 << 30)).tight
    assert fit(mixture, replace(LAPTOP, memory_bytes=20 << 30)).reason is not None
    mac = replace(small, system="Darwin", engines=("mlx", "onnx"))
    assert fit(mixture, mac).reason is not None, "MLX copies the weights"
    assert fit(mixture, replace(small, compiler=False)).reason is not None


def test_a_model_whose_architecture_no_engine_knows_never_fits() -> None:
    strange = replace(CODER, architecture="from-the-future")
    assert "no engine of this version runs its architecture" in str(fit(strange, RTX).reason)
    assert recommend_deep([strange], RTX) is None


def test_expected_speed_grows_with_bandwidth_up_to_what_the_cores_compute() -> None:
    speeds = [fit(CODER, replace(LAPTOP, bandwidth=rate)).speed for rate in (1e9, 1e10, 1e13)]
    assert speeds[0] is not None
    assert speeds[1] is not None
    assert speeds[0] < speeds[1]
    assert speeds[2] == pytest.approx(4 * 14 / CODER.active)
    assert fit(CODER, replace(LAPTOP, bandwidth=None)).speed is None


def test_where_all_are_slow_the_least_slow_one_is_recommended() -> None:
    found = recommend_deep(BUILT_IN.values(), replace(LAPTOP, bandwidth=1e8))
    assert found is not None
    assert found.model.name == "coder-small"


def test_a_noisy_measurement_does_not_change_the_recommendation_to_a_toy() -> None:
    for bandwidth in (7e9, 9e9, 1.4e10, 2e10):
        found = recommend_deep(BUILT_IN.values(), replace(LAPTOP, bandwidth=bandwidth))
        assert found is not None
        assert found.model.name == "coder"


def test_of_two_slow_ones_the_quicker_one_is_recommended() -> None:
    found = recommend_deep(
        BUILT_IN.values(), replace(LAPTOP, cores=2, memory_bytes=40 << 30, bandwidth=1.5e10)
    )
    assert found is not None
    assert found.model.name == "coder"


def test_this_machine_is_described_and_measured() -> None:
    here = look_up_machine(Path("/"), measure=False)
    assert here.cores >= 1
    assert here.memory_bytes > 1 << 28
    assert f"{here.cores} cores" in here.describe()
    assert memory_bandwidth() > 1e8


def test_a_speed_is_written_as_a_person_would() -> None:
    quick = replace(fit(CODER, LAPTOP), speed=213.4)
    assert quick.describe() == "yes, on the onnx engine, about 213 tokens a second"


def test_a_mac_s_chip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "sysctl"
    tool.write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo "Apple M4 Pro"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert reported_machine()["processor"] == "Apple M4 Pro"
    assert "Apple M4 Pro" in recorded_machine()
