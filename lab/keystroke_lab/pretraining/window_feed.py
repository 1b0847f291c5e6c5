"""Random training windows, made by worker processes while training runs.

Shards of code, and of edits in a folder of their own, may arrive while training runs; every pass transforms a
shard with a new seed, so no two passes cut a file alike. A window is drawn once. A damaged shard stops the
run with its name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keystroke.errors import NotFound
from keystroke_lab.corpus.shards import read_shard, shard_paths
from keystroke_lab.corpus.trajectories import read_edits
from keystroke_lab.pretraining.documents import Mix, edit_windows, token_windows
from keystroke_lab.tokenizer.code_tokenizer import load, plain

Windows = NDArray[np.uint16]


def transform(piece: Path, tokenizer: Path, mix: Mix, length: int, seed: int) -> Windows:
    """All windows of one piece of code. Runs in a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return token_windows(read_shard(piece), plain(load(tokenizer)), mix, length, seed)


def transform_edits(piece: Path, tokenizer: Path, mix: Mix, length: int, seed: int) -> Windows:
    """All windows of one piece of edits. Runs in a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    del mix
    return edit_windows(read_edits(piece), plain(load(tokenizer)), length, seed)


Transform = Callable[[Path, Path, Mix, int, int], Windows]


class Stock:
    """Windows of one folder's pieces: what is at hand, what is being made, what comes next."""

    def __init__(self, folder: Path, work: Transform, backlog: int) -> None:
        self.folder, self.work, self.backlog = folder, work, backlog
        self.passes = 0
        self.jobs: list[tuple[Mix, Future[Windows]]] = []
        self._queue: list[Path] = []
        self._known: set[Path] = set()
        self._held: list[tuple[Mix, Windows]] = []  # shuffled on arrival; drawn from their ends

    @property
    def empty(self) -> bool:
        """Whether there is nothing to make windows from."""
        return not self._known

    @property
    def available(self) -> int:
        return sum(len(windows) for _, windows in self._held)

    def is_low(self, mix: Mix) -> bool:
        """Whether there are too few windows of this mix."""
        return sum(len(windows) for made_for, windows in self._held if made_for == mix) < self.backlog

    def find_new_shards(self) -> None:
        fresh = [p for p in shard_paths(self.folder) if p not in self._known]
        self._known.update(fresh)
        self._queue.extend(fresh)

    def next_shard(self, rng: np.random.Generator) -> Path | None:
        """New pieces first, then another pass."""
        if not self._queue and self._known:
            self.passes += 1
            self._queue = sorted(self._known)
            rng.shuffle(self._queue)
        return self._queue.pop(0) if self._queue else None

    def collect(self, rng: np.random.Generator) -> None:
        for entry in [e for e in self.jobs if e[1].done()]:
            self.jobs.remove(entry)
            found = entry[1].result()
            if len(found):
                rng.shuffle(found)
                self._held.append((entry[0], found))

    def draw(self, size: int, mix: Mix, rng: np.random.Generator) -> Windows:
        """`size` windows out of every piece in proportion to what is left of it; of the mix asked for, as
        soon as there are plenty, and windows made for another one are then dropped."""
        current = [e for e in self._held if e[0] == mix]
        if sum(len(w) for _, w in current) >= 8 * size:
            self._held = current
        counts = rng.multivariate_hypergeometric([len(w) for _, w in self._held], size)
        taken = []
        for i, count in enumerate(counts):
            if count:
                made_for, windows = self._held[i]
                taken.append(windows[-count:])
                self._held[i] = (made_for, windows[:-count])
        self._held = [e for e in self._held if len(e[1])]
        return np.concatenate(taken)


class WindowFeed:
    """Random windows of the pieces in a folder, for ever; a share of them from a folder of edits."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Path,
        *,
        length: int,
        workers: int,
        seed: int = 0,
        backlog: int = 24_000,
        edits: Path | None = None,
        mix: Mix | None = None,
    ) -> None:
        self.folder, self.tokenizer, self.length = folder, tokenizer, length
        self.mix = mix or Mix()
        self.edits_drawn = 0  # windows
        self._code = Stock(folder, transform, backlog)
        self._edits = None if edits is None else Stock(edits, transform_edits, max(64, backlog // 6))
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self._workers = workers
        self._rng = np.random.default_rng(seed)
        self._seed = seed * 1_000_003

    def start(self) -> None:
        """Set the workers going before the first batch is wanted."""
        self._submit_jobs()

    @property
    def passes(self) -> int:
        return self._code.passes

    @property
    def available(self) -> int:
        return self._code.available

    def _stocks(self) -> list[Stock]:
        """Edits first: they need few workers and must not wait behind code."""
        return [self._edits, self._code] if self._edits is not None and self.mix.edits else [self._code]

    def _submit_jobs(self) -> None:
        """Keep the workers busy while a stock is low."""
        for stock in self._stocks():
            stock.find_new_shards()
            most = self._workers if stock is self._code else max(1, self._workers // 3)
            while len(stock.jobs) < most and stock.is_low(self.mix):
                piece = stock.next_shard(self._rng)
                if piece is None:
                    break
                self._seed += 1
                job = self._pool.submit(stock.work, piece, self.tokenizer, self.mix, self.length, self._seed)
                stock.jobs.append((self.mix, job))

    def batch(self, size: int) -> Windows:
        """`size` windows; of edits as many as the mix says, fewer while there are none yet."""
        self._refill()
        edits = 0
        if self._edits is not None and self.mix.edits:
            wanted = int(self._rng.binomial(size, self.mix.edits))
            edits = min(wanted, self._edits.available)
        while self._code.available < size - edits:
            if self._code.empty:
                raise NotFound(
                    f"{self.folder} holds no pieces of a corpus; build one with `keystroke train corpus`"
                )
            time.sleep(0.05)
            self._refill()
        drawn = [self._code.draw(size - edits, self.mix, self._rng)] if size > edits else []
        if edits and self._edits is not None:
            drawn.append(self._edits.draw(edits, self.mix, self._rng))
            self.edits_drawn += edits
        return np.concatenate(drawn)

    def _refill(self) -> None:
        for stock in self._stocks():
            stock.collect(self._rng)
        self._submit_jobs()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
