"""What outlives a process: responses, usage with receipts, and keys.

Law: SQLAlchemy core, SQLite in WAL mode unless a URL says otherwise. Writes are handed to one thread that
commits them in batches, so they cost the event loop an append; reads run in a worker thread. A store that
fails is logged and never fails a response.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from keystroke.config import Settings
from keystroke.errors import ConfigError, NotFound
from keystroke.gateway.access.keys import Key
from keystroke.protocol.items import Item
from keystroke.protocol.response import Receipt, Response

log = logging.getLogger("keystroke.store")

_tables = sa.MetaData()

RESPONSES = sa.Table(
    "responses",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False, index=True),
    sa.Column("previous_id", sa.String(64)),
    sa.Column("input", sa.LargeBinary, nullable=False),
    sa.Column("response", sa.LargeBinary, nullable=False),
)

USAGE = sa.Table(
    "usage",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.String(64), nullable=False, index=True),
    sa.Column("key_name", sa.String(128), nullable=False),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("at", sa.Float, nullable=False, index=True),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("input_tokens", sa.Integer, nullable=False),
    sa.Column("reused_tokens", sa.Integer, nullable=False),
    sa.Column("output_tokens", sa.Integer, nullable=False),
    sa.Column("cost", sa.Float, nullable=False),
    sa.Column("first_token_ms", sa.Float, nullable=False),
    sa.Column("total_ms", sa.Float, nullable=False),
    sa.Column("receipt", sa.LargeBinary, nullable=False),
    # Work for live buffers is added up by the hour: so many in one row, its times their sums.
    sa.Column("responses", sa.Integer, nullable=False, server_default="1"),
    sa.Column("computed_tokens", sa.Integer, nullable=False, server_default="0"),
)
_SUMS = (
    "input_tokens",
    "reused_tokens",
    "computed_tokens",
    "output_tokens",
    "cost",
    "first_token_ms",
    "total_ms",
    "responses",
)

KEYS = sa.Table(
    "keys",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("revoked_at", sa.Float),
)

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
    def __init__(self, url: str, *, retention_days: int = 30) -> None:
        self.retention_days = retention_days
        try:
            parsed = sa.make_url(url)
            if parsed.get_backend_name() == "sqlite" and parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            if parsed.drivername == "postgresql":
                parsed = parsed.set(drivername="postgresql+psycopg")
            self._engine = sa.create_engine(parsed, pool_pre_ping=True)
            if parsed.get_backend_name() == "sqlite":
                sa.event.listen(self._engine, "connect", _tune_sqlite)
            _tables.create_all(self._engine)
            _bring_up_to_date(self._engine)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"server.database needs the driver {error.name}; install keystroke[postgres] for Postgres"
            ) from None
        except (sa.exc.SQLAlchemyError, OSError) as error:
            reason = getattr(error, "orig", None) or error
            raise ConfigError(f"server.database cannot be opened: {reason}; check the URL") from None
        self._instance = secrets.token_hex(8)  # other processes add up in rows of their own
        self._writes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    # Writes: an append now, a commit soon

    def save_response(self, key_id: str, items: Sequence[Item], response: Response) -> None:
        if self.retention_days:
            self._writes.put(("response", key_id, items, response))

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
        self._writes.put(("live" if live else "usage", identity, key_id, key_name, status, paid, time.time()))

    async def flush(self) -> None:
        """Wait until everything handed over so far is committed."""
        await asyncio.to_thread(self._flush)

    def close(self) -> None:
        self._writes.put(None)
        self._thread.join()
        self._engine.dispose()

    # Reads

    async def response(self, response_id: str) -> Stored | None:
        return await asyncio.to_thread(self._read_response, response_id)

    async def chain(self, response_id: str, longest: int = 1000) -> list[Stored]:
        """The response and its ancestors, oldest first; empty where it is not stored."""
        return await asyncio.to_thread(self._read_chain, response_id, longest)

    def delete_response(self, response_id: str) -> bool:
        self._flush()
        with self._engine.begin() as connection:
            done = connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.id == response_id))
        return done.rowcount > 0

    def usage(self, since: float = 0.0, key: str | None = None) -> list[UsageRow]:
        """By key and model, dearest first."""
        self._flush()
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
                    id=key.id, name=key.name, digest=key.digest, created_at=key.created_at, revoked_at=None
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
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(RESPONSES).where(RESPONSES.c.id == response_id)).first()
        if row is None:
            return None
        return Stored(row.key_id, _ITEMS.decode(row.input), _RESPONSE.decode(row.response))

    def _read_chain(self, response_id: str, longest: int) -> list[Stored]:
        chain: list[Stored] = []
        wanted: str | None = response_id
        while wanted is not None and len(chain) < longest:
            found = self._read_response(wanted)
            if found is None:
                return [] if not chain else chain[::-1]
            chain.append(found)
            wanted = found.response.previous_response_id
        return chain[::-1]

    def _flush(self) -> None:
        done = threading.Event()
        self._writes.put(done)
        if self._thread.is_alive():
            done.wait(30)

    def _write(self) -> None:
        purged = 0.0
        while True:
            batch = [self._writes.get()]
            while not self._writes.empty():
                batch.append(self._writes.get())
            rows: dict[sa.Table, dict[str, Mapping[str, Any]]] = {RESPONSES: {}, USAGE: {}}
            sums: dict[str, dict[str, Any]] = {}
            for entry in batch:
                if isinstance(entry, tuple) and entry[0] == "live":
                    self._add_up(sums, entry)
                elif isinstance(entry, tuple):
                    self._add_row(rows, entry)
            self._commit(rows, sums)
            if time.time() - purged > 3600:
                purged = time.time()
                self._purge()
            for entry in batch:
                if isinstance(entry, threading.Event):
                    entry.set()
            if None in batch:
                return

    def _add_row(self, rows: dict[sa.Table, dict[str, Mapping[str, Any]]], entry: tuple[Any, ...]) -> None:
        if entry[0] == "response":
            _, key_id, items, response = entry
            rows[RESPONSES][response.id] = {
                "id": response.id,
                "key_id": key_id,
                "created_at": time.time(),
                "previous_id": response.previous_response_id,
                "input": msgspec.json.encode(items),
                "response": msgspec.json.encode(response),
            }
            return
        rows[USAGE][entry[1]] = _usage_row(*entry[1:])

    def _add_up(self, sums: dict[str, dict[str, Any]], entry: tuple[Any, ...]) -> None:
        _, _, key_id, _, status, paid, at = entry
        kind = f"{self._instance}/{key_id}/{paid.model}/{paid.priority}/{status}/{int(at // 3600)}"
        identity = "live_" + hashlib.sha256(kind.encode()).hexdigest()[:48]
        row = _usage_row(identity, *entry[2:])
        held = sums.setdefault(identity, row)
        if held is not row:
            held.update({name: held[name] + row[name] for name in _SUMS})

    def _commit(
        self, rows: dict[sa.Table, dict[str, Mapping[str, Any]]], sums: Mapping[str, Mapping[str, Any]]
    ) -> None:
        try:
            with self._engine.begin() as connection:
                for table, entries in rows.items():
                    if entries:
                        # A response may be written twice (queued, then ended): the later one stands.
                        connection.execute(sa.delete(table).where(table.c.id.in_(list(entries))))
                        connection.execute(sa.insert(table), [dict(row) for row in entries.values()])
                for identity, row in sums.items():
                    added = {name: USAGE.c[name] + row[name] for name in _SUMS}
                    known = connection.execute(sa.update(USAGE).where(USAGE.c.id == identity).values(**added))
                    if not known.rowcount:
                        connection.execute(sa.insert(USAGE).values(**row))
        except Exception:
            log.exception("%d rows could not be stored", sum(map(len, rows.values())) + len(sums))

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


def _bring_up_to_date(engine: sa.Engine) -> None:
    """Add columns that a database made by an earlier version lacks."""
    known = {column["name"] for column in sa.inspect(engine).get_columns(USAGE.name)}
    with engine.begin() as connection:
        if "responses" not in known:
            connection.execute(sa.text("ALTER TABLE usage ADD COLUMN responses INTEGER NOT NULL DEFAULT 1"))
        if "computed_tokens" not in known:
            connection.execute(
                sa.text("ALTER TABLE usage ADD COLUMN computed_tokens INTEGER NOT NULL DEFAULT 0")
            )
            connection.execute(sa.text("UPDATE usage SET computed_tokens = input_tokens - reused_tokens"))


def _usage_row(
    identity: str, key_id: str, key_name: str, status: str, paid: Receipt, at: float
) -> dict[str, Any]:
    return {
        "id": identity,
        "key_id": key_id,
        "key_name": key_name,
        "model": paid.model,
        "at": at,
        "status": status,
        "input_tokens": paid.input_tokens,
        "reused_tokens": paid.reused_tokens,
        "computed_tokens": paid.computed_tokens,
        "output_tokens": paid.output_tokens,
        "cost": paid.cost,
        "first_token_ms": paid.first_token_ms,
        "total_ms": paid.total_ms,
        "receipt": msgspec.json.encode(paid),
        "responses": 1,
    }


def open_store(settings: Settings) -> Store:
    """The store that settings name; by default a file under paths.state."""
    url = settings.server.database or default_url(settings.paths.state)
    return Store(url, retention_days=settings.server.retention_days)


def _tune_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=5000")
    cursor.close()
