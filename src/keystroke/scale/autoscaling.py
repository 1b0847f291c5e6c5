"""When engine replicas are added: by requests under way, and by tokens in flight where a model sets a target.

Requests alone say little where prompts differ by a factor of a thousand: ten conversations of 30,000 tokens
fill a cache that holds a hundred short ones. Ray applies its delays and bounds to the result.
"""

from __future__ import annotations

from typing import Any

TOKENS = "tokens_in_flight"  # what replicas report


class TokenPolicy:
    """A Ray Serve autoscaling policy. `tokens_per_replica` 0: only requests count."""

    def __init__(self, tokens_per_replica: int = 0) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, ctx: Any) -> tuple[float, dict[str, Any]]:
        """The number of replicas wanted; fractions are rounded up by Ray."""
        replicas = ctx.total_num_requests / ctx.config.get_target_ongoing_requests()
        if self._tokens_per_replica:
            tokens = sum((ctx.aggregated_metrics or {}).get(TOKENS, {}).values())
            replicas = max(replicas, tokens / self._tokens_per_replica)
        least, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return min(max(replicas, least), most), {}
