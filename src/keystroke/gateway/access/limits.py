"""Budgets per key and per model, each independent of every other.

Counts and clocks, nothing of requests or sockets. A bucket refills continuously; taking more than it
holds raises RateLimited with the seconds until it would not. Tokens are taken at the start (what the prompt
holds) and settled at the end (what the answer cost), so a long answer is paid by the next request, not cut.
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
class Budget:
    """0 means no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0

    @property
    def limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent)


class Settles(Protocol):
    """Leave to run one response, given back once it has ended, with what it cost."""

    def settle(self, spent: int) -> None:
        """A second call does nothing."""


@dataclass(slots=True)
class Bucket:
    """`capacity` per minute; may go below zero by settlement, never by taking."""

    capacity: int
    level: float
    stamp: float

    def refill(self, now: float) -> None:
        self.level = min(self.capacity, self.level + (now - self.stamp) * self.capacity / 60.0)
        self.stamp = now

    def wait_for(self, amount: float) -> float:
        """Seconds until `amount` is there; an amount above the capacity waits for a full bucket."""
        return max(0.0, (min(amount, self.capacity) - self.level) * 60.0 / self.capacity)


@dataclass(slots=True)
class Account:
    """One key's use of one model."""

    budget: Budget
    requests: Bucket | None
    tokens: Bucket | None
    running: int = 0
    touched: float = 0.0


@dataclass(slots=True)
class Permit:
    """Leave to run one response. `settle` once, at its end."""

    account: Account
    taken: int
    headers: dict[str, str] = field(default_factory=dict)
    settled: bool = False

    def settle(self, spent: int) -> None:
        """Give the place back and pay what the response really cost. A second call does nothing."""
        if self.settled:
            return
        self.settled = True
        self.account.running -= 1
        if self.account.tokens is not None:
            self.account.tokens.level -= spent - self.taken


class Limits:
    """All accounts. Accounts idle for an hour are forgotten: their buckets are full again by then."""

    def __init__(self, budgets: dict[str, Budget], clock: Clock = time.monotonic) -> None:
        self._budgets = budgets
        self._clock = clock
        self._accounts: dict[tuple[str, str], Account] = {}

    def admit(self, key: str, model: str, tokens: int) -> Permit:
        """Leave for one response of `tokens` prompt tokens, or RateLimited."""
        now = self._clock()
        account = self._account(key, model, now)
        budget = account.budget
        if budget.concurrent and account.running >= budget.concurrent:
            raise too_many(account.running, model)
        take(account.requests, account.tokens, tokens, model, now)
        account.running += 1
        return Permit(account, tokens, self._headers(account))

    def headers(self, key: str, model: str) -> dict[str, str]:
        """The x-ratelimit headers as they stand; empty where nothing is limited."""
        return self._headers(self._account(key, model, self._clock()))

    def _account(self, key: str, model: str, now: float) -> Account:
        account = self._accounts.get((key, model))
        if account is None:
            self._forget_idle(now)
            budget = self._budgets.get(model, Budget())
            account = Account(
                budget,
                requests=_full(budget.requests_per_minute, now),
                tokens=_full(budget.tokens_per_minute, now),
            )
            self._accounts[key, model] = account
        account.touched = now
        return account

    def _forget_idle(self, now: float) -> None:
        stale = [k for k, a in self._accounts.items() if not a.running and now - a.touched > 3600]
        for name in stale:
            del self._accounts[name]

    def _headers(self, account: Account) -> dict[str, str]:
        return limit_headers(account.requests, account.tokens)


def take(requests: Bucket | None, tokens: Bucket | None, amount: int, model: str, now: float) -> None:
    """Take one request and `amount` tokens from both buckets, or nothing. Raises RateLimited."""
    for bucket, wanted, unit in ((requests, 1, "requests"), (tokens, amount, "tokens")):
        if bucket is None:
            continue
        bucket.refill(now)
        wait = bucket.wait_for(wanted)
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


def too_many(running: int, model: str) -> RateLimited:
    return RateLimited(
        f"{running} responses of this key already run on {model}; wait for one to end.", retry_after=1.0
    )


def limit_headers(requests: Bucket | None, tokens: Bucket | None) -> dict[str, str]:
    headers: dict[str, str] = {}
    for name, bucket in (("requests", requests), ("tokens", tokens)):
        if bucket is None:
            continue
        headers[f"x-ratelimit-limit-{name}"] = str(bucket.capacity)
        headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level)))
        headers[f"x-ratelimit-reset-{name}"] = f"{bucket.wait_for(bucket.capacity):.3f}s"
    return headers


def _full(capacity: int, now: float) -> Bucket | None:
    return Bucket(capacity, float(capacity), now) if capacity else None
