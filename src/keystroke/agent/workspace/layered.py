"""A large workspace in two layers: the user's files below, which the kernel never writes, and a folder above
that takes what differs from them.

The upper layer is rebuilt by each `sync`: files that the task changed, and whiteouts over files that it
removed and over secrets. What a command changed is what it added to the upper layer, so neither takes longer
in a larger workspace, except for a look at its names.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from keystroke.agent.sandbox import Layers, Sandbox, SandboxPolicy, credential_paths
from keystroke.agent.workspace.overlay import Overlay
from keystroke.agent.workspace.replica import CACHES, Replica, mark, walk
from keystroke.agent.workspace.scratch import remove
from keystroke.assist.edit.workspace import MAX_BYTES
from keystroke.errors import KeystrokeError

_WHITEOUT = os.makedev(0, 0)
_TRIAL = ".keystroke-trial"


class LayeredReplica(Replica):
    """Needs a sandbox that can mount; `is_possible` says whether the kernel mounts layers for it."""

    def __init__(self, root: Path, folder: Path, sandbox: Sandbox, *, exclude: tuple[str, ...] = ()) -> None:
        super().__init__(root, folder, sandbox, exclude=exclude)
        self._upper = self._output_folder = folder / "upper"
        self._covered: set[str] = set()  # by whiteouts of the last `sync`

    def is_possible(self) -> bool:
        """Try it: file systems differ in what they take as a layer, kernels in whom they let mount one."""
        if not self._sandbox.kind.can_mount or self.root.stat().st_uid != os.getuid():
            return False  # files of other users could not be written
        script = f"mkdir {_TRIAL}/folder && rmdir {_TRIAL}/folder && echo > {_TRIAL}/file"
        try:
            self._make_folders()
            os.setxattr(self._upper, "user.overlay.trial", b"")
            self._cover(f"{_TRIAL}/folder")
            ended = self._sandbox.run(["/bin/sh", "-c", script], self.sandbox_policy())
            return ended.ok and (self._upper / _TRIAL / "file").exists()
        except (OSError, KeystrokeError):
            return False
        finally:
            self.close()

    def sandbox_policy(self, *, network: bool = False) -> SandboxPolicy:
        mounted = {self.root / name: (self.root / name).resolve() for name in self._mounted}
        layers = Layers(self.root, self._upper, self.folder / "work")
        return SandboxPolicy(
            self.folder / "root", self.root, mounted, credential_paths(), network, layers=layers
        )

    def _prepare(self, overlay: Overlay) -> None:
        self._make_folders()
        for name in self._hidden_files():
            self._cover(name)
        for path, text in overlay.texts.items():  # removed files first: one may have become a folder
            if text is None and os.path.lexists(self.root / path):
                self._cover(path)
        for path, text in overlay.texts.items():
            if text is not None:
                self._write_file(path, overlay.encode(path))

    def _make_folders(self) -> None:
        remove(self.folder)
        for name in ("root", "upper", "work"):
            (self.folder / name).mkdir(mode=0o700, parents=True)
        self._upper.chmod(stat.S_IMODE(self.root.stat().st_mode) | stat.S_IRWXU)
        self._covered, self._marks = set(), {}

    def _hidden_files(self) -> Iterator[str]:
        """Secrets, and what is neither a file nor a link nor a folder; collects the folders to mount."""
        self._mounted.clear()
        for name, entry in walk(self.root, enter=self._enters):
            if entry.is_file(follow_symlinks=False):
                if self._is_secret(entry.name):
                    yield name
            elif not entry.is_dir(follow_symlinks=False) and not entry.is_symlink():
                yield name

    def _enters(self, name: str, entry: os.DirEntry[str]) -> bool:
        return super()._enters(name, entry) or entry.name in CACHES  # seen here, so searched for secrets

    def _cover(self, name: str) -> None:
        """Hide a file of the lower layer."""
        if name in self._covered:
            return
        self._make_folder(name.rpartition("/")[0])
        os.mknod(self._upper / name, stat.S_IFCHR, _WHITEOUT)
        self._covered.add(name)

    def _write_file(self, name: str, data: bytes | None) -> None:
        self._make_folder(name.rpartition("/")[0])
        target, source = self._upper / name, self.root / name
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        target.write_bytes(data or b"")
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            target.chmod(stat.S_IMODE(source.stat().st_mode) | stat.S_IWUSR)
        self._marks[name] = mark(target.stat())

    def _make_folder(self, name: str) -> None:
        """A folder of the upper layer, with the modes of the workspace's own."""
        if not name or (self._upper / name).is_dir():
            return
        self._make_folder(name.rpartition("/")[0])
        target = self._upper / name
        with contextlib.suppress(FileNotFoundError):
            target.unlink()  # the file that was there
        target.mkdir()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            target.chmod(stat.S_IMODE((self.root / name).stat().st_mode) | stat.S_IRWXU)

    def _changed_sizes(self) -> dict[str, int | None]:
        sizes: dict[str, int | None] = {}
        present: set[str] = set()
        removed: set[str] = set()
        for name, entry in walk(self._upper):
            with contextlib.suppress(OSError):
                upper, lower = entry.stat(follow_symlinks=False), self._lower_stat(name)
                if stat.S_ISREG(upper.st_mode):
                    present.add(name)
                    if not self._is_as_before(name, upper, lower):
                        sizes[name] = upper.st_size
                if lower is not None and _hides(entry, upper, lower):
                    removed.update(self._lower_files(name, lower))
        removed |= self._marks.keys()
        return sizes | dict.fromkeys(removed - present - self._covered)

    def _lower_stat(self, name: str) -> os.stat_result | None:
        try:
            return os.lstat(self.root / name)
        except OSError:
            return None

    def _is_as_before(self, name: str, upper: os.stat_result, lower: os.stat_result | None) -> bool:
        if name in self._marks:
            return self._marks[name] == mark(upper)
        if lower is None or name in self._covered or not stat.S_ISREG(lower.st_mode):
            return False
        # The kernel copies a file when it is opened for writing, or its mode is changed.
        if (lower.st_size, lower.st_mtime_ns) != (upper.st_size, upper.st_mtime_ns):
            return False
        return upper.st_size > MAX_BYTES or filecmp.cmp(self._upper / name, self.root / name, shallow=False)

    def _lower_files(self, name: str, lower: os.stat_result) -> Iterator[str]:
        if stat.S_ISREG(lower.st_mode):
            yield name
        elif stat.S_ISDIR(lower.st_mode):
            mounted = set(self._mounted)
            for below, entry in walk(self.root, name, enter=lambda name, _: name not in mounted):
                if entry.is_file(follow_symlinks=False):
                    yield below


def _hides(entry: os.DirEntry[str], upper: os.stat_result, lower: os.stat_result) -> bool:
    """Whether files of the lower layer are not seen any more."""
    if stat.S_ISDIR(upper.st_mode) and stat.S_ISDIR(lower.st_mode):
        try:
            return os.getxattr(entry.path, "user.overlay.opaque", follow_symlinks=False) == b"y"
        except OSError:
            return False
    return not (stat.S_ISREG(upper.st_mode) and stat.S_ISREG(lower.st_mode))
