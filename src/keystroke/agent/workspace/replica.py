"""Copies of the workspace on disk, in which commands run.

The user's files are only read. `changes` reports what commands changed in a copy; the next `sync` reverts
it. Secrets are never copied. Repositories and installed packages are mounted read-only where the sandbox
can mount, and linked where it cannot. Files are not linked: a command could write the user's through them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from fnmatch import translate
from itertools import islice
from pathlib import Path

from keystroke.agent.sandbox import Sandbox, SandboxPolicy, credential_paths, secret_files
from keystroke.agent.workspace.listing import ignored_files, is_text
from keystroke.agent.workspace.overlay import Overlay
from keystroke.agent.workspace.scratch import remove
from keystroke.assist.edit.workspace import MAX_BYTES
from keystroke.errors import InputError

MOST_BYTES = 1 << 30
MOST_FILES = 250_000
MOST_CONSIDERED = 50_000  # changed files, before those that git ignores are left out
MOST_CHANGED_BYTES = (
    64 << 20
)  # that one command may change, over all files; sparse files cost nothing to make
MOST_CHANGED_FILES = 5_000
_MOUNTED = frozenset({".git", ".hg", ".svn", "node_modules", ".venv", "venv", ".tox", ".nox", ".direnv"})
CACHES = frozenset({"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis"})

Mark = tuple[int, int, int]  # size, time, inode: enough to detect a write


def mark(info: os.stat_result) -> Mark:
    return info.st_size, info.st_mtime_ns, info.st_ino


class Replica:
    """Created by the first `sync`; `close` removes it."""

    def __init__(self, root: Path, folder: Path, sandbox: Sandbox, *, exclude: tuple[str, ...] = ()) -> None:
        self.root, self.folder = root, folder
        self._output_folder = folder  # by commands
        self._sandbox, self._exclude = sandbox, exclude
        self._secret = re.compile("|".join(map(translate, exclude)) or r"(?!)")
        self._mounted: list[str] = []
        self._marks: dict[str, Mark] = {}
        self._shown: dict[str, str | None] = {}

    def sync(self, overlay: Overlay) -> None:
        """Make the copy hold exactly the workspace with the overlay's changes. InputError where the workspace
        is too large to copy or the disk is full."""
        try:
            self._prepare(overlay)
        except OSError as error:
            raise InputError(
                f"the copy of the workspace in {self.folder} cannot be made: {error.strerror}; "
                "free some room there"
            ) from None

    def _prepare(self, overlay: Overlay) -> None:
        if not self.folder.exists():
            self._copy()
        else:
            self._revert()
        for path in {*self._shown, *overlay.texts}:
            if path not in overlay.texts:
                self._restore(path)
            elif self._shown.get(path, ...) != overlay.texts[path]:
                self._write_file(path, overlay.encode(path))
        self._shown = dict(overlay.texts)
        self._marks = dict(self._walk())

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
        changed = self._changed_sizes()
        if len(changed) > MOST_CONSIDERED:
            raise _too_many_changes(len(changed))
        kept = sorted(name for name in changed.keys() - ignored_files(self.root, changed) if is_text(name))
        wanted = {name: size for name in kept if (size := changed[name]) is None or size <= MAX_BYTES}
        if (
            len(wanted) > MOST_CHANGED_FILES
            or sum(size or 0 for size in wanted.values()) > MOST_CHANGED_BYTES
        ):
            raise _too_many_changes(len(wanted))
        large = [name for name in kept if name not in wanted]
        return {
            name: None if size is None else self._read(name, size) for name, size in wanted.items()
        }, large

    def _changed_sizes(self) -> dict[str, int | None]:
        """The sizes of files that a command changed; None of removed ones."""
        now = dict(self._walk(2 * MOST_FILES))
        names = (name for name in {*now, *self._marks} if now.get(name) != self._marks.get(name))
        return {name: now[name][0] if name in now else None for name in names}

    def _read(self, name: str, size: int) -> bytes:
        """At most the bytes that were counted."""
        with (self._output_folder / name).open("rb") as file:
            return file.read(size)

    def close(self) -> None:
        remove(self.folder)

    def count_files(self, most: int, most_bytes: int) -> dict[str, os.stat_result] | None:
        """Every file and link to copy; None where there are more. Collects the folders to mount."""
        self._mounted.clear()
        found: dict[str, os.stat_result] = {}
        size = 0
        for name, entry in walk(self.root, enter=self._enters):
            if entry.is_symlink() or (entry.is_file() and not self._is_secret(entry.name)):
                info = found[name] = entry.stat(follow_symlinks=False)
                size += info.st_size
                if len(found) > most or size > most_bytes:
                    return None
        return found

    def _copy(self) -> None:
        found = self.count_files(MOST_FILES, MOST_BYTES)  # a copy that is too large is not begun
        if found is None:
            raise InputError(
                f"{self.root} has more than {MOST_FILES:,} files or {MOST_BYTES >> 20:,} MB, too much to "
                "copy for a command; run this in the folder that the task is about"
            )
        self.folder.mkdir(mode=0o700, parents=True)
        for name, info in found.items():
            _copy_file(f"{self.root}/{name}", f"{self.folder}/{name}", info)
        if not self._sandbox.kind.can_mount:
            for name in self._mounted:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).symlink_to(self.root / name)

    def _enters(self, name: str, entry: os.DirEntry[str]) -> bool:
        """Whether a folder is copied; others are mounted, or caches."""
        if entry.name in _MOUNTED or os.path.exists(f"{entry.path}/pyvenv.cfg"):
            self._mounted.append(name)
            return False
        return entry.name not in CACHES

    def _is_secret(self, name: str) -> bool:
        return self._secret.match(name) is not None

    def _walk(self, most: int | None = None) -> Iterator[tuple[str, Mark]]:
        """The regular files of the copy, without mounted folders; the first `most` of them."""
        mounted = set(self._mounted)

        def enter(name: str, entry: os.DirEntry[str]) -> bool:
            return name not in mounted and entry.name not in CACHES

        files = (found for found in walk(self.folder, enter=enter) if found[1].is_file(follow_symlinks=False))
        for name, entry in islice(files, most):
            with contextlib.suppress(OSError):
                yield name, mark(entry.stat(follow_symlinks=False))

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

    def _write_file(self, path: str, data: bytes | None) -> None:
        target = self.folder / path
        self._clear(target)
        if data is None:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        source = self.root / path
        if source.exists():
            target.chmod(stat.S_IMODE(source.stat().st_mode))


def walk(
    top: Path, inside: str = "", *, enter: Callable[[str, os.DirEntry[str]], bool] = lambda *_: True
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below `top/inside` by its name below `top`, also folders. Does not recurse, does not follow
    links, and leaves out what cannot be read or lies deeper than a path can name."""
    waiting = [inside]
    while waiting:
        above = waiting.pop()
        try:
            with os.scandir(os.path.join(top, above)) as entries:
                found = list(entries)
        except OSError:
            continue
        for entry in found:
            name = f"{above}/{entry.name}" if above else entry.name
            if entry.is_dir(follow_symlinks=False) and enter(name, entry):
                waiting.append(name)
            yield name, entry


def _too_many_changes(files: int) -> InputError:
    return InputError(
        f"the command changed {files:,} files, or more than {MOST_CHANGED_BYTES >> 20} MB of text; that is "
        "too much for one task and none of it is kept. Let it write into a folder that git ignores"
    )


def _copy_file(source: Path | str, target: Path | str, info: os.stat_result) -> None:
    try:
        _copy_into_folder(source, target, info)
    except FileNotFoundError:  # of its folder; asking for each file would take a third of the time
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _copy_into_folder(source, target, info)


def _copy_into_folder(source: Path | str, target: Path | str, info: os.stat_result) -> None:
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
        return
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _copy_bytes(reading, writing, info.st_size)
            os.fchmod(writing, stat.S_IMODE(info.st_mode) | stat.S_IWUSR)
            os.utime(writing, ns=(info.st_atime_ns, info.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


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
