"""The temporary folder of a task, removed with the task however it ends.

A lock on a file inside the folder is released by the system when its process ends, even by SIGKILL. Creating
a folder removes this user's folders whose lock is free, and no others, in the background: a copy of a large
workspace takes seconds to remove. The lock is removed last, so an interrupted removal continues later.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from keystroke.errors import InputError

PREFIX = "keystroke-task-"
_LOCK = ".lock"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def task_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder in `parent` (None: the system's temporary folder), removed at the end. Folders that
    killed tasks left there are removed meanwhile. InputError where none can be created."""
    parent_folder = parent or Path(tempfile.gettempdir())
    removing = threading.Thread(
        target=remove_abandoned, args=(parent_folder,), name="remove-abandoned", daemon=True
    )
    removing.start()
    try:
        folder, lock = _create(parent_folder)
    except InputError:
        removing.join()  # it may have freed space
        folder, lock = _create(parent_folder)
    try:
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def remove_abandoned(parent_folder: Path) -> list[Path]:
    """Remove the folders of killed tasks and return them. Never raises."""
    removed = []
    try:
        found = [entry for entry in parent_folder.iterdir() if entry.name.startswith(PREFIX)]
    except OSError:
        return []
    for folder in found:
        with contextlib.suppress(OSError):
            if _is_abandoned(folder):
                remove(folder)
                removed.append(folder)
    return removed


def remove(folder: Path) -> None:
    """Remove a folder with its contents, also read-only ones and nests of any depth. Never raises, never
    follows a link, and does not recurse: folders inside others are moved to the top first."""
    with contextlib.suppress(OSError):
        top = os.open(folder, _FOLDER)
        try:
            waiting = _empty(top, top)
            while waiting:
                name = waiting.pop()
                with contextlib.suppress(OSError):
                    inner = os.open(name, _FOLDER, dir_fd=top)
                    try:
                        waiting += _empty(inner, top)
                    finally:
                        os.close(inner)
                    os.rmdir(name, dir_fd=top)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_LOCK, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _empty(folder: int, top: int) -> list[str]:
    """Remove the files of an open folder, except the lock of `top`, and move its folders to `top`; returns
    the names they have there."""
    os.fchmod(folder, 0o700)
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    moved = []
    for name, is_folder in found:
        with contextlib.suppress(OSError):
            if not is_folder:
                if folder != top or name != _LOCK:
                    os.unlink(name, dir_fd=folder)
                continue
            os.chmod(name, 0o700, dir_fd=folder)  # a folder that cannot be written cannot be moved or opened
            if folder != top:
                place = f".{secrets.token_hex(8)}"
                os.rename(name, place, src_dir_fd=folder, dst_dir_fd=top)
                name = place
            moved.append(name)
    return moved


def _create(parent_folder: Path) -> tuple[Path, int]:
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_folder))
        return folder, _lock(folder)
    except OSError as error:
        if folder is not None:
            remove(folder)
        raise InputError(
            f"a folder for the task's copies cannot be made in {parent_folder}: {error.strerror}; "
            "free some room there"
        ) from None


def _lock(folder: Path) -> int:
    """Lock the folder until the returned descriptor is closed. The file gets its final name once it is
    locked, so an unlocked one is never seen."""
    early = folder / f"{_LOCK}-early"
    descriptor = os.open(early, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        early.rename(folder / _LOCK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _is_abandoned(folder: Path) -> bool:
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return False
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)  # OSError: no lock file
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
