"""The files that a command sees: the system's, its workspace and toolchains, but no home or shared folder.

Folders that hold the files of users and the sockets of programs are replaced by empty ones, or left out where
a sandbox cannot mount. Toolchains inside them are lent read-only. What is hidden stays hidden inside what is
lent.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from keystroke.agent.sandbox import launcher
from keystroke.agent.sandbox.environment import (
    home_folders,
    outermost,
    paths_excluding,
    program_folders,
    toolchain_paths,
    unix_sockets,
)
from keystroke.agent.sandbox.policy import SandboxPolicy

SCRATCH = Path("/tmp")
_SHARED = ("/tmp", "/run", "/var/tmp", "/dev/shm")
_LENT = ("/run/current-system",)  # programs of NixOS


@dataclass(frozen=True, slots=True)
class FileView:
    """`emptied` folders are empty but for `lent` paths; `hidden` paths are inaccessible; `home` is the user's
    folder, which exists inside."""

    emptied: tuple[Path, ...]
    lent: tuple[Path, ...]
    hidden: tuple[Path, ...]
    home: Path

    @classmethod
    def of(cls, policy: SandboxPolicy) -> FileView:
        seen = (policy.root.resolve(), policy.inside_path, *policy.readonly)
        shared = [Path(name) for name in _SHARED if os.path.isdir(name) and not os.path.islink(name)]
        emptied = outermost([*shared, *home_folders()])
        needed = (*toolchain_paths(), Path(launcher.__file__), *(Path(name) for name in _LENT))
        lent = outermost(path for path in needed if os.path.exists(path) and _is_inside(path, emptied))
        own = [
            path
            for path in program_folders()
            if not any(each.is_relative_to(path) for each in (*seen, Path(sys.prefix)))
        ]
        hidden = tuple(
            path
            for path in outermost([*policy.hidden, *own])
            if os.path.exists(path)
            and not path.is_symlink()
            and (not _is_inside(path, emptied) or _is_inside(path, (*lent, *seen)))
        )
        return cls(emptied, tuple(path for path in lent if path not in hidden), hidden, Path.home())

    def sockets(self, policy: SandboxPolicy) -> tuple[Path, ...]:
        """Sockets of programs outside, by the paths at which the view shows them."""
        found = []
        for path in unix_sockets():
            if not _is_inside(path, self.emptied) or _is_inside(path, self.lent):
                found.append(path)
            for shown, real in policy.readonly.items():
                if path.is_relative_to(real):
                    found.append(shown / path.relative_to(real))
        return tuple(path for path in found if not _is_inside(path, self.hidden))

    def readable(self, policy: SandboxPolicy) -> list[Path]:
        """The fewest paths that cover the view, for a sandbox that can only allow."""
        kept = paths_excluding([*self.hidden, *self.emptied])
        for start in (*self.lent, *policy.readonly.values()):
            kept += paths_excluding(self.hidden, start.resolve())
        return kept


def _is_inside(path: Path, folders: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
