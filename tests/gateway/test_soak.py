"""A minute of bad manners leaves nothing behind; ten minutes of it are bench/soak.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


def soak() -> Any:
    """bench/soak.py as a module; its folder stays off the path."""
    file = Path(__file__).parents[2] / "bench" / "soak.py"
    spec = importlib.util.spec_from_file_location("gateway_soak", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["gateway_soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
async def test_connects_cancels_steers_drops_and_garbage_leak_nothing_and_each_request_ends_once() -> None:
    result = await soak().Soak(seconds=40, clients=10).run()
    assert result["faults"] == []
    assert result["counts"]["terminal"] > 50
    assert {"canceller", "steerer", "dropper", "babbler", "slow_reader"} <= set(result["counts"])
