"""Copies of the workspace on disk, in which commands run.

The user's files are only read. `changes` reports what commands changed in a copy; the next `sync` reverts
it. Secrets are never copied. Repositories and installed packages are mounted read-only where the sandbox
can mount, and linked where it cannot.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from keystroke.agent.sandbox import Sandbox, SandboxPolicy, credential_paths, secret_files
from keystroke.agent.workspace.listing import ignored_files, is_text
from keystroke.agent.workspace.overlay import Overlay
from keystroke.agent.workspace.scratch import remove
from keystroke.assist.edit.workspace import MAX_BYTES
from keystroke.errors import InputError

MOST_BYTES = 1 << 30
MOST_FILES = 50_000
MOST_CHANGED_BYTES = (
    64 << 20
)  # that one command may change, over all files; sparse files cost nothing to make
MOST_CHANGED_FILES = 5_000
_MOUNTED = frozenset({".git", ".hg", ".svn", "node_modules", ".venv", "venv", ".tox", ".nox", ".direnv"})
_CACHES = frozenset({"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"})

Mark = tuple[int, int, int]  # size, time, inode: enough to detect a write


class Replica:
    """Created by the first `sync`; `close` removes it."""

    def __init__(self, root: Path, folder: Path, sandbox: Sandbox, *, exclude: tuple[str, ...] = ()) -> None:
        self.root, self.folder = root, folder
        self._sandbox, self._exclude = sandbox, exclude
        self._mounted: list[str] = []
        self._marks: dict[str, Mark] = {}
        self._shown: dict[str, str | None] = {}

    def sync(self, overlay: Overlay) -> None:
        """Make the copy hold exactly the workspace with the overlay's changes. InputError where the workspace
        is too large to copy or the disk is full."""
        try:
            if not self.folder.exists():
                self._copy()
            else:
                self._revert()
            for path in {*self._shown, *overlay.texts}:
                if path not in overlay.texts:
                    self._restore(path)
                elif self._shown.get(path, ...) != overlay.texts[path]:
                    self._put(path, overlay.encoded(path))
            self._shown = dict(overlay.texts)
            self._marks = dict(self._walk())
        except OSError as error:
            raise InputError(
                f"the copy of the workspace in {self.folder} cannot be made: {error.strerror}; "
                "free some room there"
            ) from None

    def sandbox_policy(self, *, network: bool = False) -> SandboxPolicy:
        """The policy for a command that runs in the copy."""
        if self._sandbox.kind.can_mount:  # the copy covers the workspace, secrets and all
            mounted = {self.root / name: (self.root / name).resolve() for name in self._mounted}
            return SandboxPolicy(self.folder, self.root, mounted, credential_paths(), network)
        hidden = (*credential_paths(), *secret_files(self.root, self._exclude))
        # Installed packages are linked into the copy, so the workspace itself can be read too.
        return SandboxPolicy(self.folder, readonly={self.root: self.root}, hidden=hidden, network=network)

    def changes(self) -> tuple[dict[str, bytes | None], list[str]]:
        """The changes in the copy since `sync`: new bytes by path, None for removed files; and the files that
        are too large to edit. Ignored files, names that are not UTF-8 and what is not a regular file are
        left out. InputError where there is more than a change may hold."""
        now = dict(self._walk(2 * MOST_FILES))
        names = {name for name in {*now, *self._marks} if now.get(name) != self._marks.get(name)}
        if len(names) > MOST_FILES:
            raise _too_much(len(names))
        kept = sorted(name for name in names - ignored_files(self.root, names) if is_text(name))
        sizes = {name: now[name][0] for name in kept if name in now}
        wanted = [name for name in kept if sizes.get(name, 0) <= MAX_BYTES]
        if (
            len(wanted) > MOST_CHANGED_FILES
            or sum(sizes.get(name, 0) for name in wanted) > MOST_CHANGED_BYTES
        ):
            raise _too_much(len(wanted))
        large = [name for name in kept if sizes.get(name, 0) > MAX_BYTES]
        return {name: self._read(name, sizes[name]) if name in now else None for name in wanted}, large

    def _read(self, name: str, size: int) -> bytes:
        """At most the bytes that were counted."""
        with (self.folder / name).open("rb") as file:
            return file.read(size)

    def close(self) -> None:
        remove(self.folder)

    def _copy(self) -> None:
        found: dict[str, os.stat_result] = {}
        size = 0
        for name in self._sources():  # counted first: a copy that is too large is not begun
            info = found[name] = (self.root / name).lstat()
            size += info.st_size
            if len(found) > MOST_FILES or size > MOST_BYTES:
                raise InputError(
                    f"{self.root} has more than {MOST_FILES:,} files or {MOST_BYTES >> 20:,} MB, too much to "
                    "copy for a command; run this in the folder that the task is about"
                )
        self.folder.mkdir(mode=0o700, parents=True)
        for name, info in found.items():
            _copy_file(self.root / name, self.folder / name, info)
        if not self._sandbox.kind.can_mount:
            for name in self._mounted:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).symlink_to(self.root / name)

    def _sources(self) -> Iterator[str]:
        """Every file and link to copy; collects the folders to mount."""
        self._mounted.clear()
        waiting = [""]
        while waiting:
            inside = waiting.pop()
            with os.scandir(self.root / inside) as entries:
                ordered = sorted(entries, key=lambda entry: entry.name)
            for entry in ordered:
                name = f"{inside}/{entry.name}" if inside else entry.name
                if entry.is_dir(follow_symlinks=False):
                    if entry.name in _MOUNTED or os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                        self._mounted.append(name)
                    elif entry.name not in _CACHES:
                        waiting.append(name)
                elif entry.is_symlink() or (entry.is_file() and not self._is_secret(entry.name)):
                    yield name

    def _is_secret(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self._exclude)

    def _walk(self, most: int | None = None) -> Iterator[tuple[str, Mark]]:
        """The regular files of the copy, without mounted folders; the first `most` of them. Does not recurse,
        and leaves out what lies deeper than a path can name."""
        mounted, waiting, count = set(self._mounted), [""], 0
        while waiting:
            inside = waiting.pop()
            try:
                with os.scandir(self.folder / inside) as entries:
                    found = list(entries)
            except OSError:
                continue
            for entry in found:
                name = f"{inside}/{entry.name}" if inside else entry.name
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        if name not in mounted and entry.name not in _CACHES:
                            waiting.append(name)
                    elif entry.is_file(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        yield name, (info.st_size, info.st_mtime_ns, info.st_ino)
                        count += 1
                        if count == most:
                            return

    def _revert(self) -> None:
        """Undo what commands did to the copy."""
        now = dict(self._walk())
        for name in {*now, *self._marks}:
            if now.get(name) == self._marks.get(name):
                continue
            target = self.folder / name
            if name not in self._marks:
                target.unlink()
            elif name in self._shown:
                self._shown.pop(name)  # `sync` writes it again
            else:
                self._restore(name)

    def _restore(self, path: str) -> None:
        """Copy the workspace's version of a file."""
        source, target = self.root / path, self.folder / path
        self._clear(target)
        if source.exists():
            _copy_file(source, target, source.lstat())

    def _clear(self, target: Path) -> None:
        """Remove what a command may have put in a file's place: a folder, or a link, also above it."""
        for parent in reversed(target.parents):
            inside = parent.is_relative_to(self.folder) and parent != self.folder
            if inside and (parent.is_symlink() or parent.is_file()):
                parent.unlink()
        if target.is_dir() and not target.is_symlink():
            remove(target)
        else:
            target.unlink(missing_ok=True)

    def _put(self, path: str, data: bytes | None) -> None:
        target = self.folder / path
        self._clear(target)
        if data is None:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        source = self.root / path
        if source.exists():
            target.chmod(stat.S_IMODE(source.stat().st_mode))


