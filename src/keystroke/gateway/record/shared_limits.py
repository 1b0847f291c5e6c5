"""Budgets shared by several gateways: one row per key and model in their common database.

Every admission is one transaction that locks its row, so all gateways together admit exactly what one would.
The database's clock counts. The place of a running response is a lease: returned when the response ends, or
expired when its gateway is gone. Models without a budget are not stored here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from keystroke.errors import Unavailable
from keystroke.gateway.access.limits import (
    RateBudget,
    TokenBucket,
    charge_buckets,
    concurrency_error,
    limit_headers,
)

log = logging.getLogger("keystroke.limits")

_LEASE = 60.0  # seconds a running response counts after its gateway last renewed it
_THREADS = 4  # concurrent transactions of one gateway
_KNOWN = 10_000  # accounts whose headers are cached

_tables = sa.MetaData()

BUDGETS = sa.Table(
    "budgets",
    _tables,
    sa.Column("key_id", sa.String(64), primary_key=True),
    sa.Column("model", sa.String(256), primary_key=True),
    sa.Column("requests", sa.Float, nullable=False),
    sa.Column("tokens", sa.Float, nullable=False),
    sa.Column("stamp", sa.Float, nullable=False),
)
LEASES = sa.Table(
    "leases",
    _tables,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("key_id", sa.String(64), nullable=False),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("gateway", sa.String(32), nullable=False, index=True),
    sa.Column("until", sa.Float, nullable=False),
    sa.Index("leases_of_key", "key_id", "model"),
)


@dataclass(slots=True)
class SharedPermit:
    """A permit from a shared budget; settled in a background thread."""

    limits: SharedLimits
    key: str
    model: str
    budget: RateBudget
    taken: int
    lease: str | None
    settled: bool = False

    def settle(self, spent: int) -> None:
        if not self.settled:
            self.settled = True
            self.limits.settle_later(self, spent)


class SharedLimits:
    """The budgets in a store's database. `close` waits for pending settlements."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._postgres = engine.dialect.name == "postgresql"
        self._gateway = secrets.token_hex(8)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="limits")
        self._headers: dict[tuple[str, str], dict[str, str]] = {}
        self._renewed = 0.0
        _create_tables(engine)

    async def admit(self, key: str, model: str, budget: RateBudget, tokens: int) -> SharedPermit:
        """A permit for one response of `tokens` prompt tokens. Raises RateLimited, or Unavailable where the
        database does not answer."""
        loop = asyncio.get_running_loop()
        admission = loop.run_in_executor(self._pool, self._admit, key, model, budget, tokens)
        try:
            lease = await asyncio.shield(admission)
        except asyncio.CancelledError:  # no longer needed: return what was charged

            def settle_unused(ended: asyncio.Future[str | None]) -> None:
                if not ended.cancelled() and ended.exception() is None:
                    SharedPermit(self, key, model, budget, tokens, ended.result()).settle(0)

            admission.add_done_callback(settle_unused)
            raise
        except sa.exc.SQLAlchemyError:
            log.exception("a budget could not be read")
            raise Unavailable("The server cannot check this key's budget now; try again shortly.") from None
        return SharedPermit(self, key, model, budget, tokens, lease)

    def headers(self, key: str, model: str) -> dict[str, str]:
        """The x-ratelimit headers as of this gateway's last admission."""
        return self._headers.get((key, model), {})

    def settle_later(self, permit: SharedPermit, spent: int) -> None:
        try:
            self._pool.submit(self._settle, permit, spent)
        except RuntimeError:  # closed: the lease expires
            log.debug("settled after the end")

    def close(self) -> None:
        self._pool.shutdown(wait=True)

    # In the pool's threads

    def _admit(self, key: str, model: str, budget: RateBudget, tokens: int) -> str | None:
        with self._engine.begin() as connection:
            row, now = self._lock_account(connection, key, model, budget)
            requests, held = _buckets(row, budget)
            try:
                running = self._count_running(connection, key, model, now) if budget.concurrent else 0
                if budget.concurrent and running >= budget.concurrent:
                    raise concurrency_error(running, model)
                charge_buckets(requests, held, tokens, model, now)
            finally:
                if len(self._headers) > _KNOWN:
                    self._headers.clear()
                self._headers[key, model] = limit_headers(requests, held)
            connection.execute(
                sa.update(BUDGETS)
                .where(BUDGETS.c.key_id == key, BUDGETS.c.model == model)
                .values(requests=_level(requests), tokens=_level(held), stamp=now)
            )
            return self._add_lease(connection, key, model, now) if budget.concurrent else None

    def _settle(self, permit: SharedPermit, spent: int) -> None:
        try:
            with self._engine.begin() as connection:
                if permit.lease is not None:
                    connection.execute(sa.delete(LEASES).where(LEASES.c.id == permit.lease))
                if permit.budget.tokens_per_minute and spent != permit.taken:
                    # Not refilled here: the level is as of its stamp.
                    connection.execute(
                        sa.update(BUDGETS)
                        .where(BUDGETS.c.key_id == permit.key, BUDGETS.c.model == permit.model)
                        .values(tokens=BUDGETS.c.tokens - (spent - permit.taken))
                    )
        except sa.exc.SQLAlchemyError:
            log.exception("a response could not be settled")

    def _lock_account(
        self, connection: sa.Connection, key: str, model: str, budget: RateBudget
    ) -> tuple[sa.Row[Any], float]:
        """The account's row, locked for this transaction and created full if missing, and the time."""
        insert = postgresql.insert if self._postgres else sqlite.insert
        query = sa.select(BUDGETS).where(BUDGETS.c.key_id == key, BUDGETS.c.model == model)
        row = connection.execute(query.with_for_update()).first() if self._postgres else None
        if row is None:  # SQLite locks by writing, so it always takes this path
            full = {"requests": float(budget.requests_per_minute), "tokens": float(budget.tokens_per_minute)}
            new = insert(BUDGETS).values(key_id=key, model=model, stamp=self._now(connection), **full)
            connection.execute(new.on_conflict_do_nothing())
            row = connection.execute(query.with_for_update()).one()
        return row, max(self._now(connection), row.stamp)

    def _count_running(self, connection: sa.Connection, key: str, model: str, now: float) -> int:
        mine = sa.and_(LEASES.c.key_id == key, LEASES.c.model == model)
        connection.execute(sa.delete(LEASES).where(mine, LEASES.c.until < now))
        return connection.execute(sa.select(sa.func.count()).select_from(LEASES).where(mine)).scalar_one()

    def _add_lease(self, connection: sa.Connection, key: str, model: str, now: float) -> str:
        lease = secrets.token_hex(12)
        row = {"id": lease, "key_id": key, "model": model, "gateway": self._gateway, "until": now + _LEASE}
        connection.execute(sa.insert(LEASES).values(row))
        return lease

    def renew(self) -> None:
        """Extend this gateway's leases; call every few seconds. Blocking; errors are logged."""
        if time.monotonic() - self._renewed < _LEASE / 4:
            return
        self._renewed = time.monotonic()
        try:
            with self._engine.begin() as connection:
                until = self._now(connection) + _LEASE
                connection.execute(
                    sa.update(LEASES).where(LEASES.c.gateway == self._gateway).values(until=until)
                )
        except sa.exc.SQLAlchemyError:
            log.exception("leases could not be renewed")

    def _now(self, connection: sa.Connection) -> float:
        if not self._postgres:
            return time.time()
        return float(connection.execute(sa.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())


def _create_tables(engine: sa.Engine) -> None:
    """Create the tables; another gateway may do so at the same moment."""
    try:
        _tables.create_all(engine)
    except sa.exc.SQLAlchemyError:
        time.sleep(0.2)
        _tables.create_all(engine)


def _buckets(row: sa.Row[Any], budget: RateBudget) -> tuple[TokenBucket | None, TokenBucket | None]:
    def bucket(capacity: int, level: float) -> TokenBucket | None:
        return TokenBucket(capacity, min(level, float(capacity)), row.stamp) if capacity else None

    return bucket(budget.requests_per_minute, row.requests), bucket(budget.tokens_per_minute, row.tokens)


def _level(bucket: TokenBucket | None) -> float:
    return bucket.level if bucket is not None else 0.0
