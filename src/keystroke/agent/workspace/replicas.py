"""The copies of a task's workspace: plain ones of a small workspace, layers over a large one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from keystroke.agent.sandbox import Sandbox
from keystroke.agent.workspace.layered import LayeredReplica
from keystroke.agent.workspace.replica import Replica

# Mounting is faster than copying more than some hundred files, but a test runner can be loaded ahead only in
# a plain copy: it would not see files that change below a mounted layer.
LAYERED_FILES = 5_000
LAYERED_BYTES = 256 << 20


class WorkspaceReplicas:
    """Copies for commands that run at the same time, created when first needed."""

    def __init__(
        self, root: Path, folder: Path, sandbox: Sandbox, *, exclude: tuple[str, ...] = (), most: int = 1
    ) -> None:
        self._replicas: list[Replica] = []
        self._free: list[Replica] = []
        self._returned = threading.Condition()
        self._most = max(1, most)
        self._root, self._folder, self._sandbox, self._exclude = root, folder, sandbox, exclude

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Replica]:
        """A copy for exclusive use. Waits while all are in use."""
        with self._returned:
            while not self._free and len(self._replicas) >= self._most:
                self._returned.wait()
            if not self._free:
                folder = self._folder / f"copy{len(self._replicas)}"
                replica = self._choose_kind()(self._root, folder, self._sandbox, exclude=self._exclude)
                self._replicas.append(replica)
                self._free.append(replica)
            replica = self._free.pop()
        try:
            yield replica
        finally:
            with self._returned:
                self._free.append(replica)
                self._returned.notify()

    def _choose_kind(self) -> type[Replica]:
        if self._replicas:
            return type(self._replicas[0])
        trial = LayeredReplica(self._root, self._folder / "trial", self._sandbox, exclude=self._exclude)
        is_small = trial.count_files(LAYERED_FILES, LAYERED_BYTES) is not None
        return Replica if is_small or not trial.is_possible() else LayeredReplica

    def close(self) -> None:
        """Remove all copies once they have been returned."""
        with self._returned:
            while len(self._free) < len(self._replicas):
                self._returned.wait()
        for replica in self._replicas:
            if replica.folder.exists():
                replica.close()
