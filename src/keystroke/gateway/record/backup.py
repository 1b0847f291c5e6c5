"""Backups of the store: compressed JSON lines with a count and a checksum at the end.

A backup is one consistent snapshot, written whole or not at all; a restore never overwrites a row. Budgets
are not included: they refill within a minute.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from keystroke.engine.library import Progress, no_progress
from keystroke.errors import InputError
from keystroke.gateway.record.store import Store
from keystroke.gateway.record.tables import KEYS, RESPONSES, USAGE

_TABLES = {table.name: table for table in (KEYS, USAGE, RESPONSES)}
_FORMAT = "keystroke-store-1"
_BATCH = 500
_LONGEST_LINE = 256 << 20  # characters; a stored conversation is far below


def write_backup(store: Store, file: Path, progress: Progress = no_progress) -> dict[str, int]:
    """Write every row to `file`, replacing it atomically. Returns the rows by table. Raises InputError where
    it cannot be written."""
    store.flush_now()
    draft = file.with_name(f".{file.name}.{os.getpid()}.part")
    counts = dict.fromkeys(_TABLES, 0)
    digest = hashlib.sha256()
    try:
        with (
            open(draft, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as raw,
            gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as out,
        ):

            def put(value: Any) -> None:
                line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
                digest.update(line)
                out.write(line)

            put({"format": _FORMAT})
            for done, (name, row) in enumerate(_rows(store), 1):
                put([name, row])
                counts[name] += 1
                if done % _BATCH == 0:
                    progress("writing", done, 0)
            out.write(json.dumps({"rows": counts, "sha256": digest.hexdigest()}).encode() + b"\n")
        os.replace(draft, file)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror}; choose another place") from None
    finally:
        draft.unlink(missing_ok=True)
    return counts


def read_backup(store: Store, file: Path, progress: Progress = no_progress) -> dict[str, int]:
    """Insert the rows of a backup that are missing, all or none. Returns their number by table. Raises
    InputError for a file that is not a complete backup."""
    _verify(file)
    counts = dict.fromkeys(_TABLES, 0)
    insert = postgresql.insert if store.engine.dialect.name == "postgresql" else sqlite.insert
    with store.engine.begin() as connection:
        done = 0
        for name, rows in _batches(file):
            table = _TABLES[name]
            values = [_from_json(table, row) for row in rows]
            added = connection.execute(insert(table).on_conflict_do_nothing(), values)
            counts[name] += max(0, added.rowcount)
            done += len(rows)
            progress("restoring", done, 0)
    return counts


def _rows(store: Store) -> Iterator[tuple[str, dict[str, Any]]]:
    """One snapshot of all tables."""
    level = "REPEATABLE READ" if store.engine.dialect.name == "postgresql" else "SERIALIZABLE"
    with store.engine.connect().execution_options(isolation_level=level) as connection, connection.begin():
        for name, table in _TABLES.items():
            found = connection.execution_options(yield_per=_BATCH).execute(sa.select(table))
            for row in found:
                yield name, {key: _to_json(value) for key, value in row._mapping.items()}


def _to_json(value: Any) -> Any:
    return {"b64": base64.b64encode(value).decode()} if isinstance(value, bytes | memoryview) else value


def _from_json(table: sa.Table, values: dict[str, Any]) -> dict[str, Any]:
    return {
        column.name: base64.b64decode(value["b64"]) if isinstance(value, dict) else value
        for column in table.columns
        if (value := values.get(column.name)) is not None or column.nullable
    }


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with gzip.open(file, "rb") as lines:
            while line := lines.readline(_LONGEST_LINE):
                yield line
    except FileNotFoundError:
        raise InputError(f"{file} does not exist; name a file that `keystroke store backup` wrote") from None
    except (OSError, EOFError) as error:
        raise InputError(f"{file} is not a complete backup: {error}") from None


def _verify(file: Path) -> None:
    """Check the whole file before any row of it is used."""
    digest, last, first = hashlib.sha256(), b"", b""
    for line in _lines(file):
        if last:
            digest.update(last)
        first = first or line
        last = line
    try:
        if json.loads(first) != {"format": _FORMAT}:
            raise ValueError
        intact = json.loads(last)["sha256"] == digest.hexdigest()
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{file} is not a backup of a Keystroke store") from None
    if not intact:
        raise InputError(f"{file} is damaged: its checksum does not agree; use another backup")


def _batches(file: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    batch: tuple[str, list[dict[str, Any]]] = ("", [])
    for line in _lines(file):
        values = json.loads(line)
        if not isinstance(values, list):
            continue
        name, row = values
        if name not in _TABLES:
            raise InputError(f"{file} holds a table {name!r:.60} that this release does not know")
        if name != batch[0] or len(batch[1]) >= _BATCH:
            if batch[1]:
                yield batch
            batch = (name, [])
        batch[1].append(row)
    if batch[1]:
        yield batch
