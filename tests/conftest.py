"""Settings all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from threading import current_thread, main_thread

import pytest
from hypothesis import settings

# A loaded machine is slow, not wrong: examples have no time limit of their own.
settings.register_profile("keystroke", deadline=None)
settings.load_profile("keystroke")

# Tests run two at a time on two cores: threads of torch that wait for each other by spinning would take the
# neighbour's core, and both would last twice as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests that import ONNX Runtime by themselves do so as the engine does: silenced (engine/onnx/__init__.py).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# What a shell puts in the background has Ctrl-C ignored, and hands that on to its children; tests that
# interrupt a program of ours must find it as it is at a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and current_thread() is main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would order by the number of tests alone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests begin first, then those with many tests: one that began last would keep a worker
    when the others have finished."""
    size = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -size[item.path]))


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the garbage collector need not look at it each time,
    which takes it a second."""
    gc.collect()
    gc.freeze()
