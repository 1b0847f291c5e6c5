"""The tables of the store, and opening the database.

A database of an earlier version is upgraded when it is opened. A SQLite file is readable by its owner only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from keystroke.errors import ConfigError

BUSY_TIMEOUT_MS = 5000  # how long SQLite waits for another process to finish writing

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
    sa.Column("size", sa.Integer, nullable=False, server_default="0"),  # bytes of both, for the quota
    sa.Column("runs_at", sa.String(128), nullable=False, server_default=""),  # the process that generates it
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
    # Usage of live buffers is summed by the hour: `responses` of them in one row.
    sa.Column("responses", sa.Integer, nullable=False, server_default="1"),
    sa.Column("computed_tokens", sa.Integer, nullable=False, server_default="0"),
)

KEYS = sa.Table(
    "keys",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(128), nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("revoked_at", sa.Float),
    sa.Column("priority", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Column("monthly_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("monthly_cost", sa.Float, nullable=False, server_default="0"),
)

# Columns added later: (table, definition, expression for existing rows).
_LATER = (
    (USAGE, "responses INTEGER NOT NULL DEFAULT 1", None),
    (USAGE, "computed_tokens INTEGER NOT NULL DEFAULT 0", "input_tokens - reused_tokens"),
    (RESPONSES, "size INTEGER NOT NULL DEFAULT 0", "length(input) + length(response)"),
    (RESPONSES, "runs_at VARCHAR(128) NOT NULL DEFAULT ''", None),
    (KEYS, "priority BOOLEAN NOT NULL DEFAULT FALSE", None),
    (KEYS, "monthly_tokens BIGINT NOT NULL DEFAULT 0", None),
    (KEYS, "monthly_cost FLOAT NOT NULL DEFAULT 0", None),
)


def open_database(url: str) -> sa.Engine:
    """The database with all tables and columns. Raises ConfigError in one sentence."""
    try:
        parsed = sa.make_url(url)
        sqlite = parsed.get_backend_name() == "sqlite"
        if sqlite and parsed.database:
            keep_private(Path(parsed.database), "server.database")
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        engine = sa.create_engine(parsed, pool_pre_ping=True)
        if sqlite:
            sa.event.listen(engine, "connect", _tune_sqlite)
        _tables.create_all(engine)
        _upgrade(engine)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"server.database needs the driver {error.name}; install keystroke[postgres] for Postgres"
        ) from None
    except (sa.exc.SQLAlchemyError, OSError) as error:
        reason = getattr(error, "orig", None) or error
        raise ConfigError(f"server.database cannot be opened: {reason}; check the URL") from None
    return engine


def keep_private(file: Path, what: str) -> None:
    """Create the file if needed, readable by its owner only; SQLite gives its companion files the same mode.
    Raises ConfigError where others can replace it, OSError where it cannot be created. `what`: the setting
    that names it."""
    folder = file.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = folder.stat().st_mode
    if os.name == "posix" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ConfigError(
            f"{what} lies in {folder}, which everybody may write to; `chmod o-w` it or choose another"
        )
    os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        file.chmod(0o600)


def _upgrade(engine: sa.Engine) -> None:
    known = {
        table.name: {column["name"] for column in sa.inspect(engine).get_columns(table.name)}
        for table in (RESPONSES, USAGE, KEYS)
    }
    with engine.begin() as connection:
        for table, definition, value in _LATER:
            name = definition.partition(" ")[0]
            if name in known[table.name]:
                continue
            connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))
            if value is not None:
                connection.execute(sa.text(f"UPDATE {table.name} SET {name} = {value}"))


def _tune_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # FULL: what was acknowledged survives a power cut. The writer commits batches, so a sync is shared.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    cursor.close()
