"""Training windows in a reproducible order, made by worker processes.

A round is a number of shards of the plan whose windows are shuffled together with the round's own seed. Which
windows a step gets depends on the plan, the seed and how many were drawn before, never on timing, so the
position in the data is two numbers. A shard that has not arrived yet is waited for.
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
from keystroke_lab.pretraining.documents import Mix
from keystroke_lab.pretraining.mixture import EDITS, MixturePlan, PlannedPiece
from keystroke_lab.pretraining.window_feed import Windows, transform, transform_edits

PATIENCE = 180.0  # seconds to wait for a missing shard


@dataclass(frozen=True, slots=True)
class DataPosition:
    """How much of the data was used: shards before the current round, and windows drawn from it."""

    pieces: int = 0
    windows: int = 0


def windows_of(
    folders: tuple[Path, ...], piece: PlannedPiece, tokenizer: Path, mix: Mix, length: int, seed: int
) -> Windows:
    """All windows of one shard, after its checksum was verified. Runs in a worker process."""
    end = time.monotonic() + PATIENCE
    while not (found := [path for folder in folders if (path := folder / piece.name).exists()]):
        if time.monotonic() > end:
            raise NotFound(
                f"{piece.name} is not in {', '.join(map(str, folders))}; send it and run the command again"
            )
        time.sleep(0.2)
    if hashlib.sha256(found[0].read_bytes()).hexdigest() != piece.sha256:
        raise InputError(f"{found[0]} is not the piece that the plan names; build it or send it again")
    work = transform_edits if piece.stream == EDITS else transform
    return work(found[0], tokenizer, mix, length, seed)


class PlannedWindows:
    """Batches of windows. Call `set_kind` before the first batch."""

    def __init__(
        self,
        plan: MixturePlan,
        folders: tuple[Path, ...],
        tokenizer: Path,
        *,
        workers: int,
        seed: int = 0,
        pieces: int = 12,
        ahead: int = 2,
        position: DataPosition | None = None,
    ) -> None:
        """`pieces` shards a round; `ahead` rounds are prepared while one is used. Without workers a round is
        made when it is needed."""
        self.position = position or DataPosition()
        self._plan, self._folders, self._tokenizer, self._seed = plan, folders, tokenizer, seed
        self._pieces, self._ahead = pieces, ahead
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers else None
        self._rounds: deque[tuple[int, list[Callable[[], Windows]]]] = deque()
        self._futures: list[Future[Windows]] = []
        self._windows: Windows | None = None
        self._kind: tuple[Mix, int] | None = None

    def set_kind(self, mix: Mix, length: int) -> None:
        """Make windows of this mix and length from now on; prepared windows of another kind are dropped."""
        if self._kind == (mix, length):
            return
        self._cancel()
        self._windows, self._kind = None, (mix, length)
        self._prepare()

    def skip_rest_of_round(self) -> None:
        """Skip what is left of the current round: another kind of window begins with new shards."""
        if self.position.windows:
            self.position = DataPosition(self.position.pieces + self._pieces)

    def _prepare(self) -> None:
        assert self._kind is not None
        mix, length = self._kind
        after = self._rounds[-1][0] + self._pieces if self._rounds else self.position.pieces
        if not self._rounds and self._windows is not None:
            after += self._pieces
        while len(self._rounds) < self._ahead:
            some = islice(self._plan.shard_order(), after, after + self._pieces)
            jobs = [
                partial(
                    windows_of, self._folders, piece, self._tokenizer, mix, length, self._seed * 1_000_003 + i
                )
                for i, piece in enumerate(some, start=after)
            ]
            if self._pool is not None:
                self._futures += (futures := [self._pool.submit(job) for job in jobs])
                self._rounds.append((after, [future.result for future in futures]))
            else:
                self._rounds.append((after, list(jobs)))
            after += self._pieces

    def batch(self, size: int) -> Windows:
        """`size` windows. Where fewer are left in a round, they are skipped."""
        drawn = self.position.windows
        while self._windows is None or drawn + size > len(self._windows):
            if self._windows is not None:
                drawn = 0
            start, jobs = self._rounds.popleft()
            self._futures = [future for future in self._futures if not future.done()]
            made = np.concatenate([job() for job in jobs])
            np.random.default_rng((self._seed, start)).shuffle(made)
            self._windows, self.position = made, DataPosition(start, drawn)
            self._prepare()
            if len(made) < size:
                raise NotFound(f"a round has {len(made)} windows and a batch {size}; use more pieces a round")
        self.position = DataPosition(self.position.pieces, drawn + size)
        return self._windows[drawn : drawn + size]

    def _cancel(self) -> None:
        for future in self._futures:
            future.cancel()
        self._futures.clear()
        self._rounds.clear()

    def close(self) -> None:
        self._cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
