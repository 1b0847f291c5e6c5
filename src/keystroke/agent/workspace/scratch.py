"""The folder in which a task keeps its copies, gone with the task, however the task goes.

A folder is held by a lock on a file inside it, which the system lets go when its process ends, even by
SIGKILL. Whoever makes a folder removes those of its own user that nobody holds any more, and no others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from keystroke.errors import InputError

PREFIX = "keystroke-task-"
_LOCK = ".lock"


@contextlib.contextmanager
def task_folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder of one's own, removed at the end; those that killed tasks left behind in `parent` (the
    system's folder for temporary files where None) are removed first. Raises InputError where none can be
    made."""
    place = parent or Path(tempfile.gettempdir())
    remove_abandoned(place)
    folder, held = _made(place)
    try:
        yield folder
    finally:
        remove(folder)
        os.close(held)


def remove_abandoned(place: Path) -> list[Path]:
    """Remove the folders of tasks that were killed. Returns what was removed. Never raises."""
    gone = []
    try:
        found = [entry for entry in place.iterdir() if entry.name.startswith(PREFIX)]
    except OSError:
        return []
    for folder in found:
        with contextlib.suppress(OSError):
            if _abandoned(folder):
                remove(folder)
                gone.append(folder)
    return gone


def remove(folder: Path) -> None:
    """Remove a folder and what is in it, also what a command made read-only. Never raises."""
    shutil.rmtree(folder, onerror=_writable)


def _made(place: Path) -> tuple[Path, int]:
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        return folder, _held(folder)
    except OSError as error:
        if folder is not None:
            remove(folder)
        raise InputError(
            f"a folder for the task's copies cannot be made in {place}: {error.strerror}; "
            "free some room there"
        ) from None


def _held(folder: Path) -> int:
    """Lock the folder until the descriptor is closed. The file gets its name once it is locked: nobody sees
    one that is not yet."""
    early = folder / f"{_LOCK}-early"
    descriptor = os.open(early, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        early.rename(folder / _LOCK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _abandoned(folder: Path) -> bool:
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return False
    descriptor = os.open(
        folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    )  # raises where there is none
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _writable(_act: object, path: str, _error: object) -> None:
    """A folder that a command made read-only is removed all the same."""
    with contextlib.suppress(OSError):
        os.chmod(os.path.dirname(path), 0o700)
        if not os.path.islink(path):  # what a link points to is not ours to change
            os.chmod(path, 0o700)
        (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
