"""One file that comes in parts, several at a time.

Each part goes straight to its place in the file and is compared on the way; a mark beside the file says
that it is there, so a broken download goes on with the parts that are missing. The whole is compared once
more at the end. Where parts come from is not known here.
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

TOGETHER = 4  # parts under way at a time: enough to fill a line, few enough for any server
TRIES = 2  # a line that breaks; installers and servers try again on their own, too


@dataclass(frozen=True, slots=True)
class FilePart:
    """What a part must be. `label` is what people are told it is; `sha256` is None where only the whole has a
    checksum."""

    label: str
    size: int
    sha256: str | None = None


class PartSource(ABC):
    """Whoever can bring parts. Called by several threads at once."""

    @abstractmethod
    def blocks(self, number: int, prefix: Path) -> AbstractContextManager[Iterable[bytes]]:
        """The bytes of a part, in order. What lies on the disk meanwhile has a name that begins with `prefix`
        and is gone afterwards. Raises Unavailable or ModelDamaged."""

    @abstractmethod
    def stop(self) -> None:
        """End whatever is under way, and begin nothing more."""


class PartialDownload:
    """`name` is what people call the model; `file` is the file that `parts` make, in order, in `folder`."""

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
        """`spare`: bytes that a part takes on the disk besides its place in the file."""
        self.name, self.sha256, self.parts, self.folder = name, sha256, tuple(parts), folder
        self.path = folder / file
        self.size = sum(part.size for part in parts)
        self._spare = spare
        self._offsets = (0, *accumulate(part.size for part in parts))
        self._written: dict[int, int] = {}  # bytes of parts under way that are in the file

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each part begins in the file, and where it ends."""
        return list(pairwise(self._offsets))

    @property
    def missing(self) -> list[int]:
        return [n for n in range(len(self.parts)) if not self._mark(n).exists()]

    def fetch(self, bringer: Callable[[], PartSource], progress: Progress) -> Path:
        """Bring what is missing and compare the whole. Raises Unavailable, ModelDamaged or NotEnoughDisk;
        what has come stays for the next time."""
        missing = self.missing
        need = sum(self.parts[n].size for n in missing) + min(TOGETHER, len(missing)) * self._spare
        check_space(self.folder, need, self.name)
        try:
            for left in self.folder.glob("part-*"):  # by a process that was killed
                remove_folder(left)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            if missing:
                with report_progress(self._come, self.size, f"download {self.name}", progress):
                    self._fetch_all(missing, bringer())
        except OSError as error:
            raise self._again(
                ModelError, f"{self.path} cannot be written: {error.strerror or error}"
            ) from None
        self._compare(progress)
        return self.path

    def _fetch_all(self, missing: Sequence[int], bringer: PartSource) -> None:
        pool = ThreadPoolExecutor(TOGETHER, thread_name_prefix="part")
        try:
            waiting = [pool.submit(self._fetch, number, bringer) for number in missing]
            done, _ = wait(waiting, return_when=FIRST_EXCEPTION)
            pool.shutdown(cancel_futures=True)  # where one failed, those under way may still come
            for future in done:
                if (error := future.exception()) is not None:
                    raise error
        except (Unavailable, ModelDamaged) as error:
            raise self._again(type(error), str(error)) from None
        finally:
            bringer.stop()
            pool.shutdown(cancel_futures=True)

    def _fetch(self, number: int, bringer: PartSource) -> None:
        for attempt in range(TRIES):
            try:
                self._bring(number, bringer)
                return
            except Unavailable:
                if attempt + 1 == TRIES:
                    raise

    def _bring(self, number: int, bringer: PartSource) -> None:
        part = self.parts[number]
        digest, done = hashlib.sha256(), 0
        with bringer.blocks(number, self._temporary(number)) as blocks, self.path.open("r+b") as target:
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
        self._mark(number).touch()

    def _compare(self, progress: Progress) -> None:
        """The whole file against its checksum. Where it differs, parts that are not what they were lose their
        mark: the next run brings those again."""
        if self.sha256 is None:
            return
        if hash_file(self.path, progress, f"check {self.name}", 0, self.size) == self.sha256:
            return
        for number, part in enumerate(self.parts):
            with self.path.open("rb") as source:
                source.seek(self._offsets[number])
                if hashlib.sha256(source.read(part.size)).hexdigest() != part.sha256:
                    self._mark(number).unlink(missing_ok=True)
        raise self._again(ModelDamaged, f"{self.path.name} is not the expected file (its SHA-256 differs)")

    def _again(self, kind: type[KeystrokeError], problem: str) -> KeystrokeError:
        """The problem, and what is kept for the next time."""
        here = len(self.parts) - len(self.missing)
        kept = f"; {here} of {len(self.parts)} parts are kept, and the same command goes on" if here else ""
        return kind(f"{problem}{kept}")

    def _come(self) -> int:
        """How many bytes are here. A part may lie here twice for a moment; it counts once."""
        come = 0
        for n, part in enumerate(self.parts):
            if self._mark(n).exists():
                come += part.size
            else:
                aside = sum(map(folder_bytes, self.folder.glob(f"{self._temporary(n).name}*")))
                come += min(max(aside, self._written.get(n, 0)), part.size)
        return come

    def _mark(self, number: int) -> Path:
        return self.folder / f"{self.path.name}.{number + 1}.done"

    def _temporary(self, number: int) -> Path:
        return self.folder / f"part-{number + 1}-"
