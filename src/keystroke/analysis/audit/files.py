"""Which files of a tree are source that the audit reads.

What does not belong to the tree is left out (`project_files`); links that lead out of the path are not
followed; binary, minified and huge files are skipped and say why. Nothing here reads a rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keystroke.analysis.audit.auditor import MAX_LINE, MAX_TEXT
from keystroke.analysis.project_files import project_files
from keystroke.errors import NotFound

LANGUAGE_OF = {
    ".py": "python",
    ".pyi": "python",
    ".pyw": "python",
    ".js": "javascript",
    ".cjs": "javascript",
    ".mjs": "javascript",
    ".jsx": "javascript",
    ".ts": "typescript",
    ".mts": "typescript",
    ".cts": "typescript",
    ".tsx": "tsx",
    ".c": "c",
    ".h": "c",
    ".cc": "cpp",
    ".cpp": "cpp",
    ".cxx": "cpp",
    ".hpp": "cpp",
    ".hh": "cpp",
    ".go": "go",
    ".java": "java",
}


@dataclass(frozen=True, slots=True)
class Source:
    path: Path
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Skipped:
    path: Path
    why: str


def language_of(path: Path) -> str | None:
    return LANGUAGE_OF.get(path.suffix.lower())


def sources(root: Path, language: str | None = None) -> Iterator[Source | Skipped]:
    """Every file under `root` (or `root` itself) that can be audited, in order of name."""
    if not root.exists():
        raise NotFound(f"{root} does not exist; name a file or a folder to audit")
    if root.is_file():
        kind = language or language_of(root)
        if kind is None:
            yield Skipped(root, "its language is not one the audit knows; say --language")
            return
        yield read(root, kind)
        return
    real = root.resolve()
    for path in project_files(root):
        kind = language_of(path)
        if kind is None or (language is not None and kind != language):
            continue
        if path.is_symlink() and not path.resolve().is_relative_to(real):
            yield Skipped(path, "it is a link out of the audited folder")
        elif path.is_file():
            yield read(path, kind)


def read(path: Path, language: str) -> Source | Skipped:
    try:
        size = path.stat().st_size
        if size > MAX_TEXT * 4:
            return Skipped(path, f"it has {size} bytes")
        data = path.read_bytes()
    except OSError as error:
        return Skipped(path, f"it cannot be read: {error.strerror or error}")
    if b"\0" in data:
        return Skipped(path, "it is binary")
    text = data.decode("utf-8", "surrogateescape" if _other_encoding(data) else "strict").removeprefix(
        "\ufeff"
    )
    if len(text) > MAX_TEXT:
        return Skipped(path, f"it has {len(text)} characters")
    if any(len(line) > MAX_LINE for line in text.splitlines()):
        return Skipped(path, f"it has a line of more than {MAX_LINE} characters: minified or generated")
    return Source(path, language, text)


def _other_encoding(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return True
    return False
