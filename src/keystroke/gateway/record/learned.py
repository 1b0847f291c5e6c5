"""What became of suggestions, kept in a file of its owner's alone on this machine.

Nobody but the command line and the gateway of this machine opens it, and nothing here sends anything.
Keeping never waits and never fails the one who keeps: a file that cannot be written costs a line in the log.
A text that may hold a secret is not kept, only its numbers. The oldest make room; what was forgotten stays
so, also where a gateway still runs.
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
from keystroke.assist.completion.tuning import Count, counted
from keystroke.config import Settings
from keystroke.errors import ConfigError
from keystroke.gateway.record.tables import keep_private

log = logging.getLogger("keystroke.learned")

NAME = "learned.db"
NEWEST = 2000  # outcomes of a language, or of a project in it, that the threshold is tuned by
WAITING = 1000  # outcomes that may wait to be written
_PATIENCE = 5.0  # seconds that SQLite waits for another process to finish writing
_ROW = 200  # bytes of a row's numbers, about

Became = Literal["accepted", "partial", "typed", "rejected", "dismissed", "unseen_right", "unseen_wrong"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One suggestion and its fate. `worth`: how right it was, from 0 to 1 (what was taken and half rewritten
    was half right). `tunes`: whether that says something about `confidence`. The texts are empty where they
    are not kept: the code before, what was suggested, what stood there in the end, the code after."""

    at: float
    project: str
    language: str
    model: str
    kind: Literal["completion", "next_edit"]
    extent: str
    confidence: float
    became: Became
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

    def without_text(self) -> Outcome:
        return replace(self, path="", prefix="", suggestion="", written="", suffix="")


@dataclass(frozen=True, slots=True)
class Group:
    """Outcomes of one language in one project, added up. `unseen`: computed and not shown."""

    language: str
    project: str
    shown: int
    accepted: int
    characters: int  # accepted ones
    unseen: int


_COLUMNS = tuple(f.name for f in fields(Outcome) if f.name != "id")
_KINDS = {"int": "INTEGER", "float": "REAL", "bool": "INTEGER"}
_DECLARED = ", ".join(
    f"{f.name} {_KINDS.get(str(f.type), 'TEXT')} NOT NULL" for f in fields(Outcome) if f.name != "id"
)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS outcomes (id INTEGER PRIMARY KEY AUTOINCREMENT, size INTEGER NOT NULL,
  {_DECLARED});
