"""The number of replicas that requests and tokens ask for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keystroke.scale.autoscaling import TOKENS, TokenPolicy


def context(requests: float, tokens: list[float], least: int = 1, most: int = 8) -> Any:
    return SimpleNamespace(
        total_num_requests=requests,
        aggregated_metrics={TOKENS: dict(enumerate(tokens))},
        capacity_adjusted_min_replicas=least,
        capacity_adjusted_max_replicas=most,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 16),
    )


@pytest.mark.parametrize(
    ("per_replica", "requests", "tokens", "wanted"),
    [
        (0, 8, [1_000_000], 1),  # few requests: tokens do not count without a target
        (0, 48, [], 3),
        (100_000, 8, [150_000, 150_000], 3),  # few and long
        (100_000, 48, [1_000], 3),  # many and short
        (100_000, 1, [5_000_000], 8),  # never more than allowed
        (100_000, 0, [0, 0], 1),
    ],
)
def test_the_larger_of_both_needs_decides(
    per_replica: int, requests: float, tokens: list[float], wanted: float
) -> None:
    assert TokenPolicy(per_replica)(context(requests, tokens)) == (wanted, {})
