"""Which files of a tree are source that the audit reads.

Law: what git ignores is left out where git can be asked; links that lead out of the path are not followed;
binary, minified and huge files are skipped and say why. Nothing here reads a rule.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from keystroke.analysis.audit.auditor import MAX_LINE, MAX_TEXT
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
_SKIPPED_FOLDERS = {
    ".git",
    ".hg",
    ".svn",
    "node_modules",
    "__pycache__",
    ".venv",
    "venv",
    ".tox",
    ".mypy_cache",
    "dist",
    "build",
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
    for path in _tracked(root) or _walked(root):
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


def _tracked(root: Path) -> list[Path]:
    """What git knows below `root`: tracked files and new ones that it does not ignore."""
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted({root / os.fsdecode(name) for name in found.stdout.split(b"\0") if name})


def _walked(root: Path) -> list[Path]:
    out: list[Path] = []
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED_FOLDERS and not name.startswith(".")
        )
        out.extend(Path(folder) / name for name in names)
    return sorted(out)
