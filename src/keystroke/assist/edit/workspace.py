"""The folder a user opened: reads files in it and writes several at once, all or none.

Nothing outside the folder and nothing in `.git` is read or written, however a path is spelled and wherever a
link leads. A file that changed since it was read is not written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch, fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath

from keystroke.errors import Forbidden, InputError, KeystrokeError, NotFound
from keystroke.text.encoding import Decoded, decode, digest

if sys.platform != "win32":
    import fcntl

_ENDING = ".keystroke"
MAX_BYTES = 8 << 20  # larger files are data


@dataclass(frozen=True, slots=True)
class WorkspaceFile:
    """A file as it was read. `path` is relative to the workspace, with forward slashes."""

    path: str
    decoded: Decoded
    digest: str
    mode: int

    @property
    def text(self) -> str:
        return self.decoded.text


@dataclass(frozen=True, slots=True)
class FileWrite:
    """New content of a file (None: remove it), and the digest of its current content (None: no file)."""

    path: str
    data: bytes | None
    expected: str | None
    mode: int | None = None  # of a file that does not exist yet


@cache
def _auto_executed() -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """The patterns of `auto_executed.toml`, and names that count only outside some folders."""
    text = resources.files(__package__).joinpath("auto_executed.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    outside: dict[str, list[str]] = tables.pop("outside")
    return tuple(pattern for patterns in tables.values() for pattern in patterns), outside


def is_auto_executed(path: str) -> bool:
    """Whether the file is executed automatically or instructs a program that acts, so that a change of it
    always needs the user's approval."""
    patterns, outside = _auto_executed()
    parts = PurePosixPath(path.lower()).parts
    tails = ["/".join(parts[at:]) for at in range(len(parts))]
    if any(fnmatchcase(tail, pattern) for tail in tails for pattern in patterns):
        return True
    return bool(parts) and parts[-1] in outside and set(parts[:-1]).isdisjoint(outside[parts[-1]])


