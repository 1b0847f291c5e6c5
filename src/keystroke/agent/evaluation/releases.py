"""Tasks made of consecutive releases: the new release's tests on the old release's source.

The shipped list names a package, two versions with their hashes, and the tests that fail on the old source
and pass on the new one (built and verified by `bench/release_tasks.py`). Archives are untrusted: only
plain files of limited size are unpacked, inside the folder.
"""

from __future__ import annotations

import hashlib
import io
import shlex
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec

from keystroke.agent.evaluation.tasks import FolderTask
from keystroke.errors import InputError

_LARGEST_FILE = 4 << 20
_LARGEST_TREE = 64 << 20
_MOST_FILES = 5_000
_TESTS_SHOWN = 12  # failing tests named in an instruction

# A project's settings may require missing plugins, and warnings are not failures.
PYTEST = shlex.split("-m pytest -q --no-header -p no:cacheprovider -o addopts= -o filterwarnings=")
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

Fetch = Callable[[str, str], bytes]  # the source archive of a package's version


class ReleaseTask(msgspec.Struct, frozen=True):
    """One pair of releases. `failing` are pytest names; `changed` are the source files that the new
    release changed, which a solver does not see."""

    package: str
    old: str
    new: str
    old_sha256: str
    new_sha256: str
    tests: tuple[str, ...]  # test files of the new release
    failing: tuple[str, ...]
    passing: tuple[str, ...]  # tests of the same files that pass on both and must still pass
    changed: tuple[str, ...]
    lines: int  # of source that the new release changed
    needs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.package}-{self.new}"


def release_tasks() -> tuple[ReleaseTask, ...]:
    """The shipped set."""
    data = files("keystroke.agent.evaluation").joinpath("releases.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[ReleaseTask, ...])


def prepare_task(task: ReleaseTask, folder: Path, fetch: Fetch) -> FolderTask:
    """Create the task below `folder`: the old source with the new tests. Unpacks once."""
    target_folder = folder / f"{task.package}-{task.old}-{task.new}"
    if not (target_folder / "ready").exists():
        new = unpack_archive(_check_hash(fetch(task.package, task.new), task.new_sha256, task))
        old = unpack_archive(_check_hash(fetch(task.package, task.old), task.old_sha256, task))
        write_tree(target_folder / "source", old | {path: new[path] for path in support_files(new)})
        write_tree(target_folder / "tests", {path: new[path] for path in support_files(new)})
        (target_folder / "ready").touch()
    tests = {
        path.relative_to(target_folder / "tests").as_posix(): path
        for path in (target_folder / "tests").rglob("*")
    }
    return FolderTask(
        id=task.id,
        instruction=instruction(task),
        source=target_folder / "source",
        files=(),
        tests={name: path for name, path in tests.items() if path.is_file()},
        command=command((*task.failing, *task.passing)),
        check=command((*task.failing, *task.passing)),
        seconds=120.0,
        needs=("pytest", *task.needs),
        environment={**ENVIRONMENT, "PYTHONPATH": "src:."},
    )


def instruction(task: ReleaseTask) -> str:
    """The solver's instruction: which tests fail."""
    shown = "\n".join(f"- {name}" for name in task.failing[:_TESTS_SHOWN])
    more = len(task.failing) - _TESTS_SHOWN
    rest = f"\n- and {more} more" if more > 0 else ""
    return (
        f"These tests of {task.package} fail. Change the source, not the tests, so that they pass and all "
        f"others still do:\n{shown}{rest}"
    )


def command(tests: tuple[str, ...]) -> str:
    """The shell command that runs tests by name."""
    return "{python} " + shlex.join([*PYTEST, "-x", *tests])


def support_files(tree: dict[str, bytes]) -> list[str]:
    """The files of a tree that belong to its tests."""
    return [path for path in tree if is_test(path)]


def is_test(path: str) -> bool:
    pure = PurePosixPath(path)
    if any(part in ("tests", "test", "testing_data", "testdata") for part in pure.parts[:-1]):
        return True
    return pure.name == "conftest.py" or (
        pure.suffix == ".py" and (pure.name.startswith("test_") or pure.stem.endswith("_test"))
    )


def _check_hash(data: bytes, sha256: str, task: ReleaseTask) -> bytes:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise InputError(f"an archive of {task.package} is not the one this set was verified with")
    return data


def unpack_archive(data: bytes) -> dict[str, bytes]:
    """The plain files of a source archive by path, without its top folder."""
    tree: dict[str, bytes] = {}
    total = 0
    try:
        for name, content in archive_files(io.BytesIO(data), _LARGEST_FILE):
            path = PurePosixPath(*PurePosixPath(name).parts[1:])
            if not path.parts or path.is_absolute() or ".." in path.parts:
                continue
            total += len(content)
            if total > _LARGEST_TREE or len(tree) >= _MOST_FILES:
                raise InputError("an archive is larger than a task may be")
            tree[path.as_posix()] = content
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise InputError(f"an archive cannot be read: {error}") from None
    return tree


def archive_files(file: BinaryIO, largest: int) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the plain files in a zip or tar archive, up to `largest` bytes each."""
    is_zip = file.read(2) == b"PK"
    file.seek(0)
    if is_zip:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and entry.file_size <= largest:
                    yield entry.filename, archive.read(entry)
        return
    with tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is not None and member.size <= largest:
                yield member.name, stream.read(largest)


def write_tree(root: Path, tree: dict[str, bytes]) -> None:
    """Write files below `root`, making folders as needed."""
    for path, content in tree.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
