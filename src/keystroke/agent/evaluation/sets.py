"""Loads a set of tasks from a file, a folder or an archive, whose format is detected.

An archive is unpacked into a cache, plain files only. The set made of releases has a name instead of a
path; the caller fetches its archives.
"""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import msgspec

from keystroke.agent.evaluation.folder_sets import folder_tasks
from keystroke.agent.evaluation.function_sets import function_tasks
from keystroke.agent.evaluation.releases import Fetch, archive_files, prepare_task, release_tasks
from keystroke.agent.evaluation.tasks import FolderTask, Task
from keystroke.errors import InputError, NotFound

RELEASES = "releases"
_LARGEST = 2 << 30
_ARCHIVES = (".zip", ".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz")


def load_set(where: str, cache: Path, fetch: Fetch | None = None) -> tuple[str, list[Task]]:
    """The name of a set and its tasks. NotFound or InputError where there are none."""
    if where == RELEASES:
        if fetch is None:
            raise InputError("the set of releases needs its archives; name a way to fetch them")
        return RELEASES, [prepare_task(task, cache / "releases", fetch) for task in release_tasks()]
    path = Path(where).expanduser()
    if not path.exists():
        raise NotFound(f"there is no set at {path}; give a file, a folder or an archive, or `{RELEASES}`")
    if path.is_file() and path.name.endswith(_ARCHIVES):
        path = _unpack(path, cache / "sets")
    found: Sequence[Task] | None = folder_tasks(path) if path.is_dir() else function_tasks(path)
    if not found and path.is_dir():
        for file in sorted(path.rglob("*.jsonl*")):
            if found := function_tasks(file):
                break
    if not found:
        raise InputError(
            f"{where} holds no tasks in a known format: JSON lines as of HumanEval, MBPP+ or BigCodeBench, "
            "or folders as of Terminal-Bench or the polyglot benchmark"
        )
    return Path(where).name, list(found)


def select_tasks(tasks: Sequence[Task], only: Sequence[str], limit: int) -> list[Task]:
    """The tasks whose names match a pattern; where there are too many, evenly spread over the set."""
    kept = [task for task in tasks if not only or any(fnmatch(task.id, pattern) for pattern in only)]
    if not kept:
        raise NotFound(f"no task is called {', '.join(only)}")
    if limit and len(kept) > limit:
        kept = [kept[number * len(kept) // limit] for number in range(limit)]
    return kept


def with_test_timeout(tasks: Sequence[Task], seconds: float) -> list[Task]:
    """The tasks with another time limit for a folder's tests; 0: the set's own."""
    return [
        msgspec.structs.replace(task, seconds=seconds) if seconds and isinstance(task, FolderTask) else task
        for task in tasks
    ]


def _unpack(archive: Path, cache: Path) -> Path:
    """Unpack an archive below the cache, once per version."""
    name = hashlib.sha256(f"{archive.resolve()} {archive.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache / name
    if (folder / ".ready").exists():
        return folder
    total = 0
    try:
        with archive.open("rb") as file:
            for member, data in archive_files(file, _LARGEST):
                total = _write(folder, member, data, total)
    except (tarfile.TarError, zipfile.BadZipFile, OSError, EOFError) as error:
        raise InputError(f"{archive} cannot be unpacked: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".ready").touch()
    return folder


def _write(folder: Path, name: str, data: bytes, total: int) -> int:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise InputError(f"an archive names {name!r:.80}, which leads out of its folder")
    if total + len(data) > _LARGEST:
        raise InputError(f"an archive holds more than {_LARGEST >> 30} GB; unpack it yourself")
    target = folder / pure
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    return total + len(data)