CREATE INDEX IF NOT EXISTS outcomes_group ON outcomes (language, project, id);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Learned:
    """The file, opened and made if need be. Raises ConfigError where it cannot be read or written."""

    def __init__(self, file: Path, *, max_mb: int = 32, named: bool = False, text: bool = True) -> None:
        self.file = file
        self._limit, self._named, self._text = max_mb << 20, named, text
        self._lock = threading.Lock()  # one connection, used by the writer and by who reads
        self._writer: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._failed = self._closed = False
        try:
            keep_private(file, "paths.state")
            self._base = sqlite3.connect(
                file, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
            )
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA secure_delete=ON")  # what is forgotten leaves no bytes behind
            self._base.executescript(_SCHEMA)
            self._base.execute(
                "INSERT OR IGNORE INTO facts VALUES ('salt', ?), ('forgotten', '0'), ('paused', '0')",
                (secrets.token_hex(16),),
            )
            self._salt = self._fact("salt")
            self._held = self._total()
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"{file} cannot be used ({error}); `keystroke cache --clear learned` removes it"
            ) from None

    # What the gateway does

    def project(self, root: str | None) -> str:
        """What the project at `root` is called here; without one all such files are one project."""
        if not root:
            return "-"
        if self._named:
            return root
        return hashlib.sha256(f"{self._salt}{root}".encode()).hexdigest()[:12]

    def keep(self, outcome: Outcome) -> None:
        """Write it soon, in a thread of its own. Never raises."""
        if self._waiting >= WAITING or self._closed:
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "learned")
        self._waiting += 1
        self._writer.submit(self._write, outcome)

    def counts(self, language: str, project: str) -> tuple[list[Count], list[Count]]:
        """What the newest suggestions in a language came to, and those of one project in it. Raises nothing:
        without a file that can be read there are none."""
        try:
            with self._lock:
                return self._counts("language = ?", language), self._counts(
                    "language = ? AND project = ?", language, project
                )
        except sqlite3.Error as error:
            self._complain(error)
            return counted(()), counted(())

    def close(self) -> None:
        """Write what waits, and let go of the file."""
        self._closed = True
        if self._writer is not None:
            self._writer.shutdown()
        with self._lock:
            self._base.close()

    # What its owner does

    def groups(self) -> list[Group]:
        """Raises ConfigError where the file cannot be read; so do all below."""
        seen = "became NOT LIKE 'unseen%'"
        taken = "became IN ('accepted', 'partial')"
        with self._asked() as base:
            rows = base.execute(
                f"SELECT language, project, SUM({seen}), SUM({taken}), SUM(taken), SUM(NOT {seen}) "
                "FROM outcomes WHERE kind = 'completion' GROUP BY language, project ORDER BY 3 DESC"
            ).fetchall()
        return [Group(*row) for row in rows]

    def outcomes(
        self,
        *,
        language: str | None = None,
        project: str | None = None,
        number: int | None = None,
        limit: int = -1,
    ) -> list[Outcome]:
        """Newest first."""
        where, values = _where(language, project, number=number)
        with self._asked() as base:
            rows = base.execute(
                f"SELECT {', '.join(_COLUMNS)}, id FROM outcomes{where} ORDER BY id DESC LIMIT ?",
                (*values, limit),
            ).fetchall()
        return [_outcome(row) for row in rows]

    def forget(
        self,
        *,
        language: str | None = None,
        project: str | None = None,
        before: float | None = None,
        number: int | None = None,
    ) -> int:
        """Delete them, or all; how many. What a running gateway knows of earlier moments is not added."""
        where, values = _where(language, project, before, number)
        with self._asked() as base:
            gone = base.execute(f"DELETE FROM outcomes{where}", values).rowcount
            if not where:
                base.execute("UPDATE facts SET value = ? WHERE name = 'forgotten'", (str(time.time()),))
            base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            base.execute("VACUUM")
            base.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._held = self._total()
        return gone

    def pause(self, paused: bool) -> None:
        """Whether a gateway that already runs goes on keeping."""
        with self._asked() as base:
            base.execute("UPDATE facts SET value = ? WHERE name = 'paused'", (str(int(paused)),))

    # Inside

    def _write(self, outcome: Outcome) -> None:
        try:
            if not self._text or _secret(outcome):
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
                    self._held += outcome.size
                    self._make_room()
        except (sqlite3.Error, UnicodeError) as error:
            self._complain(error)
        finally:
            self._waiting -= 1

    def _make_room(self) -> None:
        if self._held <= self._limit:
            return
        self._held = self._total()  # others may have deleted some
        over = self._held - self._limit * 9 // 10
        if self._held > self._limit:
            last = 0
            for number, size in self._base.execute("SELECT id, size FROM outcomes ORDER BY id"):
                if over <= 0:
                    break
                last, over = number, over - size
            self._base.execute("DELETE FROM outcomes WHERE id <= ?", (last,))
            self._held = self._total()

    def _counts(self, where: str, *values: str) -> list[Count]:
        rows = self._base.execute(
            f"SELECT confidence, worth FROM outcomes WHERE tunes AND kind = 'completion' AND {where} "
            "ORDER BY id DESC LIMIT ?",
            (*values, NEWEST),
        )
        return counted(rows.fetchall())

    def _total(self) -> int:
        return int(self._base.execute("SELECT TOTAL(size) FROM outcomes").fetchone()[0])

    def _fact(self, name: str) -> str:
        return str(self._base.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()[0])

    @contextmanager
    def _asked(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                yield self._base
        except sqlite3.Error as error:
            raise ConfigError(
                f"{self.file} cannot be used ({error}); `keystroke cache --clear learned` removes it"
            ) from None

    def _complain(self, error: Exception) -> None:
        if not self._failed:
            log.warning("what became of suggestions is not kept: %s", error)
        self._failed = True


def learned_file(settings: Settings) -> Path:
    return settings.paths.state / NAME


def open_learned(settings: Settings) -> Learned:
    """The file that the settings name. Raises ConfigError."""
    about = settings.learn
    return Learned(
        learned_file(settings), max_mb=about.max_mb, named=about.projects == "named", text=about.text
    )


def _secret(outcome: Outcome) -> bool:
    """The pieces as they stood together: a literal may be half in one of them."""
    before, after = outcome.prefix, outcome.suffix
    return holds_secret(before + outcome.written + after) or holds_secret(before + outcome.suggestion + after)


def _where(
    language: str | None, project: str | None, before: float | None = None, number: int | None = None
) -> tuple[str, Sequence[Any]]:
    asked = {"language = ?": language, "project = ?": project, "at < ?": before, "id = ?": number}
    used = {clause: value for clause, value in asked.items() if value is not None}
    return (f" WHERE {' AND '.join(used)}" if used else ""), tuple(used.values())


def _outcome(row: Sequence[Any]) -> Outcome:
    made = dict(zip((*_COLUMNS, "id"), row, strict=True))
    made["tunes"] = bool(made["tunes"])
    return Outcome(**made)
