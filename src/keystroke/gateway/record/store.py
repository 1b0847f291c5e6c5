"""The store: responses, usage with receipts, and keys.

SQLAlchemy core; SQLite in WAL mode unless a URL says otherwise. One thread commits writes in batches
(`writer.py`), so a write costs the event loop an append; reads run in worker threads and see uncommitted
writes too. A database that cannot be written is retried and never fails a response.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from keystroke.config import Settings
from keystroke.errors import NotFound, Unavailable
from keystroke.gateway.access.keys import Key
from keystroke.gateway.record.tables import KEYS, RESPONSES, USAGE, open_database
from keystroke.gateway.record.writer import FLUSH_SECONDS, ResponseRecord, StoreWriter, UsageRecord
from keystroke.protocol.faults import PreviousResponseNotFound
from keystroke.protocol.items import Item
from keystroke.protocol.response import Incomplete, Receipt, Response

log = logging.getLogger("keystroke.store")

T = TypeVar("T")

PURGE = 3600.0  # seconds between two purges; the clock must have run evenly in between
UNEVEN = 60.0  # seconds by which the wall clock may differ from the monotonic clock

_SUMS = ("responses", "input_tokens", "reused_tokens", "computed_tokens", "output_tokens", "cost")
_RESPONSE = msgspec.json.Decoder(Response)
_ITEMS = msgspec.json.Decoder(list[Item])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response with the input of its own turn; `response.previous_response_id` leads to earlier turns."""

    key_id: str
    items: list[Item]
    response: Response


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The usage of one key on one model."""

    key: str
    model: str
    responses: int
    input_tokens: int
    reused_tokens: int
    computed_tokens: int
    output_tokens: int
    cost: float
    first_token_ms: float
    total_ms: float


def default_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'gateway.db'}"


class Store:
    """`quota_mb`: the size of one key's responses; 0 means no limit."""

    def __init__(self, url: str, *, retention_days: int = 30, quota_mb: int = 0) -> None:
        self.retention_days = retention_days
        self.engine = open_database(url)
        self._writer = StoreWriter(self.engine, quota_mb << 20)
        self._me = f"{socket.gethostname()[:80]}:{os.getpid()}"
        self._clock = _ClockCheck()
        self._over = threading.Event()
        # Its own threads: reads that wait for a locked database block nothing else.
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="store-read")
        self._purging = threading.Thread(target=self._keep_purging, name="store-purge", daemon=True)
        self._purging.start()

    # Writes

    @property
    def failing(self) -> bool:
        """Whether the database cannot be written at the moment."""
        return self._writer.failing

    def save_response(
        self, key_id: str, items: Sequence[Item], response: Response, *, running: bool = False
    ) -> None:
        """`running`: it is still being generated, and `recover` marks it if this process ends before it."""
        if self.retention_days:
            stored = copy.copy(response) if running else response
            self._writer.put(ResponseRecord(key_id, items, stored, self._me if running else ""))

    def save_usage(
        self,
        identity: str,
        key_id: str,
        key_name: str,
        status: str,
        receipt: Receipt,
        *,
        live: bool = False,
    ) -> None:
        """One row per response; work for a live buffer comes several times a second, so `live` usage is
        summed by key and hour."""
        self._writer.put(UsageRecord(identity, key_id, key_name, status, receipt, time.time(), live))

    async def commit_response(self, key_id: str, items: Sequence[Item], response: Response) -> bool:
        """Save a response that has ended; whether it is committed. Calls that wait at the same time share a
        commit."""
        record = ResponseRecord(key_id, items, response) if self.retention_days else None
        return await self._flush_with(record)

    async def flush(self) -> bool:
        """Wait until everything queued so far was tried; whether it is committed."""
        return await self._flush_with(None)

    async def _flush_with(self, entry: ResponseRecord | None) -> bool:
        tried = asyncio.wrap_future(self._writer.begin_flush(entry))
        try:
            return await asyncio.wait_for(tried, FLUSH_SECONDS)
        except TimeoutError:
            return False

    async def run_in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking method of this store in one of its own threads."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *arguments)

    def flush_now(self) -> None:
        """`flush` for callers without a loop; blocking."""
        self._writer.flush()

    def close(self) -> None:
        self._over.set()
        self._readers.shutdown(wait=False)
        self._writer.close()
        self.engine.dispose()

    def recover(self) -> int:
        """Mark responses as `incomplete` that a process of this machine was generating when it ended. Call
        before serving. Returns their number."""
        r = RESPONSES.c
        with self.engine.begin() as connection:
            found = connection.execute(sa.select(r.id, r.response, r.runs_at).where(r.runs_at != "")).all()
            lost = [row for row in found if not self._may_run(row.runs_at)]
            for row in lost:
                response = _RESPONSE.decode(row.response)
                response.status = "incomplete"
                response.incomplete_details = Incomplete(reason="server_restarted")
                values = {"response": msgspec.json.encode(response), "runs_at": ""}
                connection.execute(sa.update(RESPONSES).where(r.id == row.id).values(**values))
        return len(lost)

    def _may_run(self, runs_at: str) -> bool:
        """Whether the process that generates a response may still run; assumed of other machines."""
        host, _, process = runs_at.rpartition(":")
        if host != self._me.rpartition(":")[0]:
            return True
        if runs_at == self._me or not process.isdecimal():
            return False
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return False
        except OSError:
            return True
        return True

    # Reads

    async def response(self, response_id: str) -> StoredResponse | None:
        return await self.run_in_thread(self._read_response, response_id)

    async def chain(self, response_id: str, longest: int = 1000) -> list[StoredResponse]:
        """The response and its ancestors, oldest first; empty where it is not stored."""
        return await self.run_in_thread(self._read_chain, response_id, longest)

    def delete_response(self, response_id: str) -> bool:
        """Raises Unavailable where the database cannot be written; the response then stays."""
        committed = self._writer.flush()
        try:
            with self.engine.begin() as connection:
                done = connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.id == response_id))
        except (sa.exc.OperationalError, sa.exc.InterfaceError, OSError):
            committed = False
        if not committed:
            raise Unavailable("The response could not be deleted, the database cannot be written; try again.")
        return done.rowcount > 0

    def usage(self, since: float = 0.0, key: str | None = None) -> list[UsageRow]:
        """By key and model, most expensive first."""
        self._writer.flush()
        u = USAGE.c
        query = (
            sa.select(
                u.key_name,
                u.model,
                *(sa.func.sum(u[name]) for name in _SUMS),
                sa.func.sum(u.first_token_ms) / sa.func.sum(u.responses),
                sa.func.sum(u.total_ms) / sa.func.sum(u.responses),
            )
            .where(u.at >= since)
            .group_by(u.key_name, u.model)
            .order_by(sa.func.sum(u.cost).desc(), u.key_name, u.model)
        )
        if key is not None:
            query = query.where(sa.or_(u.key_name == key, u.key_id == key))
        with self.engine.connect() as connection:
            rows: list[Any] = list(connection.execute(query))
        return [UsageRow(*row) for row in rows]

    # Keys, written at once

    def add_key(self, key: Key) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.insert(KEYS).values(asdict(key)))

    def keys(self) -> list[Key]:
        with self.engine.connect() as connection:
            rows = connection.execute(sa.select(KEYS).order_by(KEYS.c.created_at))
            return [Key(**row._mapping) for row in rows]

    def set_budget(self, name: str, tokens: int | None, cost: float | None) -> Key:
        """Change what a key may spend in a month, by id or name; None leaves a value. Raises NotFound."""
        key = self._live_key(name)
        values = {"monthly_tokens": tokens, "monthly_cost": cost}
        changed = {column: value for column, value in values.items() if value is not None}
        with self.engine.begin() as connection:
            connection.execute(sa.update(KEYS).where(KEYS.c.id == key.id).values(**changed))
        return replace(key, **changed)  # type: ignore[arg-type]

    def revoke_key(self, name: str) -> Key:
        """Revoke by id or name. Raises NotFound."""
        key = self._live_key(name)
        with self.engine.begin() as connection:
            connection.execute(sa.update(KEYS).where(KEYS.c.id == key.id).values(revoked_at=time.time()))
        return key

    def _live_key(self, name: str) -> Key:
        live = [k for k in self.keys() if k.revoked_at is None and name in (k.id, k.name)]
        if not live:
            raise NotFound(f"There is no live key called {name}; `keystroke keys list` shows them.")
        if len(live) > 1:
            raise NotFound(f"Several keys are called {name}; name one by its id.")
        return live[0]

    def spent(self, since: float, key_ids: Sequence[str]) -> dict[str, tuple[int, float]]:
        """Tokens computed and written, and cost, by key id."""
        if not key_ids:
            return {}
        u = USAGE.c
        tokens = sa.func.sum(u.computed_tokens + u.output_tokens)
        query = (
            sa.select(u.key_id, tokens, sa.func.sum(u.cost))
            .where(u.at >= since, u.key_id.in_(key_ids))
            .group_by(u.key_id)
        )
        with self.engine.connect() as connection:
            return {row[0]: (int(row[1] or 0), float(row[2] or 0.0)) for row in connection.execute(query)}

    # Internals

    def _read_response(self, response_id: str) -> StoredResponse | None:
        waiting = self._writer.pending.get(response_id)
        if waiting is not None:
            return StoredResponse(waiting.key_id, list(waiting.items), waiting.response)
        with self.engine.connect() as connection:
            row = connection.execute(sa.select(RESPONSES).where(RESPONSES.c.id == response_id)).first()
        if row is None:
            return None
        return StoredResponse(row.key_id, _ITEMS.decode(row.input), _RESPONSE.decode(row.response))

    def _read_chain(self, response_id: str, longest: int) -> list[StoredResponse]:
        chain: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            found = self._read_response(next_id) if len(chain) < longest else None
            if found is None and not chain:
                return []
            if found is None:
                raise PreviousResponseNotFound(
                    f"An earlier turn of {response_id:.80} was not stored or is no longer; "
                    "send the whole input without previous_response_id.",
                    param="previous_response_id",
                )
            chain.append(found)
            next_id = found.response.previous_response_id
        return chain[::-1]

    def _keep_purging(self) -> None:
        if self._recently_used():
            self._purge()
        while not self._over.wait(PURGE):
            if self._clock.ran_evenly():
                self._purge()
            else:
                log.warning("the clock was set; old responses are deleted once it has run evenly for a while")

    def _recently_used(self) -> bool:
        """Whether the newest response is recent enough that the clock is probably right."""
        try:
            with self.engine.connect() as connection:
                newest = connection.execute(sa.select(sa.func.max(RESPONSES.c.created_at))).scalar()
        except (sa.exc.SQLAlchemyError, OSError):
            return False
        return newest is not None and abs(time.time() - newest) < self.retention_days * 43_200

    def _purge(self) -> None:
        """Delete responses past their retention; usage stays, it contains no content."""
        if not self.retention_days:
            return
        try:
            with self.engine.begin() as connection:
                oldest = time.time() - self.retention_days * 86_400
                connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.created_at < oldest))
        except Exception:
            log.exception("old responses could not be deleted")


class _ClockCheck:
    """Detects changes of the wall clock: after a jump ahead every response would look old."""

    def __init__(self) -> None:
        self._day, self._passed = time.time(), time.monotonic()

    def ran_evenly(self) -> bool:
        """Whether the wall clock agreed with the monotonic clock since the last call."""
        day, passed = time.time(), time.monotonic()
        even = abs((day - self._day) - (passed - self._passed)) <= UNEVEN
        self._day, self._passed = day, passed
        return even


def open_store(settings: Settings) -> Store:
    """The configured store; by default a file under paths.state that only its user can read."""
    server = settings.server
    if server.database is None and os.name == "posix":
        settings.paths.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        if settings.paths.state.stat().st_mode & 0o077 and os.access(settings.paths.state, os.W_OK):
            settings.paths.state.chmod(0o700)
    url = server.database or default_url(settings.paths.state)
    return Store(url, retention_days=server.retention_days, quota_mb=server.stored_mb_per_key)
