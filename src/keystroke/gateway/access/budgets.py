"""What a key may spend in a calendar month (UTC), in tokens and in money.

The sums come from the usage that all gateways store, read again every few seconds, and what this gateway adds
in between. A key over its budget is refused before work is queued; what runs ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from keystroke.errors import RateLimited
from keystroke.gateway.access.keys import Key


class BudgetSpent(RateLimited):
    code = "budget_exceeded"


def month_start(now: float) -> float:
    """The beginning of the month of `now`."""
    day = datetime.fromtimestamp(now, UTC)
    return datetime(day.year, day.month, 1, tzinfo=UTC).timestamp()


def month_end(now: float) -> float:
    day = datetime.fromtimestamp(now, UTC)
    year, month = (day.year + 1, 1) if day.month == 12 else (day.year, day.month + 1)
    return datetime(year, month, 1, tzinfo=UTC).timestamp()


class MonthlyBudgets:
    """The budgets of all keys that have one."""

    def __init__(self) -> None:
        self._limits: dict[str, Key] = {}
        self._spent: dict[str, tuple[int, float]] = {}

    def update(self, keys: Iterable[Key], spent: Mapping[str, tuple[int, float]]) -> None:
        """Replace budgets and sums. `spent`: tokens and cost of this month by key id."""
        self._limits = {key.id: key for key in keys if key.monthly_tokens or key.monthly_cost}
        self._spent = dict(spent)

    def add(self, key_id: str, tokens: int, cost: float) -> None:
        if key_id in self._limits:
            before = self._spent.get(key_id, (0, 0.0))
            self._spent[key_id] = (before[0] + tokens, before[1] + cost)

    def check(self, key_id: str) -> None:
        """Raises BudgetSpent where the key's month is used up."""
        key = self._limits.get(key_id)
        if key is None:
            return
        tokens, cost = self._spent.get(key_id, (0, 0.0))
        what = ""
        if key.monthly_tokens and tokens >= key.monthly_tokens:
            what = f"{key.monthly_tokens:,} tokens"
        elif key.monthly_cost and cost >= key.monthly_cost:
            what = f"{key.monthly_cost:g} currency units"
        if what:
            now = time.time()
            days = math.ceil((month_end(now) - now) / 86_400)
            raise BudgetSpent(
                f"This key has spent its {what} of this month; it is renewed in {days} days, and "
                "`keystroke keys budget` changes it.",
                retry_after=month_end(now) - now,
            )
