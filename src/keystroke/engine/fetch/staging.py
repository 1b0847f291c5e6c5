"""The folder of an incomplete download, and what downloads share: disk space checks and progress.

There is one folder per download, on the file system of the library, so that finished files are renamed into
place. It survives a crash, is locked by one process at a time, and is removed when the download is complete.
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

SPARE = 64 << 20  # bytes to leave free on the disk
_LOOK = 0.2  # seconds between checks of the lock and of the progress


@contextmanager
def staging_folder(library: Path, name: str, source: str, progress: Progress) -> Iterator[Path]:
    """The folder in which `name` is downloaded from `source`, locked by this process. Waits, reporting to
    `progress`, while another process holds it. Its content stays if the block fails; the caller removes it
    at the end. Raises ConfigError if the library cannot be written."""
    key = hashlib.sha256(source.encode()).hexdigest()[:8]
    folder = library / DOWNLOADS / f"{name}@{key}"
    lock = FileLock(folder.with_name(f"{folder.name}.lock"), mode=0o600, blocking=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _acquire(lock, name, progress)
    except OSError as error:
        raise ConfigError(f"the models folder {library} cannot be written: {error.strerror}") from None
    try:
        folder.mkdir(exist_ok=True)  # the previous holder of the lock may have removed it
        yield folder
    finally:
        lock.release()


def remove_folder(folder: Path) -> None:
    """Remove a download's folder. The lock file stays: without it two processes could hold the lock."""
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
    """Raises NotEnoughDisk unless `need` bytes and some to spare are free on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if need + SPARE > free:
        raise NotEnoughDisk(
            f"{name} needs {(need + SPARE) / 1e9:.1f} GB more in {folder.parent.parent} and "
            f"{free / 1e9:.1f} GB are free; free some, or set paths.models to a larger disk"
        )


def folder_bytes(folder: Path) -> int:
    """The size of `folder` (or file); files that vanish meanwhile do not count."""
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
    """Report `measure()` to `progress` a few times a second from a thread, whichever program downloads."""
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
