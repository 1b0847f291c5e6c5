"""Twenty seconds of faulty clients, stores and clocks leave nothing behind; an hour is bench/soak.py."""

from __future__ import annotations

import pytest
from bench.soak import Soak


@pytest.mark.slow
async def test_connects_cancels_steers_drops_and_garbage_leak_nothing_and_each_request_ends_once() -> None:
    result = await Soak(seconds=20, clients=10).run()
    assert result["faults"] == []
    assert result["counts"]["terminal"] > 50
    assert {"canceller", "steerer", "dropper", "babbler", "slow_reader"} <= set(result["counts"])