class Workspace:
    """The files under one folder. Raises NotFound where there is no such folder."""

    def __init__(self, root: Path, *, exclude: Sequence[str] = (), max_bytes: int = MAX_BYTES) -> None:
        """`exclude`: file name patterns that are never read, because they may hold secrets."""
        if not root.is_dir():
            raise NotFound(f"the workspace {root} is not a folder")
        self.root = root.resolve()
        self._exclude = tuple(exclude)
        self._max_bytes = max_bytes

    def name(self, path: str | Path) -> str:
        """The workspace name of a path given by the user, relative to the current folder or absolute."""
        absolute = Path(os.path.abspath(path))
        for root in (self.root, Path(os.path.abspath(self.root))):
            if absolute.is_relative_to(root):
                return absolute.relative_to(root).as_posix()
        real = absolute.resolve()
        if real.is_relative_to(self.root):
            return real.relative_to(self.root).as_posix()
        raise Forbidden(f"{path} is outside the workspace {self.root}; open the folder that holds it")

    def locate(self, path: str) -> Path:
        """The real file behind a workspace path. Forbidden where it would leave the workspace."""
        pure = PurePosixPath(path)
        if not path or "\0" in path or pure.is_absolute() or path.startswith("~") or Path(path).drive:
            raise Forbidden(f"{path!r} is not a path inside the workspace; give one relative to {self.root}")
        if ".." in pure.parts or "\\" in path:
            raise Forbidden(f"{path} must name a file inside the workspace, without '..' or backslashes")
        try:
            real = (self.root / pure).resolve()
        except (OSError, RuntimeError):  # a loop of links
            raise Forbidden(f"{path} cannot be followed to a file; it is not touched") from None
        if not real.is_relative_to(self.root) or real == self.root:
            raise Forbidden(f"{path} leads outside the workspace {self.root}; it is not touched")
        if any(part.lower() == ".git" for part in (*pure.parts, *real.relative_to(self.root).parts)):
            raise Forbidden(f"{path} belongs to the repository's own files; it is not touched")
        if any(fnmatch(name, pattern) for name in (pure.name, real.name) for pattern in self._exclude):
            raise Forbidden(f"{path} may hold secrets (assist.exclude); it is neither read nor written")
        return real

    def read(self, path: str) -> WorkspaceFile:
        """Read one file. NotFound, Forbidden, or InputError for what is no text or too large."""
        data = self.read_bytes(path)
        if data is None:
            raise NotFound(f"{path} does not exist in the workspace {self.root}")
        mode = _mode(self.locate(path))
        return WorkspaceFile(PurePosixPath(path).as_posix(), decode(data, path), digest(data), mode)

    def read_bytes(self, path: str) -> bytes | None:
        """The bytes of a file, None where there is none."""
        real = self.locate(path)
        try:
            info = real.stat()
            if not stat.S_ISREG(info.st_mode):
                raise InputError(f"{path} is not a regular file; only text files can be edited")
            if info.st_size > self._max_bytes:
                raise InputError(
                    f"{path} has {info.st_size:,} bytes; files above {self._max_bytes:,} bytes are not edited"
                )
            return real.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}; check its permissions") from None

    def check_writable(self, path: str) -> None:
        """Raise Forbidden where the file exists and is read-only."""
        target = self.locate(path)
        if target.exists() and not (target.stat().st_mode & 0o222 and os.access(target, os.W_OK)):
            raise Forbidden(f"{path} is read-only; make it writable first")

    def write(self, writes: Sequence[FileWrite], tag: str = "edit") -> None:
        """Perform all writes or none. Every new content is on disk beside its target before the first file is
        replaced; if a replacement fails, those already made are reverted. `tag` is part of the temporary
        names, for `clear`."""
        targets = {write.path: self.locate(write.path) for write in writes}
        if len(set(targets.values())) < len(writes):
            raise InputError("two of the files to write are the same file under two names; name it once")
        with _lock(self.root):
            self._write(writes, targets, tag)

    def _write(self, writes: Sequence[FileWrite], targets: Mapping[str, Path], tag: str) -> None:
        before = {write.path: self._read_unchanged(write) for write in writes}
        modes = {
            write.path: write.mode if before[write.path] is None else _mode(targets[write.path])
            for write in writes
        }
        written = {write.path: write.data for write in writes}
        with contextlib.ExitStack() as cleanup:
            staged = {
                write.path: self._stage(targets[write.path], write.data, modes[write.path], cleanup, tag)
                for write in writes
                if write.data is not None
            }
            done: list[str] = []
            try:
                for write in writes:
                    # Staging took time: check again.
                    self._read_unchanged(write)
                    done.append(write.path)
                    _put_in_place(targets[write.path], staged.get(write.path))
            except BaseException as error:
                lost = [
                    path
                    for path in done
                    if not self._restore(targets[path], before[path], written[path], modes[path], tag)
                ]
                state = (
                    f"{', '.join(lost)} could not be restored, undo it later"
                    if lost
                    else "no file was changed"
                )
                if isinstance(error, OSError):
                    raise InputError(f"{done[-1]} cannot be written: {error.strerror}; {state}") from None
                raise
            cleanup.pop_all()
        for folder in {target.parent for target in targets.values()}:
            _sync_folder(folder)

    def _read_unchanged(self, write: FileWrite) -> bytes | None:
        data = self.read_bytes(write.path)
        if (None if data is None else digest(data)) != write.expected:
            raise InputError(
                f"{write.path} changed on disk since it was read; nothing was written, try again"
            )
        self.check_writable(write.path)
        return data

    def clear(self, paths: Iterable[str], tag: str) -> None:
        """Remove temporary files that an interrupted write with this tag left beside these files."""
        for path in paths:
            with contextlib.suppress(OSError, KeystrokeError):
                target = self.locate(path)
                head = _temporary_prefix(target, tag)
                for name in os.listdir(target.parent):
                    if name.startswith(head) and name.endswith(_ENDING):
                        (target.parent / name).unlink()

    def _stage(
        self, target: Path, data: bytes, mode: int | None, cleanup: contextlib.ExitStack, tag: str
    ) -> Path:
        """Write the new content to a temporary file in the target's folder, with the target's mode."""
        name = target.with_name(f"{_temporary_prefix(target, tag)}{secrets.token_hex(6)}{_ENDING}")
        try:
            for folder in _missing_folders(target.parent):
                folder.mkdir()
                cleanup.callback(_suppress_errors, folder.rmdir)
            # O_EXCL: fails on a planted link. Private until it has the target's mode.
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
            cleanup.callback(_suppress_errors, name.unlink)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if target.exists() and hasattr(os, "chown"):
                # Keep the owner, also when root edits the file in a container.
                with contextlib.suppress(PermissionError):
                    os.chown(name, target.stat().st_uid, target.stat().st_gid)
            if mode is not None:
                name.chmod(mode)
        except OSError as error:
            raise InputError(f"{target} cannot be written: {error.strerror}; no file was changed") from None
        return name

    def _restore(
        self, target: Path, data: bytes | None, written: bytes | None, mode: int | None, tag: str
    ) -> bool:
        """Restore a replaced file; False where that fails, or the written file was changed since."""
        try:
            with contextlib.ExitStack() as cleanup:
                now = target.read_bytes() if target.exists() else None
                if now not in (data, written):
                    return False
                if data is None:
                    target.unlink(missing_ok=True)
                elif now != data:
                    _put_in_place(target, self._stage(target, data, mode, cleanup, tag))
        except (OSError, InputError):
            return False
        return True


@contextlib.contextmanager
def _lock(root: Path) -> Iterator[None]:
    """Keep other processes and threads from writing to the same workspace. A file system without locks is
    written without one."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _temporary_prefix(target: Path, tag: str) -> str:
    """The prefix of temporary names in a target's folder; short enough for every file system."""
    return f".{target.name.encode()[:100].decode(errors='ignore')}.{tag}."


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _put_in_place(target: Path, staged: Path | None) -> None:
    if staged is None:
        target.unlink()
    else:
        os.replace(staged, target)


def _missing_folders(folder: Path) -> Iterator[Path]:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    yield from reversed(missing)


def _suppress_errors(action: Callable[[], None]) -> None:
    with contextlib.suppress(OSError):
        action()


def _sync_folder(folder: Path) -> None:
    """Make renames durable where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
