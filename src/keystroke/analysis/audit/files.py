"""Finds the source files of a folder that can be audited.

Files that `project_files` excludes are left out. Links out of the folder and binary, minified or huge files
are returned as skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keystroke.analysis.audit.auditor import MAX_LINE, MAX_TEXT
from keystroke.analysis.project_files import project_files
from keystroke.errors import NotFound

_SUFFIXES = {
    "python": (".py", ".pyi", ".pyw"),
    "javascript": (".js", ".cjs", ".mjs", ".jsx"),
    "typescript": (".ts", ".mts", ".cts"),
    "tsx": (".tsx",),
    "c": (".c", ".h"),
    "cpp": (".cc", ".cpp", ".cxx", ".hpp", ".hh"),
    "go": (".go",),
    "java": (".java",),
}
LANGUAGE_OF = {suffix: language for language, suffixes in _SUFFIXES.items() for suffix in suffixes}


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class SkippedFile:
    path: Path
    why: str


def language_of(path: Path) -> str | None:
    return LANGUAGE_OF.get(path.suffix.lower())


def find_sources(root: Path, language: str | None = None) -> Iterator[SourceFile | SkippedFile]:
    """Every file under `root` (or `root` itself) that can be audited, in order of name."""
    if not root.exists():
        raise NotFound(f"{root} does not exist; name a file or a folder to audit")
    if root.is_file():
        kind = language or language_of(root)
        if kind is None:
            yield SkippedFile(root, "its language is unknown to the audit; use --language")
            return
        yield read(root, kind)
        return
    real = root.resolve()
    for path in project_files(root):
        kind = language_of(path)
        if kind is None or (language is not None and kind != language):
            continue
        if path.is_symlink() and not path.resolve().is_relative_to(real):
            yield SkippedFile(path, "it is a link out of the audited folder")
        elif path.is_file():
            yield read(path, kind)


def read(path: Path, language: str) -> SourceFile | SkippedFile:
    try:
        size = path.stat().st_size
        if size > MAX_TEXT * 4:
            return SkippedFile(path, f"it has {size} bytes")
        data = path.read_bytes()
    except OSError as error:
        return SkippedFile(path, f"it cannot be read: {error.strerror or error}")
    if b"\0" in data:
        return SkippedFile(path, "it is binary")
    text = data.decode("utf-8", "surrogateescape").removeprefix("\ufeff")
    if len(text) > MAX_TEXT:
        return SkippedFile(path, f"it has {len(text)} characters")
    if any(len(line) > MAX_LINE for line in text.splitlines()):
        return SkippedFile(path, f"it has a line of more than {MAX_LINE} characters: minified or generated")
    return SourceFile(path, language, text)
