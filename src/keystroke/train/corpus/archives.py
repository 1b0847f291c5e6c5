"""Python files out of a source archive or a wheel, in memory.

Law: nothing is written or executed. An archive is hostile until read: entries, sizes and the total are
bounded, and a damaged one gives what could be read before the damage.
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator

MAX_FILE = 512 << 10
MAX_TOTAL = 64 << 20
MAX_ENTRIES = 20_000


def python_files(data: bytes, filename: str, *, sdist: bool) -> Iterator[tuple[str, bytes]]:
    """(path inside the project, bytes) of each .py file. A source archive's top folder is left out of
    the path."""
    entries = _zip_entries(data) if filename.endswith((".zip", ".whl")) else _tar_entries(data)
    total = 0
    try:
        for count, (path, content) in enumerate(entries):
            total += len(content)
            if count >= MAX_ENTRIES or total > MAX_TOTAL:
                return
            parts = path.split("/")
            yield "/".join(parts[1:] if sdist and len(parts) > 1 else parts), content
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        ValueError,
        NotImplementedError,
    ):
        return


def _wanted(path: str, size: int) -> bool:
    return path.endswith(".py") and 0 < size <= MAX_FILE


def _tar_entries(data: bytes) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as archive:
        for member in archive:
            if member.isreg() and _wanted(member.name, member.size):
                stream = archive.extractfile(member)
                if stream is not None:
                    yield member.name, stream.read(MAX_FILE)


def _zip_entries(data: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if _wanted(entry.filename, entry.file_size):
                with archive.open(entry) as stream:
                    yield entry.filename, stream.read(MAX_FILE)
