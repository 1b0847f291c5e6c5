"""Windows for a trainer that stops and goes on: made by worker processes, in an order that nothing disturbs.

A round is some pieces of the plan, transformed side by side, their windows shuffled together by the
round's own seed. Which windows a step gets depends on the plan, the seed and how much was drawn before, never
on how quick a worker was or when a piece arrived; so the place in the data is two numbers. A piece that is
not there yet is waited for.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from keystroke.errors import InputError, NotFound
from keystroke.train.documents import Mix
from keystroke.train.feed import Windows, transform, transform_edits
from keystroke.train.mixture import EDITS, Piece, Plan

PATIENCE = 180.0  # seconds that a missing piece is waited for


@dataclass(frozen=True, slots=True)
class Place:
    """How far the data has been used: pieces before the present round, and windows drawn of it."""

    pieces: int = 0
    windows: int = 0


def windows_of(
    folders: tuple[Path, ...], piece: Piece, tokenizer: Path, mix: Mix, length: int, seed: int
) -> Windows:
    """All windows of one piece, its bytes checked first. Runs in a worker process."""
    end = time.monotonic() + PATIENCE
    while not (found := [path for folder in folders if (path := folder / piece.name).exists()]):
        if time.monotonic() > end:
            raise NotFound(f"{piece.name} is not in {', '.join(map(str, folders))}; send it and go on")
        time.sleep(0.2)
    if hashlib.sha256(found[0].read_bytes()).hexdigest() != piece.sha256:
        raise InputError(f"{found[0]} is not the piece that the plan names; build it or send it again")
    work = transform_edits if piece.stream == EDITS else transform
    return work(found[0], tokenizer, mix, length, seed)


class Rounds:
    """Batches of windows. `turn` sets what windows are made of; it must be called first."""

    def __init__(
        self,
        plan: Plan,
        folders: tuple[Path, ...],
        tokenizer: Path,
        *,
        workers: int,
        seed: int = 0,
        pieces: int = 12,
        ahead: int = 2,
        place: Place | None = None,
    ) -> None:
        """`pieces` a round, `ahead` rounds being made while one is used; begins at `place`. Without workers a
        round is made when it is wanted."""
        self.place = place or Place()
        self._plan, self._folders, self._tokenizer, self._seed = plan, folders, tokenizer, seed
        self._pieces, self._ahead = pieces, ahead
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers else None
        self._coming: deque[tuple[int, list[Callable[[], Windows]]]] = deque()
        self._made: list[Future[Windows]] = []
        self._windows: Windows | None = None
        self._kind: tuple[Mix, int] | None = None

    def turn(self, mix: Mix, length: int) -> None:
        """Windows of this mix and length from now on. What was made otherwise is let go."""
        if self._kind == (mix, length):
            return
        self._stop()
        self._windows, self._kind = None, (mix, length)
        self._order()

    def leave(self) -> None:
        """What is left of the present round is not used: another kind of window begins with pieces of its
        own."""
        if self.place.windows:
            self.place = Place(self.place.pieces + self._pieces)

    def _order(self) -> None:
        assert self._kind is not None
        mix, length = self._kind
        after = self._coming[-1][0] + self._pieces if self._coming else self.place.pieces
        if not self._coming and self._windows is not None:
            after += self._pieces
        while len(self._coming) < self._ahead:
            some = islice(self._plan.order(), after, after + self._pieces)
            jobs = [
                partial(
                    windows_of, self._folders, piece, self._tokenizer, mix, length, self._seed * 1_000_003 + i
                )
                for i, piece in enumerate(some, start=after)
            ]
            if self._pool is not None:
                self._made += (futures := [self._pool.submit(job) for job in jobs])
                self._coming.append((after, [future.result for future in futures]))
            else:
                self._coming.append((after, list(jobs)))
            after += self._pieces

    def batch(self, size: int) -> Windows:
        """`size` windows. A round's last ones, where fewer are left, are not used."""
        drawn = self.place.windows
        while self._windows is None or drawn + size > len(self._windows):
            if self._windows is not None:
                drawn = 0
            start, jobs = self._coming.popleft()
            self._made = [future for future in self._made if not future.done()]
            made = np.concatenate([job() for job in jobs])
            np.random.default_rng((self._seed, start)).shuffle(made)
            self._windows, self.place = made, Place(start, drawn)
            self._order()
            if len(made) < size:
                raise NotFound(f"a round has {len(made)} windows and a batch {size}; use more pieces a round")
        self.place = Place(self.place.pieces, drawn + size)
        return self._windows[drawn : drawn + size]

    def _stop(self) -> None:
        """Let go what is being made."""
        for future in self._made:
            future.cancel()
        self._made.clear()
        self._coming.clear()

    def close(self) -> None:
        self._stop()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
