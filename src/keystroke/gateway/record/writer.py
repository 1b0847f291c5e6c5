"""The thread that writes to the store: it commits batches, and retries until they are stored.

What was queued can be read from memory until it is committed. A database that is locked or full is retried
with growing pauses; `failing` is True meanwhile. A key over its quota loses its oldest responses, by a clock
that never runs backwards. A caller that waits for a row learns if it cannot be stored at all.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy as sa

from keystroke.gateway.record.tables import RESPONSES, USAGE
from keystroke.protocol.items import Item
from keystroke.protocol.response import Receipt, Response

log = logging.getLogger("keystroke.store")

FLUSH_SECONDS = 30.0  # that a caller waits for a commit
LAST_TRIES = 10.0  # seconds for uncommitted rows at shutdown
WAITING = 100_000  # usage rows kept in memory while the database cannot be written
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)
_RECEIPT_COLUMNS = (  # of usage
    "input_tokens",
    "reused_tokens",
    "computed_tokens",
    "output_tokens",
    "cost",
    "first_token_ms",
    "total_ms",
)
_SUMS = (*_RECEIPT_COLUMNS, "responses")


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response to be written."""

    key_id: str
    items: Sequence[Item]
    response: Response
    runs_at: str = ""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """Usage to be written. `live`: summed by the hour."""

    identity: str
    key_id: str
    key_name: str
    status: str
    receipt: Receipt
    at: float
    live: bool


@dataclass(slots=True)
class _Batch:
    responses: dict[str, ResponseRecord] = field(default_factory=dict)  # the latest write of an id
    usage: dict[str, dict[str, Any]] = field(default_factory=dict)
    sums: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)  # responses that can never be stored

    @property
    def rows(self) -> int:
        return len(self.responses) + len(self.usage) + len(self.sums)


