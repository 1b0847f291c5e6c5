"""What a key may use: rates by model, and a budget of tokens and money in a calendar month (UTC).

A bucket refills continuously; charging more than it holds raises RateLimited with the seconds to wait. Prompt
tokens are charged at the start and the real cost settled at the end, so a long answer is paid by the next
request and never cut. The sums of a month come from the usage that all gateways store, read again every few
seconds, and what this gateway adds in between. A key over its budget is refused before work is queued; what
runs ends normally.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

from keystroke.errors import RateLimited
from keystroke.gateway.access.keys import Key

Clock = Callable[[], float]
RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}"
    for what in ("limit", "remaining", "reset")
    for unit in ("requests", "tokens")
)


@dataclass(frozen=True, slots=True)
class RateBudget:
    """0 means no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent)


class Permit(Protocol):
    """Permission to run one response; settled with its cost once it has ended."""

    def settle(self, spent: int) -> None:
        """A second call does nothing."""


@dataclass(slots=True)
class TokenBucket:
    """`capacity` per minute; settling may make the level negative, charging never does."""

    capacity: int
    level: float
    stamp: float

    def refill(self, now: float) -> None:
        self.level = min(self.capacity, self.level + (now - self.stamp) * self.capacity / 60.0)
        self.stamp = now

    def wait_for(self, amount: float) -> float:
        """Seconds until `amount` is available; an amount above the capacity waits for a full bucket."""
        return max(0.0, (min(amount, self.capacity) - self.level) * 60.0 / self.capacity)


@dataclass(slots=True)
class RateAccount:
    """One key's use of one model."""

    budget: RateBudget
    requests: TokenBucket | None
    tokens: TokenBucket | None
    running: int = 0
    touched: float = 0.0


@dataclass(slots=True)
class LocalPermit:
    """A permit of this process's own budgets."""

    account: RateAccount
    taken: int
    headers: dict[str, str] = field(default_factory=dict)
    settled: bool = False

    def settle(self, spent: int) -> None:
        if self.settled:
            return
        self.settled = True
        self.account.running -= 1
        if self.account.tokens is not None:
            self.account.tokens.level -= spent - self.taken


class RateLimiter:
    """The accounts of all keys. Accounts idle for an hour are dropped: their buckets are full again by
    then."""

    def __init__(self, budgets: dict[str, RateBudget], clock: Clock = time.monotonic) -> None:
        self._budgets = budgets
        self._clock = clock
        self._accounts: dict[tuple[str, str], RateAccount] = {}

    def admit(self, key: str, model: str, tokens: int) -> LocalPermit:
        """A permit for one response of `tokens` prompt tokens. Raises RateLimited."""
        now = self._clock()
        account = self._account(key, model, now)
        budget = account.budget
        if budget.concurrent and account.running >= budget.concurrent:
            raise concurrency_error(account.running, model)
        charge_buckets(account.requests, account.tokens, tokens, model, now)
        account.running += 1
        return LocalPermit(account, tokens, limit_headers(account.requests, account.tokens))

    def headers(self, key: str, model: str) -> dict[str, str]:
        """The current x-ratelimit headers; empty where nothing is limited."""
        account = self._account(key, model, self._clock())
        return limit_headers(account.requests, account.tokens)

    def _account(self, key: str, model: str, now: float) -> RateAccount:
        account = self._accounts.get((key, model))
        if account is None:
            self._drop_idle(now)
            budget = self._budgets.get(model, RateBudget())
            account = RateAccount(
                budget,
                requests=_full_bucket(budget.requests_per_minute, now),
                tokens=_full_bucket(budget.tokens_per_minute, now),
            )
            self._accounts[key, model] = account
        account.touched = now
        return account

    def _drop_idle(self, now: float) -> None:
        stale = [k for k, a in self._accounts.items() if not a.running and now - a.touched > 3600]
        for name in stale:
            del self._accounts[name]


def charge_buckets(
    requests: TokenBucket | None, tokens: TokenBucket | None, amount: int, model: str, now: float
) -> None:
    """Charge one request and `amount` tokens to the two buckets, or nothing. Raises RateLimited."""
    for bucket, charge, unit in ((requests, 1, "requests"), (tokens, amount, "tokens")):
        if bucket is None:
            continue
        bucket.refill(now)
        wait = bucket.wait_for(charge)
        if wait > 0:
            raise RateLimited(
                f"The limit of {bucket.capacity} {unit} a minute on {model} is reached; "
                f"try again in {math.ceil(wait)} s.",
                retry_after=wait,
            )
    if requests is not None:
        requests.level -= 1
    if tokens is not None:
        tokens.level -= amount


def concurrency_error(running: int, model: str) -> RateLimited:
    return RateLimited(
        f"{running} responses of this key already run on {model}; wait for one to end.", retry_after=1.0
    )


def limit_headers(requests: TokenBucket | None, tokens: TokenBucket | None) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, bucket in (("requests", requests), ("tokens", tokens)):
        if bucket is None:
            continue
        headers[f"x-ratelimit-limit-{name}"] = str(bucket.capacity)
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level)))
        headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_for(bucket.capacity):.3f}s"
    return headers


def _full_bucket(capacity: int, now: float) -> TokenBucket | None:
    return TokenBucket(capacity, float(capacity), now) if capacity else None


# Budgets of a month


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
