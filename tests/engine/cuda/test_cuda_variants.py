"""Kernel variants against each other: what the bench compares and reports, on the emulator."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_emulator import EmulatedLauncher
from cuda_models import tiny_spec

from bench import kernel_variants
from keystroke.engine.checkpoint.spec import DeltaSpec

SPEAKS = "print(1); print(2, flush=True); import time; time.sleep({})"


class Clock:
    """In place of the GPU's: nothing took any time."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, _: Clock) -> float:
        return 0.5


class Launcher(EmulatedLauncher):
    def __init__(self, plan: Any, device: torch.device) -> None:
        super().__init__(plan)

    def use(self, variant: str) -> None: ...


def test_variants_take_turns_and_are_compared_by_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    together = kernel_variants.KernelCase(70, 3, together=True, launches=1)
    cases = (kernel_variants.KernelCase(70, launches=1), together)
    part = kernel_variants.KernelPart(tiny_spec(layers=1), cases)
    module: Any = kernel_variants
    changes = {"DEVICE": torch.device("cpu"), "blocks": lambda: 2, "VariantLauncher": Launcher, "ROUNDS": 2}
    for name, value in {
        **changes,
        "PARTS": {"tiny": part},
        "variants": lambda _, tried: ["", *tried],
    }.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    said = list(kernel_variants.measure("tiny", ["in_flight=16512"], {"0k, 3 sessions|in_flight=16512"}))
    begun = [row["begins"] for row in said if "begins" in row]
    both = ["0k, 1 rows|as it is", "0k, 1 rows|in_flight=16512"]
    assert begun == [*both, *both, *["0k, 3 sessions|as it is"] * 2]
    rows = kernel_variants.table([row for row in said if "begins" not in row])
    assert [(row["case"], row["variant"], row["same"], row["us"]) for row in rows] == [
        ("0k, 1 rows", "as it is", True, 500.0),
        ("0k, 1 rows", "in_flight=16512", True, 500.0),
        ("0k, 3 sessions", "as it is", True, 500.0),
    ]


def test_other_bits_are_said() -> None:
    row = {"part": "a", "case": "b", "variant": "c", "us": 2.0}
    (found,) = kernel_variants.table([{**row, "same": True}, {**row, "same": False, "us": 4.0}])
    assert (found["same"], found["us"], found["spread"]) == (False, 3.0, 2.0)


def test_phases_are_means_and_slowest_blocks_without_the_first_layer() -> None:
    spent = torch.ones(2, 3, len(kernel_variants.PHASES), dtype=torch.int64)
    spent[:, 0] = 1000
    spent[1, :, 7] = 5
    readings = torch.cat((torch.zeros(2, 1, dtype=torch.int64), spent.reshape(2, -1).cumsum(1)), 1)
    spec = tiny_spec(layers=3)
    found = kernel_variants.phases(readings, kernel_variants.KernelPart(spec, ()))
    assert found["7 gate/up"] == [3, 5]
    assert all(value == [1, 1] for name, value in found.items() if name != "7 gate/up")
    hybrid = replace(spec, delta=DeltaSpec(frozenset({0, 2}), 1, 2, 32, 64, 4))
    apart = kernel_variants.phases(readings, kernel_variants.KernelPart(hybrid, ()))
    assert apart == {**found, **{f"delta net: {name}": value for name, value in found.items()}}


def test_a_process_that_falls_silent_is_ended_and_what_it_said_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_variants, "SILENT_SECONDS", 0.3)
    assert list(kernel_variants.lines_of([sys.executable, "-c", SPEAKS.format(60)])) == ["1\n", "2\n", -9]
    assert list(kernel_variants.lines_of([sys.executable, "-c", SPEAKS.format(0)])) == ["1\n", "2\n", 0]