class StoreWriter:
    """`quota`: bytes of responses stored for a key; 0 means no limit."""

    def __init__(self, engine: sa.Engine, quota: int = 0) -> None:
        self.pending: dict[str, ResponseRecord] = {}  # queued, not yet committed
        self.failing = False
        self._engine, self._quota = engine, quota
        self._stored_bytes: dict[str, int] = {}  # bytes by key, where counted
        self._latest = 0.0  # time of the newest row
        self._instance = secrets.token_hex(8)  # each process sums in its own rows
        self._queue: queue.SimpleQueue[ResponseRecord | UsageRecord | _Flush | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="store", daemon=True)
        self._thread.start()

    def put(self, entry: ResponseRecord | UsageRecord) -> None:
        """Queue an entry; it is committed soon."""
        if isinstance(entry, ResponseRecord):
            self.pending[entry.response.id] = entry
        self._queue.put(entry)

    def flush(self) -> bool:
        """Wait until everything queued so far was tried; whether it is committed."""
        tried = self.begin_flush()
        try:
            return self._thread.is_alive() and tried.result(FLUSH_SECONDS)
        except TimeoutError:
            return False

    def begin_flush(self, entry: ResponseRecord | None = None) -> Future[bool]:
        """Resolved once everything queued so far was tried, with whether it is committed. `entry` is queued
        with it, and then the result tells whether this response is committed."""
        if entry is not None:
            self.pending[entry.response.id] = entry
        tried: Future[bool] = Future()
        tried.set_running_or_notify_cancel()  # it is resolved when nobody waits any more, too
        self._queue.put(_Flush(tried, entry))
        return tried

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    # The thread

    def _work(self) -> None:
        batch, tries, deadline = _Batch(), 0, float("inf")
        while True:
            pause = _PAUSES[min(tries, len(_PAUSES)) - 1] if tries else None
            flushes, over = self._gather(batch, pause)
            if over:
                deadline = time.monotonic() + LAST_TRIES
            refused = batch.refused
            if not (batch.rows or refused) or self._commit(batch):
                self._drop_pending(batch)
                batch, tries, self.failing = _Batch(), 0, False
            else:
                tries, self.failing = tries + 1, True
            for flush in flushes:
                lost = flush.entry is not None and flush.entry.response.id in refused
                flush.tried.set_result(not self.failing and not lost)
            if deadline < float("inf") and (not (batch.rows or batch.refused) or time.monotonic() > deadline):
                if batch.rows:
                    log.error("%d rows could not be stored before the end", batch.rows)
                return

    def _gather(self, batch: _Batch, pause: float | None) -> tuple[list[_Flush], bool]:
        """Add queued entries to the batch; wait for the first one, at most `pause` seconds."""
        flushes: list[_Flush] = []
        try:
            entry = self._queue.get(timeout=pause)
            while True:
                if entry is None:
                    return flushes, True
                if isinstance(entry, _Flush):
                    flushes.append(entry)
                    if entry.entry is not None:
                        batch.responses[entry.entry.response.id] = entry.entry
                elif isinstance(entry, ResponseRecord):
                    batch.responses[entry.response.id] = entry
                elif batch.rows < WAITING:
                    self._add_usage(batch, entry)
                entry = self._queue.get_nowait()
        except queue.Empty:
            return flushes, False

    def _add_usage(self, batch: _Batch, usage: UsageRecord) -> None:
        row = _usage_row(usage)
        if not usage.live:
            batch.usage[usage.identity] = row
            return
        kind = (
            f"{self._instance}/{usage.key_id}/{usage.receipt.model}/{usage.receipt.priority}/{usage.status}"
            f"/{int(usage.at // 3600)}"
        )
        row["id"] = "live_" + hashlib.sha256(kind.encode()).hexdigest()[:48]
        summed = batch.sums.setdefault(row["id"], row)
        if summed is not row:
            summed.update({name: summed[name] + row[name] for name in _SUMS})

    def _commit(self, batch: _Batch) -> bool:
        """Whether the batch is done: committed, or failed in a way that a retry cannot help."""
        try:
            with self._engine.begin() as connection:
                self._write_responses(connection, batch)
                if batch.usage:
                    _replace(connection, USAGE, batch.usage)
                for identity, row in batch.sums.items():
                    added = {name: USAGE.c[name] + row[name] for name in _SUMS}
                    known = connection.execute(sa.update(USAGE).where(USAGE.c.id == identity).values(**added))
                    if not known.rowcount:
                        connection.execute(sa.insert(USAGE).values(**row))
        except (sa.exc.OperationalError, sa.exc.InterfaceError, OSError) as error:
            self._stored_bytes.clear()
            if not self.failing:
                log.error("the database cannot be written and is tried again: %s", error)
            return False
        except Exception:
            self._stored_bytes.clear()
            log.exception("%d rows could not be stored", batch.rows)
            return self._refuse(batch)
        return True

    def _refuse(self, batch: _Batch) -> bool:
        """Give up the rows of a batch that cannot be stored for an unexpected reason; delete what was stored
        of its responses while they ran. Whether that is done, too."""
        batch.refused.update(batch.responses)
        self._drop_pending(batch)
        batch.responses, batch.usage, batch.sums = {}, {}, {}
        try:
            with self._engine.begin() as connection:
                self._write_responses(connection, batch)
        except Exception:
            log.exception("what was stored of %d responses could not be deleted", len(batch.refused))
            return False
        return True

    def _write_responses(self, connection: sa.Connection, batch: _Batch) -> None:
        self._latest = max(self._latest, time.time())  # a clock set back must not make new rows the oldest
        rows = {identity: _response_row(entry, self._latest) for identity, entry in batch.responses.items()}
        if self._quota:
            for identity, row in tuple(rows.items()):
                if row["size"] > self._quota:
                    log.warning("a response of %d bytes is over its key's quota and not kept", row["size"])
                    batch.refused.add(identity)
                    del rows[identity]
        if batch.refused:  # what was stored of them while they ran would say forever that they run
            connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.id.in_(batch.refused)))
        if rows:
            _replace(connection, RESPONSES, rows)
        if self._quota:
            for key in {row["key_id"] for row in rows.values()}:
                self._make_room(connection, key, sum(r["size"] for r in rows.values() if r["key_id"] == key))

    def _make_room(self, connection: sa.Connection, key: str, added: int) -> None:
        r = RESPONSES.c
        stored = self._stored_bytes.get(key)
        if stored is not None:
            stored += added
        if stored is None or stored > self._quota:  # recount: replacing and deleting change it too
            total = connection.execute(sa.select(sa.func.sum(r.size)).where(r.key_id == key)).scalar()
            stored = int(total or 0)
        if stored > self._quota:
            deleted = []
            oldest = connection.execute(sa.select(r.id, r.size).where(r.key_id == key).order_by(r.created_at))
            for identity, size in oldest:
                if stored <= self._quota:
                    break
                deleted.append(identity)
                stored -= size
            connection.execute(sa.delete(RESPONSES).where(r.id.in_(deleted)))
            log.info("%d old responses of a key over its quota were deleted", len(deleted))
        self._stored_bytes[key] = stored

    def _drop_pending(self, batch: _Batch) -> None:
        for identity, entry in batch.responses.items():
            if self.pending.get(identity) is entry:
                del self.pending[identity]


@dataclass(frozen=True, slots=True)
class _Flush:
    tried: Future[bool]
    entry: ResponseRecord | None = None


def _replace(connection: sa.Connection, table: sa.Table, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Write rows, replacing those with the same id: a response is written when queued and when ended."""
    connection.execute(sa.delete(table).where(table.c.id.in_(list(rows))))
    connection.execute(sa.insert(table), [dict(row) for row in rows.values()])


def _response_row(entry: ResponseRecord, created_at: float) -> dict[str, Any]:
    items, response = msgspec.json.encode(entry.items), msgspec.json.encode(entry.response)
    return {
        "id": entry.response.id,
        "key_id": entry.key_id,
        "created_at": created_at,
        "previous_id": entry.response.previous_response_id,
        "input": items,
        "response": response,
        "size": len(items) + len(response),
        "runs_at": entry.runs_at,
    }


def _usage_row(usage: UsageRecord) -> dict[str, Any]:
    receipt = usage.receipt
    return {
        "id": usage.identity,
        "key_id": usage.key_id,
        "key_name": usage.key_name,
        "model": receipt.model,
        "at": usage.at,
        "status": usage.status,
        "receipt": msgspec.json.encode(receipt),
        "responses": 1,
        **{name: getattr(receipt, name) for name in _RECEIPT_COLUMNS},
    }