def _too_much(files: int) -> InputError:
    return InputError(
        f"the command changed {files:,} files, or more than {MOST_CHANGED_BYTES >> 20} MB of text; that is "
        "too much for one task and none of it is kept. Let it write into a folder that git ignores"
    )


class WorkspaceReplicas:
    """Copies for commands that run at the same time, created when first needed."""

    def __init__(
        self, root: Path, folder: Path, sandbox: Sandbox, *, exclude: tuple[str, ...] = (), most: int = 1
    ) -> None:
        self._made: list[Replica] = []
        self._free: list[Replica] = []
        self._returned = threading.Condition()
        self._most = max(1, most)
        self._root, self._folder, self._sandbox, self._exclude = root, folder, sandbox, exclude

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Replica]:
        """A copy for exclusive use. Waits while all are in use."""
        with self._returned:
            while not self._free and len(self._made) >= self._most:
                self._returned.wait()
            if not self._free:
                folder = self._folder / f"copy{len(self._made)}"
                made = Replica(self._root, folder, self._sandbox, exclude=self._exclude)
                self._made.append(made)
                self._free.append(made)
            replica = self._free.pop()
        try:
            yield replica
        finally:
            with self._returned:
                self._free.append(replica)
                self._returned.notify()

    def close(self) -> None:
        """Remove all copies once they have been returned."""
        with self._returned:
            while len(self._free) < len(self._made):
                self._returned.wait()
        for replica in self._made:
            if replica.folder.exists():
                replica.close()


def _copy_file(source: Path, target: Path, info: os.stat_result) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(info.st_mode):
        target.symlink_to(os.readlink(source))
        return
    with source.open("rb") as reading, target.open("wb") as writing:
        _copy_bytes(reading.fileno(), writing.fileno(), info.st_size)
    target.chmod(stat.S_IMODE(info.st_mode) | stat.S_IWUSR)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def _copy_bytes(source: int, target: int, size: int) -> None:
    """Copy all bytes, sharing storage where the file system can."""
    left = size
    while left > 0:
        try:
            moved = os.copy_file_range(source, target, left) if hasattr(os, "copy_file_range") else 0
        except OSError:
            moved = 0
        if not moved:
            break
        left -= moved
    while data := os.read(source, 1 << 20):
        os.write(target, data)
