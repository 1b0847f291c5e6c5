"""What outlives a process: responses, usage with receipts, and keys.

SQLAlchemy core, SQLite in WAL mode unless a URL says otherwise. Writes are handed to one thread that
commits them in batches (`writer.py`), so they cost the event loop an append; reads run in a worker thread and
find what is not yet committed too. A database that cannot be written is tried again, and never fails a
response.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from keystroke.config import Settings
from keystroke.errors import NotFound, Unavailable
from keystroke.gateway.access.keys import Key
from keystroke.gateway.record.tables import KEYS, RESPONSES, USAGE, open_database
from keystroke.gateway.record.writer import Kept, Spent, Writer
from keystroke.protocol.faults import PreviousResponseNotFound
from keystroke.protocol.items import Item
from keystroke.protocol.response import Incomplete, Receipt, Response

log = logging.getLogger("keystroke.store")

T = TypeVar("T")

PURGE = 3600.0  # seconds between two purges, and for which the clock must have run evenly before one
UNEVEN = 60.0  # seconds by which the clock may differ from what has passed

_RESPONSE = msgspec.json.Decoder(Response)
_ITEMS = msgspec.json.Decoder(list[Item])


@dataclass(frozen=True, slots=True)
class Stored:
    """A response with the input of its own turn; earlier turns hang on `response.previous_response_id`."""

    key_id: str
    items: list[Item]
    response: Response


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one key spent on one model."""

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
    """`quota_mb`: what one key's responses may take; 0 means no limit."""

    def __init__(self, url: str, *, retention_days: int = 30, quota_mb: int = 0) -> None:
        self.retention_days = retention_days
        self.durable = False  # other gateways answer from it: what was told to have ended must be in it
        self._engine = open_database(url)
        self._writer = Writer(self._engine, quota_mb << 20)
        self._me = f"{socket.gethostname()[:80]}:{os.getpid()}"
        self._clock = _EvenClock()
        self._over = threading.Event()
        # Threads of its own: reads that wait for a locked database hold up nothing else.
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="store-read")
        self._purging = threading.Thread(target=self._keep_purging, name="store-purge", daemon=True)
        self._purging.start()

    @property
    def engine(self) -> sa.Engine:
        """The database itself, for what is kept beside these tables."""
        return self._engine

    # Writes: an append now, a commit soon

    @property
    def failing(self) -> bool:
        """Whether the database cannot be written just now: what is handed over may not outlive the
        process."""
        return self._writer.failing

    def save_response(
        self, key_id: str, items: Sequence[Item], response: Response, *, running: bool = False
    ) -> None:
        """`running`: it is still being made here, and known to be lost if this process ends before it."""
        if self.retention_days:
            kept = copy.copy(response) if running else response
            self._writer.put(Kept(key_id, items, kept, self._me if running else ""))

    def save_usage(
        self,
        identity: str,
        key_id: str,
        key_name: str,
        status: str,
        paid: Receipt,
        *,
        live: bool = False,
    ) -> None:
        """One row for each response; work for a buffer that is being typed in (`live`) comes several times a
        second, so each key's is added up by the hour."""
        self._writer.put(Spent(identity, key_id, key_name, status, paid, time.time(), live))

    async def flush(self) -> bool:
        """Wait until everything handed over so far was tried; whether it is committed."""
        return await self.apart(self._writer.flush)

    async def apart(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking method of this store in one of its own threads."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *arguments)

    def flush_now(self) -> None:
        """`flush` for callers without a loop; blocking."""
        self._writer.flush()

    def close(self) -> None:
        self._over.set()
        self._readers.shutdown(wait=False)
        self._writer.close()
        self._engine.dispose()

    def recover(self) -> int:
        """Responses that a process of this machine was making when it ended are `incomplete` from now on.
        Call before serving. Returns how many."""
        r = RESPONSES.c
        with self._engine.begin() as connection:
            found = connection.execute(sa.select(r.id, r.response, r.runs_at).where(r.runs_at != "")).all()
            lost = [row for row in found if not self._alive(row.runs_at)]
            for row in lost:
                response = _RESPONSE.decode(row.response)
                response.status = "incomplete"
                response.incomplete_details = Incomplete(reason="server_restarted")
                values = {"response": msgspec.json.encode(response), "runs_at": ""}
                connection.execute(sa.update(RESPONSES).where(r.id == row.id).values(**values))
        return len(lost)

    def _alive(self, runs_at: str) -> bool:
        """Whether the process that makes a response may still be there; of other machines nothing is
        known."""
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

    async def response(self, response_id: str) -> Stored | None:
        return await self.apart(self._read_response, response_id)

    async def chain(self, response_id: str, longest: int = 1000) -> list[Stored]:
        """The response and its ancestors, oldest first; empty where it is not stored."""
        return await self.apart(self._read_chain, response_id, longest)

    def delete_response(self, response_id: str) -> bool:
        """Raises Unavailable where the database cannot be written: then it is still there."""
        kept = self._writer.flush()
        try:
            with self._engine.begin() as connection:
                done = connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.id == response_id))
        except (sa.exc.OperationalError, sa.exc.InterfaceError, OSError):
            kept = False
        if not kept:
            raise Unavailable("The response could not be deleted, the database cannot be written; try again.")
        return done.rowcount > 0

    def usage(self, since: float = 0.0, key: str | None = None) -> list[UsageRow]:
        """By key and model, dearest first."""
        self._writer.flush()
        u = USAGE.c
        query = (
            sa.select(
                u.key_name,
                u.model,
                sa.func.sum(u.responses),
                sa.func.sum(u.input_tokens),
                sa.func.sum(u.reused_tokens),
                sa.func.sum(u.computed_tokens),
                sa.func.sum(u.output_tokens),
                sa.func.sum(u.cost),
                sa.func.sum(u.first_token_ms) / sa.func.sum(u.responses),
                sa.func.sum(u.total_ms) / sa.func.sum(u.responses),
            )
            .where(u.at >= since)
            .group_by(u.key_name, u.model)
            .order_by(sa.func.sum(u.cost).desc(), u.key_name, u.model)
        )
        if key is not None:
            query = query.where(sa.or_(u.key_name == key, u.key_id == key))
        with self._engine.connect() as connection:
            return [UsageRow(*row) for row in connection.execute(query)]

    # Keys: rare, so written at once

    def add_key(self, key: Key) -> None:
        with self._engine.begin() as connection:
            connection.execute(
                sa.insert(KEYS).values(
                    id=key.id,
                    name=key.name,
                    digest=key.digest,
                    created_at=key.created_at,
                    revoked_at=None,
                    priority=key.priority,
                )
            )

    def keys(self) -> list[Key]:
        with self._engine.connect() as connection:
            rows = connection.execute(sa.select(KEYS).order_by(KEYS.c.created_at))
            return [Key(**row._mapping) for row in rows]

    def revoke_key(self, name: str) -> Key:
        """Revoke by id or name. Raises NotFound."""
        live = [k for k in self.keys() if k.revoked_at is None and name in (k.id, k.name)]
        if not live:
            raise NotFound(f"There is no live key called {name}; `keystroke keys list` shows them.")
        if len(live) > 1:
            raise NotFound(f"Several keys are called {name}; revoke by id.")
        with self._engine.begin() as connection:
            connection.execute(sa.update(KEYS).where(KEYS.c.id == live[0].id).values(revoked_at=time.time()))
        return live[0]

    # Inside

    def _read_response(self, response_id: str) -> Stored | None:
        waiting = self._writer.pending.get(response_id)
        if waiting is not None:
            return Stored(waiting.key_id, list(waiting.items), waiting.response)
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(RESPONSES).where(RESPONSES.c.id == response_id)).first()
        if row is None:
            return None
        return Stored(row.key_id, _ITEMS.decode(row.input), _RESPONSE.decode(row.response))

    def _read_chain(self, response_id: str, longest: int) -> list[Stored]:
        chain: list[Stored] = []
        wanted: str | None = response_id
        while wanted is not None:
            found = self._read_response(wanted) if len(chain) < longest else None
            if found is None and not chain:
                return []
            if found is None:
                raise PreviousResponseNotFound(
                    f"An earlier turn of {response_id:.80} was not stored or is no longer; "
                    "send the whole input without previous_response_id.",
                    param="previous_response_id",
                )
            chain.append(found)
            wanted = found.response.previous_response_id
        return chain[::-1]

    def _keep_purging(self) -> None:
        if self._recently_used():
            self._purge()
        while not self._over.wait(PURGE):
            if self._clock.even():
                self._purge()
            else:
                log.warning("the clock was set; old responses are deleted once it has run evenly for a while")

    def _recently_used(self) -> bool:
        """Whether the newest response is young enough that the clock is likely to be right."""
        try:
            with self._engine.connect() as connection:
                newest = connection.execute(sa.select(sa.func.max(RESPONSES.c.created_at))).scalar()
        except (sa.exc.SQLAlchemyError, OSError):
            return False
        return newest is not None and abs(time.time() - newest) < self.retention_days * 43_200

    def _purge(self) -> None:
        """Responses past their retention go; usage stays, it holds nothing of what was said."""
        if not self.retention_days:
            return
        try:
            with self._engine.begin() as connection:
                oldest = time.time() - self.retention_days * 86_400
                connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.created_at < oldest))
        except Exception:
            log.exception("old responses could not be deleted")


class _EvenClock:
    """Whether the time of day went on as time did since it was last asked: a clock that jumped ahead would
    make everything look old."""

    def __init__(self) -> None:
        self._day, self._passed = time.time(), time.monotonic()

    def even(self) -> bool:
        day, passed = time.time(), time.monotonic()
        even = abs((day - self._day) - (passed - self._passed)) <= UNEVEN
        self._day, self._passed = day, passed
        return even


def open_store(settings: Settings) -> Store:
    """The store that settings name; by default a file under paths.state, which is its user's alone."""
    server = settings.server
    if server.database is None and os.name == "posix":
        settings.paths.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        if settings.paths.state.stat().st_mode & 0o077 and os.access(settings.paths.state, os.W_OK):
            settings.paths.state.chmod(0o700)
    url = server.database or default_url(settings.paths.state)
    return Store(url, retention_days=server.retention_days, quota_mb=server.stored_mb_per_key)
