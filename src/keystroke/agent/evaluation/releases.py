"""Tasks made of consecutive releases: the new release's tests on the old release's source.

What ships is names: a package, two versions with their hashes, and the tests that fail on the old source
and pass on the new one (built and verified by `bench/release_tasks.py`). The archives are the user's to
fetch. An archive is hostile until read: only plain files of modest size are unpacked, inside the folder.
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

import msgspec

from keystroke.agent.evaluation.tasks import FolderTask
from keystroke.errors import InputError

_LARGEST_FILE = 4 << 20
_LARGEST_TREE = 64 << 20
_MOST_FILES = 5_000
_TESTS_SHOWN = 12  # failing tests named in an instruction

# A project's own settings may ask for plugins that are not there, and warnings are no failure.
PYTEST = (
    "-m",
    "pytest",
    "-q",
    "--no-header",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "-o",
    "filterwarnings=",
)
ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

Fetch = Callable[[str, str], bytes]  # the source archive of a package's version


class ReleaseTask(msgspec.Struct, frozen=True):
    """One pair of releases. `failing` are pytest's names of tests; `changed` are the source files that the
    new release changed, which a solver is not told."""

    package: str
    old: str
    new: str
    old_sha256: str
    new_sha256: str
    tests: tuple[str, ...]  # test files of the new release
    failing: tuple[str, ...]
    passing: tuple[str, ...]  # tests of the same files that hold on both, and must go on holding
    changed: tuple[str, ...]
    lines: int  # of source that the new release changed
    needs: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.package}-{self.new}"


def release_tasks() -> tuple[ReleaseTask, ...]:
    """The set that ships."""
    data = files("keystroke.agent.evaluation").joinpath("releases.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[ReleaseTask, ...])


def prepared(task: ReleaseTask, folder: Path, fetch: Fetch) -> FolderTask:
    """The task as a folder below `folder`: the old source with the new tests. Unpacks once."""
    place = folder / f"{task.package}-{task.old}-{task.new}"
    if not (place / "ready").exists():
        new = unpacked(_checked(fetch(task.package, task.new), task.new_sha256, task))
        old = unpacked(_checked(fetch(task.package, task.old), task.old_sha256, task))
        write_tree(place / "source", old | {path: new[path] for path in support(new)})
        write_tree(place / "tests", {path: new[path] for path in support(new)})
        (place / "ready").touch()
    tests = {path.relative_to(place / "tests").as_posix(): path for path in (place / "tests").rglob("*")}
    return FolderTask(
        id=task.id,
        instruction=instruction(task),
        source=place / "source",
        files=(),
        tests={name: path for name, path in tests.items() if path.is_file()},
        command=command((*task.failing, *task.passing)),
        check=command((*task.failing, *task.passing)),
        seconds=120.0,
        needs=("pytest", *task.needs),
        environment={**ENVIRONMENT, "PYTHONPATH": "src:."},
    )


def instruction(task: ReleaseTask) -> str:
    """What a solver is told: which tests fail."""
    shown = "\n".join(f"- {name}" for name in task.failing[:_TESTS_SHOWN])
    more = len(task.failing) - _TESTS_SHOWN
    rest = f"\n- and {more} more" if more > 0 else ""
    return (
        f"These tests of {task.package} fail. Change the source, not the tests, so that they pass and all "
        f"others still do:\n{shown}{rest}"
    )


def command(tests: tuple[str, ...]) -> str:
    """The shell line that runs tests by their names."""
    return "{python} " + shlex.join([*PYTEST, "-x", *tests])


def support(tree: dict[str, bytes]) -> list[str]:
    """The files of a tree that its tests consist of: everything in folders of tests, and tests elsewhere."""
    return [path for path in tree if is_test(path)]


def is_test(path: str) -> bool:
    pure = PurePosixPath(path)
    if any(part in ("tests", "test", "testing_data", "testdata") for part in pure.parts[:-1]):
        return True
    return pure.name == "conftest.py" or (
        pure.suffix == ".py" and (pure.name.startswith("test_") or pure.stem.endswith("_test"))
    )


def _checked(data: bytes, sha256: str, task: ReleaseTask) -> bytes:
    if hashlib.sha256(data).hexdigest() != sha256:
        raise InputError(f"an archive of {task.package} is not the one this set was verified with")
    return data


def unpacked(data: bytes) -> dict[str, bytes]:
    """The plain files of a source archive by path, its top folder left out."""
    tree: dict[str, bytes] = {}
    total = 0
    try:
        for name, content in _zip(data) if data[:2] == b"PK" else _tar(data):
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


def _tar(data: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isreg() else None
            if stream is not None and member.size <= _LARGEST_FILE:
                yield member.name, stream.read(_LARGEST_FILE)


def _zip(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if not entry.is_dir() and entry.file_size <= _LARGEST_FILE:
                yield entry.filename, archive.read(entry)


def write_tree(root: Path, tree: dict[str, bytes]) -> None:
    """Write files below `root`, making folders as needed."""
    for path, content in tree.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
