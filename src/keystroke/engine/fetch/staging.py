"""Where a download grows until it is whole.

One folder a download, inside the library and on its file system, so that the finished files are renamed
into place. It outlives a crash, belongs to one process at a time, and goes when the download is complete.
Room on the disk is looked for before the first byte.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from keystroke.engine.library import DOWNLOADS, Progress
from keystroke.errors import ConfigError, NotEnoughDisk

SPARE = 64 << 20  # bytes left free: a disk filled to the last byte harms everything else on it
_LOOK = 0.2  # seconds between looks at a lock, or at how much has come


@contextmanager
def staging_folder(library: Path, name: str, source: str, progress: Progress) -> Iterator[Path]:
    """The folder in which `name` is fetched from `source`, held by this process alone. Waits, and says so,
    while another process holds it. What is in it stays if the block fails; the caller clears it at the end.
    Raises ConfigError where the library cannot be written."""
    key = hashlib.sha256(source.encode()).hexdigest()[:8]
    folder = library / DOWNLOADS / f"{name}@{key}"
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), mode=0o600, blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _acquire(lock, name, progress)
    except OSError as error:
        raise ConfigError(f"the models folder {library} cannot be written: {error.strerror}") from None
    try:
        folder.mkdir(exist_ok=True)  # whoever held the lock before may have finished
        yield folder
    finally:
        lock.release()


def remove_folder(folder: Path) -> None:
    """Remove a finished download's folder. Its lock file stays: removing it would let two hold it."""
    shutil.rmtree(folder, ignore_errors=True)


def _acquire(lock: BaseFileLock, name: str, progress: Progress) -> None:
    while True:
        try:
            lock.acquire()
            return
        except Timeout:
            progress(f"waiting for another process that adds {name}", 0, 0)
            time.sleep(_LOOK)


def check_space(folder: Path, need: int, name: str) -> None:
    """Raises NotEnoughDisk unless `need` bytes and some to spare are free where `folder` lies."""
    free = shutil.disk_usage(folder).free
    if need + SPARE > free:
        raise NotEnoughDisk(
            f"{name} needs {(need + SPARE) / 1e9:.1f} GB more in {folder.parent.parent} and "
            f"{free / 1e9:.1f} GB are free; free some, or set paths.models to a larger disk"
        )


def folder_bytes(folder: Path) -> int:
    """The bytes of every file under `folder` (or of the one file it is); what vanishes meanwhile counts
    nothing."""
    total = folder.stat().st_size if folder.is_file() else 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(place, file)).st_size
            except OSError:
                continue
    return total


@contextmanager
def report_progress(measure: Callable[[], int], total: int, what: str, progress: Progress) -> Iterator[None]:
    """Tell `progress` a few times a second how far `measure` has come, from a thread of its own: those who
    download have bars of their own, each in its own manner, and this is the one that is shown."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK):
            progress(what, min(measure(), total), total)

    watcher = threading.Thread(target=look, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
