"""Source files from a source archive or a wheel, read in memory.

Nothing is written or executed. Archives are untrusted: the number and size of entries and the total are
bounded, and a damaged archive yields what could be read before the damage.
"""

from __future__ import annotations

import io
import lzma
import posixpath
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator

MAX_FILE = 512 << 10
MAX_TOTAL = 64 << 20
MAX_ENTRIES = 20_000


def python_files(data: bytes, filename: str, *, sdist: bool) -> Iterator[tuple[str, bytes]]:
    """(path inside the project, bytes) of each .py file. A source archive's top folder is left out of
    the path."""
    for path, content, _ in source_files(data, filename, frozenset([".py"])):
        parts = path.split("/")
        yield "/".join(parts[1:] if sdist and len(parts) > 1 else parts), content


def source_files(
    data: bytes, filename: str, suffixes: frozenset[str], also: tuple[str, ...] = ()
) -> Iterator[tuple[str, bytes, float]]:
    """(path, bytes, time of change; 0 where none is known) of each file with one of the `suffixes`, or whose
    path ends in one of `also`."""

    def wanted(path: str, size: int) -> bool:
        return (posixpath.splitext(path)[1] in suffixes or path.endswith(also)) and 0 < size <= MAX_FILE

    entries = (_zip_entries if filename.endswith((".zip", ".whl")) else _tar_entries)(data, wanted)
    return _bounded(entries)


def _bounded(entries: Iterator[tuple[str, bytes, float]]) -> Iterator[tuple[str, bytes, float]]:
    """The entries up to the limits, or up to where the archive is damaged."""
    total = 0
    try:
        for count, (path, content, changed) in enumerate(entries):
            total += len(content)
            if count >= MAX_ENTRIES or total > MAX_TOTAL:
                return
            yield path, content, changed
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        OSError,
        ValueError,
        NotImplementedError,
    ):
        return


def text_files(data: bytes, wanted: Callable[[str], bool], largest: int) -> Iterator[tuple[str, str]]:
    """(path without its top folder, text) of each wanted UTF-8 file of a tar archive."""

    def chosen(path: str, size: int) -> bool:
        return 0 < size <= largest and wanted(path.partition("/")[2])

    for path, content, _ in _bounded(_tar_entries(data, chosen)):
        try:
            yield path.partition("/")[2], content.decode().replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue


Wanted = Callable[[str, int], bool]


def _tar_entries(data: bytes, wanted: Wanted) -> Iterator[tuple[str, bytes, float]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as archive:
        for member in archive:
            path = member.name.removeprefix("./")
            if member.isreg() and wanted(path, member.size):
                stream = archive.extractfile(member)
                if stream is not None:
                    yield path, stream.read(MAX_FILE), float(member.mtime)


def _zip_entries(data: bytes, wanted: Wanted) -> Iterator[tuple[str, bytes, float]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if wanted(entry.filename, entry.file_size):
                with archive.open(entry) as stream:
                    yield entry.filename, stream.read(MAX_FILE), 0.0
