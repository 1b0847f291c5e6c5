"""Runs the decode kernel's own source on a CPU: compiled with g++ against emulator.hpp.

A `Launcher` for tests. Slow by a factor of thousands, so models must be tiny; exact in everything but
the last bits of exponentials.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from installed import program
from keystroke.engine.cuda.draft import DraftParameters, HeadPlan
from keystroke.engine.cuda.driver import DECODE_PARTS, DRAFT_PARTS, kernel_source
from keystroke.engine.cuda.plan import Bucket, Plan, StepShape
from keystroke.engine.cuda.step import Parameters
from keystroke.engine.cuda.target import Target

_HERE = Path(__file__).parent
_BUILDS = Path(tempfile.gettempdir()) / "keystroke-emulated-kernels"


class EmulatedLauncher:
    """Kernels of a single row are used where `single` is set: each takes as long to compile as the other."""

    asynchronous = False
    single = False

    def __init__(self, plan: Plan) -> None:
        if program("g++") is None:
            pytest.skip("the emulator needs g++")
        self.blocks = plan.blocks
        self._plan = plan
        self._kernels: dict[tuple[int, bool, StepShape], ctypes.CDLL] = {}

    def launch(self, parameters: Parameters, bucket: Bucket, sparse: bool, shape: StepShape) -> None:
        key = (bucket.tiles_n, sparse, shape if self.single else "any")
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = _build(self._plan.macros(*key), self._plan.target)
        shared = self._plan.target.shared_bytes
        assert bucket.ring_offset + bucket.stages * self._plan.stage_bytes(bucket.tiles_n) <= shared
        fault = kernel.launch(ctypes.byref(parameters), self.blocks, shared)
        assert fault != 1, "the kernel's threads wait for each other"
        assert fault != 2, "the kernel ended before what it had asked for was there"

    def draft_launcher(self, plan: HeadPlan) -> EmulatedDraftLauncher:
        return EmulatedDraftLauncher(plan)

    def check(self) -> None:
        raise AssertionError("the kernel ended without a result")

    def host_buffer(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32)


class EmulatedDraftLauncher:
    def __init__(self, plan: HeadPlan) -> None:
        self._blocks = plan.target.blocks
        target = plan.target.target
        self._kernel = _build({**plan.macros, "ENTRY": "draft_step"}, target, DRAFT_PARTS)
        self._shared = target.shared_bytes
        assert plan.ring_offset + plan.stages * plan.stage_bytes <= self._shared

    def launch(self, parameters: DraftParameters) -> None:
        fault = self._kernel.launch(ctypes.byref(parameters), self._blocks, self._shared)
        assert fault != 1, "the kernel's threads wait for each other"
        assert fault != 2, "the kernel ended before what it had asked for was there"


def _build(macros: dict[str, str], target: Target, parts: Sequence[str] = DECODE_PARTS) -> ctypes.CDLL:
    source = kernel_source((_HERE / "emulator.hpp").read_text(), parts)
    source += (_HERE / "emulator_main.hpp").read_text()
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-w"]
    flags += [f"-D{name}={value}" for name, value in {**macros, "BULK": int(target.bulk)}.items()]
    name = hashlib.sha256("\0".join([source, *flags]).encode()).hexdigest()[:24]
    library = _BUILDS / f"{name}.so"
    if not library.exists():
        _BUILDS.mkdir(exist_ok=True)
        text = library.with_suffix(".cpp")
        text.write_text(source)
        partial = library.with_suffix(f".{id(macros)}.partial")
        subprocess.run(["g++", *flags, str(text), "-o", str(partial)], check=True)
        partial.replace(library)
    return ctypes.CDLL(str(library))
