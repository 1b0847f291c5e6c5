"""Downloads one file in parts, several at a time.

Each part is written to its offset in the file and verified; a marker file records that it is complete, so
that a resumed download fetches only the missing parts. At the end the whole file is verified.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from keystroke.engine.fetch.staging import check_space, folder_bytes, remove_folder, report_progress
from keystroke.engine.library import Progress, hash_file
from keystroke.errors import KeystrokeError, ModelDamaged, ModelError, Unavailable

TOGETHER = 4  # parts at a time: enough to use the bandwidth, few enough for any server
TRIES = 2  # attempts per part; installers retry on their own as well


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file. `label` is its name in messages; `sha256` is None if only the whole file has a
    checksum."""

    label: str
    size: int
    sha256: str | None = None


class PartSource(ABC):
    """A source of parts. Called by several threads at once."""

    @abstractmethod
    def blocks(self, number: int, prefix: Path) -> AbstractContextManager[Iterable[bytes]]:
        """The bytes of a part, in order. The names of temporary files begin with `prefix`; they are removed
        afterwards. Raises Unavailable or ModelDamaged."""

    @abstractmethod
    def stop(self) -> None:
        """End all transfers and start no more."""


class PartialDownload:
    """The download of `file` of the model `name` into `folder`, from `parts` in order."""

    def __init__(
        self,
        name: str,
        file: str,
        sha256: str | None,
        parts: Sequence[FilePart],
        folder: Path,
        *,
        spare: int = 0,
    ) -> None:
        """`spare`: temporary disk space of a part in bytes."""
        self.name, self.sha256, self.parts, self.folder = name, sha256, tuple(parts), folder
        self.path = folder / file
        self.size = sum(part.size for part in parts)
        self._spare = spare
        self._offsets = (0, *accumulate(part.size for part in parts))
        self._written: dict[int, int] = {}  # bytes of unfinished parts

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The start and end of each part in the file."""
        return list(pairwise(self._offsets))

    @property
    def missing(self) -> list[int]:
        return [n for n in range(len(self.parts)) if not self._mark_path(n).exists()]

    def fetch(self, source: Callable[[], PartSource], progress: Progress) -> Path:
        """Download the missing parts and verify the file. Raises Unavailable, ModelDamaged or NotEnoughDisk;
        completed parts are kept."""
        missing = self.missing
        need = sum(self.parts[n].size for n in missing) + min(TOGETHER, len(missing)) * self._spare
        check_space(self.folder, need, self.name)
        try:
            for left in self.folder.glob("part-*"):  # left by a killed process
                remove_folder(left)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            if missing:
                with report_progress(self._count_downloaded, self.size, f"download {self.name}", progress):
                    self._fetch_all(missing, source())
        except OSError as error:
            raise self._resumable_error(
                ModelError, f"{self.path} cannot be written: {error.strerror or error}"
            ) from None
        self._verify(progress)
        return self.path

    def _fetch_all(self, missing: Sequence[int], source: PartSource) -> None:
        pool = ThreadPoolExecutor(TOGETHER, thread_name_prefix="part")
        try:
            waiting = [pool.submit(self._fetch, number, source) for number in missing]
            done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            pool.shutdown(cancel_futures=True)  # if one failed, those in progress may still succeed
            for future in done:
                if (error := future.exception()) is not None:
                    raise error
        except (Unavailable, ModelDamaged) as error:
            raise self._resumable_error(type(error), str(error)) from None
        finally:
            source.stop()
            pool.shutdown(cancel_futures=True)

    def _fetch(self, number: int, source: PartSource) -> None:
        for attempt in range(TRIES):
            try:
                self._fetch_part(number, source)
                return
            except Unavailable:
                if attempt + 1 == TRIES:
                    raise

    def _fetch_part(self, number: int, source: PartSource) -> None:
        part = self.parts[number]
        digest, done = hashlib.sha256(), 0
        with source.blocks(number, self._temporary_prefix(number)) as blocks, self.path.open("r+b") as target:
            target.seek(self._offsets[number])
            for block in blocks:
                done += len(block)
                if done > part.size:
                    break
                digest.update(block)
                target.write(block)
                self._written[number] = done
        if done != part.size:
            raise ModelDamaged(f"{part.label} has another size than it should")
        if part.sha256 is not None and digest.hexdigest() != part.sha256:
            raise ModelDamaged(f"{part.label} is not the expected one (its SHA-256 differs)")
        self._mark_path(number).touch()

    def _verify(self, progress: Progress) -> None:
        """Verify the whole file. If it differs, the markers of the damaged parts are removed, so that the
        next run downloads those again."""
        if self.sha256 is None:
            return
        if hash_file(self.path, progress, f"check {self.name}", 0, self.size) == self.sha256:
            return
        for number, part in enumerate(self.parts):
            with self.path.open("rb") as stored:
                stored.seek(self._offsets[number])
                if hashlib.sha256(stored.read(part.size)).hexdigest() != part.sha256:
                    self._mark_path(number).unlink(missing_ok=True)
        raise self._resumable_error(
            ModelDamaged, f"{self.path.name} is not the expected file (its SHA-256 differs)"
        )

    def _resumable_error(self, kind: type[KeystrokeError], problem: str) -> KeystrokeError:
        """An error that states how many bytes are kept for the next attempt."""
        here = len(self.parts) - len(self.missing)
        if here:
            problem += (
                f"; {here} of {len(self.parts)} parts are kept, and the same command resumes the download"
            )
        return kind(problem)

    def _count_downloaded(self) -> int:
        """Bytes downloaded so far. A part that is being copied into the file counts once."""
        total = 0
        for n, part in enumerate(self.parts):
            if self._mark_path(n).exists():
                total += part.size
            else:
                aside = sum(map(folder_bytes, self.folder.glob(f"{self._temporary_prefix(n).name}*")))
                total += min(max(aside, self._written.get(n, 0)), part.size)
        return total

    def _mark_path(self, number: int) -> Path:
        return self.folder / f"{self.path.name}.{number + 1}.done"

    def _temporary_prefix(self, number: int) -> Path:
        return self.folder / f"part-{number + 1}-"
