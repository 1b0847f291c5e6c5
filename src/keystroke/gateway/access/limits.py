"""Rate limits per key and model.

A bucket refills continuously; charging more than it holds raises RateLimited with the seconds to wait. Prompt
tokens are charged at the start and the real cost settled at the end, so a long answer is paid by the next
request and never cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from keystroke.errors import RateLimited

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
