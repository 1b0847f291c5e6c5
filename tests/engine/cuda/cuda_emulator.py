"""Runs the decode kernel's own source on a CPU: compiled with g++ against emulator.hpp.

A `Launcher` for tests. Slow by a factor of hundreds, so models must be tiny; exact in everything but
the last bits of exponentials. A kernel takes two seconds to compile and is kept under the system's temporary
folder, for all tests and all processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
import threading
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
_MEMORY = threading.local()
_BUILDS = Path(tempfile.gettempdir()) / "keystroke-emulated-kernels"


class EmulatedLauncher:
    """Kernels of a single row are used where `single` is set: each takes as long to compile as the other.
    With `stalls`, about once in so many rounds some warps are held back."""

    asynchronous = False
    single = False
    stalls = 0

    def __init__(self, plan: Plan) -> None:
        if program("g++") is None:
            pytest.skip("the emulator needs g++")
        self.blocks = plan.blocks
        self._plan = plan
        self._kernels: dict[tuple[int, bool, StepShape], ctypes.CDLL] = {}

    def launch(self, parameters: Parameters, bucket: Bucket, sparse: bool, shape: StepShape) -> None:
        if not self.single:
            shape, parameters.stages = "any", bucket.stages
        key = (bucket.tiles_n, sparse, shape)
        kernel = self._kernels.get(key)
        if kernel is None:
            kernel = self._kernels[key] = _build(self._plan.macros(*key), self._plan.target)
        shared = self._plan.target.shared_bytes
        assert (
            bucket.ring_offset + parameters.stages * self._plan.stage_bytes(bucket.tiles_n, shape) <= shared
        )
        kernel.stall(self.stalls)
        fault = _launch(kernel, parameters, self.blocks, shared)
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
        fault = _launch(self._kernel, parameters, self._blocks, self._shared)
        assert fault != 1, "the kernel's threads wait for each other"
        assert fault != 2, "the kernel ended before what it had asked for was there"


def _launch(kernel: ctypes.CDLL, parameters: ctypes.Structure, blocks: int, shared: int) -> int:
    """All kernels use the same memory for their threads' stacks and for what their blocks share."""
    wanted = kernel.room(blocks, shared)
    memory = getattr(_MEMORY, "memory", None)
    if memory is None or len(memory) < wanted:
        memory = _MEMORY.memory = ctypes.create_string_buffer(wanted)
    return int(kernel.launch(ctypes.byref(parameters), blocks, shared, memory))


def _build(macros: dict[str, str], target: Target, parts: Sequence[str] = DECODE_PARTS) -> ctypes.CDLL:
    source = kernel_source((_HERE / "emulator.hpp").read_text(), parts)
    source += (_HERE / "emulator_main.hpp").read_text()
    # Most kernels run a few times only: compiling them better takes longer than it saves.
    flags = ["-std=c++17", "-Og", "-fno-math-errno", "-fPIC", "-shared", "-ffp-contract=off", "-w"]
    flags += [
        f"-D{name}={value}" for name, value in {**macros, "BULK": int(target.capability >= (9, 0))}.items()
    ]
    name = hashlib.sha256("\0".join([source, *flags]).encode()).hexdigest()[:24]
    library = _BUILDS / f"{name}.so"
    if not library.exists():
        _BUILDS.mkdir(exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        subprocess.run(
            ["g++", *flags, "-x", "c++", "-", "-o", str(partial)], input=source, text=True, check=True
        )
        partial.replace(library)
    kernel = ctypes.CDLL(str(library))
    kernel.room.restype = ctypes.c_longlong
    return kernel
