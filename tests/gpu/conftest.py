"""Kernels for all tests of this folder, compiled at once on every core before the first one runs."""

from __future__ import annotations

import fcntl

import pytest
from gpu_models import HOPPER, kernels

from keystroke.engine.cuda.driver import cache_folder, compile_all


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    if not HOPPER:
        return
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "tests.lock").open("w") as lock:  # of several processes one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        compile_all(kernels())
