"""Turns in progress, in the database that several gateways share, so that another gateway can take one up.

A turn is written when it begins and once a second while it runs, with the tokens so far; sampling is a pure
function of seed and position, so what another gateway generates after them is what its first would have. A
turn has one owner. Whoever takes it up becomes the owner, and the former one, if it still runs, stops.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import sqlalchemy as sa

from keystroke.protocol.requests import CreateRequest, ResponseCreate

log = logging.getLogger("keystroke.turns")

INTERVAL = 1.0  # seconds between two writes
_KEPT = 3600.0  # seconds that an abandoned turn can be taken up

_tables = sa.MetaData()
TURNS = sa.Table(
    "turns",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("key_id", sa.String(64), nullable=False),
    sa.Column("model", sa.String(256), nullable=False),
    sa.Column("socket", sa.Boolean, nullable=False),  # which of the two kinds of request it is
    sa.Column("request", sa.LargeBinary, nullable=False),
    sa.Column("tokens", sa.LargeBinary, nullable=False),
    sa.Column("text", sa.LargeBinary, nullable=False),
    sa.Column("owner", sa.String(32), nullable=False),
    sa.Column("at", sa.Float, nullable=False, index=True),
)


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn as far as it was generated. `on_taken` is called in the journal's thread when another gateway
    has taken it up."""

    id: str
    key_id: str
    model: str
    request: CreateRequest
    tokens: array[int] = field(default_factory=lambda: array("i"))
    text: list[str] = field(default_factory=list)
    on_taken: Callable[[], object] = lambda: None
    stored: bool = False  # its row exists

    def add(self, tokens: Sequence[int], text: str) -> None:
        self.tokens.extend(tokens)
        self.text.append(text)


class TurnJournal:
    """The open turns of one gateway."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._me = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._open: dict[str, OpenTurn] = {}
        self._ended: set[str] = set()
        self._stop = threading.Event()
        for _ in range(2):  # several gateways start at once, and one creates it
            with contextlib.suppress(sa.exc.OperationalError, sa.exc.ProgrammingError, sa.exc.IntegrityError):
                _tables.create_all(engine)
        self._thread = threading.Thread(target=self._keep_writing, name="turns", daemon=True)
        self._thread.start()

    def begin(self, turn: OpenTurn) -> None:
        with self._lock:
            self._open[turn.id] = turn

    def end(self, turn: OpenTurn, *, forget: bool = True) -> None:
        """The turn ended here. Unless `forget`, it can still be taken up; call `flush` before the process
        ends."""
        with self._lock:
            if self._open.get(turn.id) is turn and forget:
                del self._open[turn.id]
                self._ended.add(turn.id)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.flush()

    def take(self, turn_id: str, key_id: str) -> OpenTurn | None:
        """Become the owner of an open turn of this key; blocking. None where there is none."""
        t = TURNS.c
        mine = sa.and_(t.id == turn_id, t.key_id == key_id)
        with self._engine.begin() as connection:
            changed = connection.execute(sa.update(TURNS).where(mine).values(owner=self._me, at=time.time()))
            if not changed.rowcount:
                return None
            row = connection.execute(sa.select(TURNS).where(mine)).one()
        kind = ResponseCreate if row.socket else CreateRequest
        tokens = array("i")
        tokens.frombytes(row.tokens)
        request = msgspec.json.decode(row.request, type=kind)
        return OpenTurn(row.id, row.key_id, row.model, request, tokens, [row.text.decode()], stored=True)

    def _keep_writing(self) -> None:
        purged = 0.0
        while not self._stop.wait(INTERVAL):
            try:
                self.flush()
                if time.monotonic() - purged > _KEPT / 4:
                    purged = time.monotonic()
                    with self._engine.begin() as connection:
                        connection.execute(sa.delete(TURNS).where(TURNS.c.at < time.time() - _KEPT))
            except (sa.exc.SQLAlchemyError, OSError):
                log.warning("open turns could not be written", exc_info=True)

    def flush(self) -> None:
        """Write everything now; blocking."""
        with self._lock:
            turns, ended = list(self._open.values()), self._ended
            self._ended = set()
        if not turns and not ended:
            return
        t, now, taken = TURNS.c, time.time(), []
        with self._engine.begin() as connection:
            if ended:
                own = sa.and_(t.id.in_(sorted(ended)), t.owner == self._me)
                connection.execute(sa.delete(TURNS).where(own))
            for turn in turns:
                text = "".join(turn.text)
                values = {"tokens": turn.tokens.tobytes(), "text": text.encode(), "at": now}
                if turn.stored:
                    mine = sa.and_(t.id == turn.id, t.owner == self._me)
                    if not connection.execute(sa.update(TURNS).where(mine).values(values)).rowcount:
                        taken.append(turn)
                    continue
                row = {
                    "id": turn.id,
                    "key_id": turn.key_id,
                    "model": turn.model,
                    "socket": isinstance(turn.request, ResponseCreate),
                    "request": msgspec.json.encode(turn.request),
                    "owner": self._me,
                    **values,
                }
                connection.execute(sa.insert(TURNS).values(row))
        for turn in turns:
            turn.stored = True
        for turn in taken:
            with self._lock:
                self._open.pop(turn.id, None)
            turn.on_taken()
