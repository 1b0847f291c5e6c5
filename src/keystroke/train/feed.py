"""Windows for the trainer, made by worker processes while it trains.

Law: pieces may arrive in the folder while training runs; each is transformed anew for every pass, with its
own seed, so no two passes cut a file the same way. A window is drawn once. The trainer never waits unless
the workers are slower than it, and a damaged piece stops the run with its name.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keystroke.errors import NotFound
from keystroke.train.documents import Mix, token_windows
from keystroke.train.pieces import piece_paths, read_piece
from keystroke.train.tokenizer import load, plain

Windows = NDArray[np.uint16]


def transform(piece: Path, tokenizer: Path, mix: Mix, length: int, seed: int) -> Windows:
    """All windows of one piece. Runs in a worker process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return token_windows(read_piece(piece), plain(load(tokenizer)), mix, length, seed)


class Feed:
    """Random windows of the pieces in a folder, for ever."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Path,
        *,
        length: int,
        workers: int,
        seed: int = 0,
        backlog: int = 24_000,
    ) -> None:
        self.folder, self.tokenizer, self.length = folder, tokenizer, length
        self.mix = Mix()
        self.passes = 0
        self._backlog = backlog
        self._pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        self._workers = workers
        self._jobs: list[Future[Windows]] = []
        self._queue: list[Path] = []
        self._known: set[Path] = set()
        self._rng = np.random.default_rng(seed)
        self._stock: list[Windows] = []  # shuffled on arrival; drawn from their ends
        self._seed = seed * 1_000_003

    def start(self) -> None:
        """Set the workers going before the first batch is wanted."""
        self._order()

    def _order(self) -> None:
        """Keep the workers busy while the stock is low: new pieces first, then another pass."""
        fresh = [p for p in piece_paths(self.folder) if p not in self._known]
        self._known.update(fresh)
        self._queue.extend(fresh)
        while len(self._jobs) < self._workers and self.available < self._backlog:
            if not self._queue:
                if not self._known:
                    return
                self.passes += 1
                self._queue = sorted(self._known)
                self._rng.shuffle(self._queue)
            self._seed += 1
            piece = self._queue.pop(0)
            self._jobs.append(
                self._pool.submit(transform, piece, self.tokenizer, self.mix, self.length, self._seed)
            )

    def _collect(self) -> None:
        for job in [j for j in self._jobs if j.done()]:
            self._jobs.remove(job)
            found = job.result()
            if len(found):
                self._rng.shuffle(found)
                self._stock.append(found)

    @property
    def available(self) -> int:
        return sum(map(len, self._stock))

    def batch(self, size: int) -> Windows:
        """`size` windows, drawn from every piece in stock in proportion to what is left of it."""
        self._collect()
        self._order()
        waited = 0.0
        while self.available < size:
            if not self._jobs and not self._known:
                raise NotFound(
                    f"{self.folder} holds no pieces of a corpus; build one with `keystroke train corpus`"
                )
            time.sleep(0.05)
            waited += 0.05
            self._collect()
            self._order()
        counts = self._rng.multivariate_hypergeometric([len(s) for s in self._stock], size)
        taken = []
        for i, count in enumerate(counts):
            if count:
                taken.append(self._stock[i][-count:])
                self._stock[i] = self._stock[i][:-count]
        self._stock = [s for s in self._stock if len(s)]
        return np.concatenate(taken)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
