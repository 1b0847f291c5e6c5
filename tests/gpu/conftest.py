"""Kernels for all tests of this folder, compiled at once on every core before the first one runs."""

from __future__ import annotations

import pytest
from gpu_models import HOPPER, kernels

from keystroke.engine.cuda.driver import compile_all


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    if HOPPER:
        compile_all(kernels())
