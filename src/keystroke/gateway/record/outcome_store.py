"""Outcomes of suggestions, in a SQLite file on this machine that only its owner can read.

Only this machine's command line and gateway open it, and nothing is sent anywhere. Saving never waits and
never raises: a file that cannot be written costs one log line. Texts that may contain a secret are not
stored, only their numbers. The oldest rows make room for new ones; deleted rows are not written again by a
running gateway.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from keystroke.analysis.audit.rules.secrets import holds_secret
from keystroke.assist.completion.tuning import BinCount, count_outcomes
from keystroke.config import Settings
from keystroke.errors import ConfigError
from keystroke.gateway.record.tables import keep_private

log = logging.getLogger("keystroke.learned")

NAME = "learned.db"
NEWEST = 2000  # outcomes per language and project that tune the threshold
WAITING = 1000  # outcomes that may wait to be written
_BUSY_TIMEOUT = 5.0  # seconds that SQLite waits for another process to finish writing
_ROW = 200  # bytes of a row without its texts, roughly

Fate = Literal["accepted", "partial", "typed", "rejected", "dismissed", "unseen_right", "unseen_wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestionOutcome:
    """One suggestion and what became of it. `worth`: how correct it was, from 0 to 1 (accepted and half
    rewritten is one half). `tunes`: whether it counts for tuning `confidence`. The texts are empty where
    they are not stored: the code before, the suggestion, the final text, the code after."""

    at: float
    project: str
    language: str
    model: str
    kind: Literal["completion", "next_edit"]
    extent: str
    confidence: float
    became: Fate
    shown: int  # characters
    taken: int
    worth: float
    tunes: bool = True
    path: str = ""
    prefix: str = ""
    suggestion: str = ""
    written: str = ""
    suffix: str = ""
    id: int = 0

    @property
    def size(self) -> int:
        return _ROW + sum(len(t.encode(errors="replace")) for t in self._texts())

    def _texts(self) -> tuple[str, ...]:
        return (self.path, self.prefix, self.suggestion, self.written, self.suffix)

    def without_text(self) -> SuggestionOutcome:
        return replace(self, path="", prefix="", suggestion="", written="", suffix="")


@dataclass(frozen=True, slots=True)
class OutcomeGroup:
    """Sums of one language in one project. `unseen`: computed and not shown."""

    language: str
    project: str
    shown: int
    accepted: int
    characters: int  # accepted ones
    unseen: int


_KINDS = {"int": "INTEGER", "float": "REAL", "bool": "INTEGER"}
_STORED = {f.name: _KINDS.get(str(f.type), "TEXT") for f in fields(SuggestionOutcome) if f.name != "id"}
_COLUMNS = tuple(_STORED)
_DECLARED = ", ".join(f"{name} {kind} NOT NULL" for name, kind in _STORED.items())
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS outcomes (id INTEGER PRIMARY KEY AUTOINCREMENT, size INTEGER NOT NULL,
  {_DECLARED});
CREATE INDEX IF NOT EXISTS outcomes_group ON outcomes (language, project, id);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class OutcomeStore:
    """Opens or creates the file. Raises ConfigError where it cannot be read or written."""

    def __init__(self, file: Path, *, max_mb: int = 32, named: bool = False, text: bool = True) -> None:
        self.file = file
        self._limit, self._named, self._text = max_mb << 20, named, text
        self._lock = threading.Lock()  # one connection for the writer and the readers
        self._writer: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._failed = self._closed = False
        with _config_errors(file):
            keep_private(file, "paths.state")
            self._base = sqlite3.connect(
                file, timeout=_BUSY_TIMEOUT, isolation_level=None, check_same_thread=False
            )
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA secure_delete=ON")  # deleted rows leave no bytes behind
            self._base.executescript(_SCHEMA)
            self._base.execute(
                "INSERT OR IGNORE INTO facts VALUES ('salt', ?), ('forgotten', '0'), ('paused', '0')",
                (secrets.token_hex(16),),
            )
            query = "SELECT value FROM facts WHERE name = 'salt'"
            self._salt = str(self._base.execute(query).fetchone()[0])
            self._size = self._total()

    # For the gateway

    def project(self, root: str | None) -> str:
        """The name under which outcomes of the project at `root` are stored; "-" without one."""
        if not root:
            return "-"
        if self._named:
            return root
        return hashlib.sha256(f"{self._salt}{root}".encode()).hexdigest()[:12]

    def save(self, outcome: SuggestionOutcome) -> None:
        """Queue it for the writing thread. Never raises."""
        if self._waiting >= WAITING or self._closed:
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "learned")
        self._waiting += 1
        self._writer.submit(self._write, outcome)

    def counts(self, language: str, project: str) -> tuple[list[BinCount], list[BinCount]]:
        """Counts of the newest suggestions in a language, and of one project in it; none where the file
        cannot be read."""
        try:
            with self._lock:
                return self._counts("language = ?", language), self._counts(
                    "language = ? AND project = ?", language, project
                )
        except sqlite3.Error as error:
            self._log_once(error)
            return count_outcomes(()), count_outcomes(())

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._closed = True
        if self._writer is not None:
            self._writer.shutdown()
        with self._lock:
            self._base.close()

    # For the command line

    def groups(self) -> list[OutcomeGroup]:
        """Raises ConfigError where the file cannot be read, like all methods below."""
        seen = "became NOT LIKE 'unseen%'"
        taken = "became IN ('accepted', 'partial')"
        with self._connection() as base:
            rows = base.execute(
                f"SELECT language, project, SUM({seen}), SUM({taken}), SUM(taken), SUM(NOT {seen}) "
                "FROM outcomes WHERE kind = 'completion' GROUP BY language, project ORDER BY 3 DESC"
            ).fetchall()
        return [OutcomeGroup(*row) for row in rows]

    def outcomes(
        self,
        *,
        language: str | None = None,
        project: str | None = None,
        number: int | None = None,
        limit: int = -1,
    ) -> list[SuggestionOutcome]:
        """Newest first."""
        where, values = _where(language, project, number=number)
        with self._connection() as base:
            rows = base.execute(
                f"SELECT {', '.join(_COLUMNS)}, id FROM outcomes{where} ORDER BY id DESC LIMIT ?",
                (*values, limit),
            ).fetchall()
        return [_outcome(row) for row in rows]

    def delete(
        self,
        *,
        language: str | None = None,
        project: str | None = None,
        before: float | None = None,
        number: int | None = None,
    ) -> int:
        """Delete matching outcomes, or all; returns their number. After deleting all, a running gateway does
        not add outcomes of earlier moments."""
        where, values = _where(language, project, before, number)
        with self._connection() as base:
            deleted = base.execute(f"DELETE FROM outcomes{where}", values).rowcount
            if not where:
                base.execute("UPDATE facts SET value = ? WHERE name = 'forgotten'", (str(time.time()),))
            base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            base.execute("VACUUM")
            base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._size = self._total()
        return deleted

    def set_paused(self, paused: bool) -> None:
        """Whether a running gateway stores outcomes."""
        with self._connection() as base:
            base.execute("UPDATE facts SET value = ? WHERE name = 'paused'", (str(int(paused)),))

    # Internals

    def _write(self, outcome: SuggestionOutcome) -> None:
        try:
            if not self._text or _has_secret(outcome):
                outcome = outcome.without_text()
            values = [getattr(outcome, name) for name in _COLUMNS]
            marks = ", ".join("?" * (len(_COLUMNS) + 1))
            with self._lock:
                done = self._base.execute(
                    f"INSERT INTO outcomes (size, {', '.join(_COLUMNS)}) SELECT {marks} WHERE ? > "
                    "(SELECT CAST(value AS REAL) FROM facts WHERE name = 'forgotten') "
                    "AND (SELECT value FROM facts WHERE name = 'paused') = '0'",
                    (outcome.size, *values, outcome.at),
                )
                if done.rowcount > 0:
                    self._size += outcome.size
                    self._make_room()
        except (sqlite3.Error, UnicodeError) as error:
            self._log_once(error)
        finally:
            self._waiting -= 1

    def _make_room(self) -> None:
        if self._size <= self._limit:
            return
        self._size = self._total()  # another process may have deleted some
        over = self._size - self._limit * 9 // 10
        if self._size > self._limit:
            last = 0
            for number, size in self._base.execute("SELECT id, size FROM outcomes ORDER BY id"):
                if over <= 0:
                    break
                last, over = number, over - size
            self._base.execute("DELETE FROM outcomes WHERE id <= ?", (last,))
            self._size = self._total()

    def _counts(self, where: str, *values: str) -> list[BinCount]:
        rows = self._base.execute(
            f"SELECT confidence, worth FROM outcomes WHERE tunes AND kind = 'completion' AND {where} "
            "ORDER BY id DESC LIMIT ?",
            (*values, NEWEST),
        )
        return count_outcomes(rows.fetchall())

    def _total(self) -> int:
        return int(self._base.execute("SELECT TOTAL(size) FROM outcomes").fetchone()[0])

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with _config_errors(self.file), self._lock:
            yield self._base

    def _log_once(self, error: Exception) -> None:
        if not self._failed:
            log.warning("outcomes of suggestions are not stored: %s", error)
        self._failed = True


@contextmanager
def _config_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(
            f"{file} cannot be used ({error}); `keystroke cache --clear learned` removes it"
        ) from None


def outcome_file(settings: Settings) -> Path:
    return settings.paths.state / NAME


def open_outcome_store(settings: Settings) -> OutcomeStore:
    """The configured file. Raises ConfigError."""
    about = settings.learn
    return OutcomeStore(
        outcome_file(settings), max_mb=about.max_mb, named=about.projects == "named", text=about.text
    )


def _has_secret(outcome: SuggestionOutcome) -> bool:
    """Checks the texts joined: a literal may span two of them."""
    before, after = outcome.prefix, outcome.suffix
    return holds_secret(before + outcome.written + after) or holds_secret(before + outcome.suggestion + after)


def _where(
    language: str | None, project: str | None, before: float | None = None, number: int | None = None
) -> tuple[str, Sequence[Any]]:
    clauses = {"language = ?": language, "project = ?": project, "at < ?": before, "id = ?": number}
    used = {clause: value for clause, value in clauses.items() if value is not None}
    return (f" WHERE {' AND '.join(used)}" if used else ""), tuple(used.values())


def _outcome(row: Sequence[Any]) -> SuggestionOutcome:
    values = dict(zip((*_COLUMNS, "id"), row, strict=True))
    values["tunes"] = bool(values["tunes"])
    return SuggestionOutcome(**values)
