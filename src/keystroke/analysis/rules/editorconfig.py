"""The `.editorconfig` properties of a file.

Files are read from the root of the project down; later sections and nearer files win. Invalid lines are
skipped, as the format requires.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from keystroke.analysis.rules.globs import matches
from keystroke.analysis.rules.settings_file import read_settings

Section = tuple[str, dict[str, str]]  # a glob and what it sets

_LARGEST = 64 * 1024
_SECTION = re.compile(r"\[(?P<glob>.+)\]\s*")
_PREAMBLE = ""  # the glob of the lines before the first section


def editorconfig_properties(path: Path, root: Path | None = None) -> dict[str, str]:
    """The properties that all `.editorconfig` files above `path` set for it."""
    found: dict[str, str] = {}
    for folder, sections in reversed(list(_config_files(path, root))):
        relative = path.relative_to(folder).as_posix()
        for glob, pairs in sections:
            if glob != _PREAMBLE and matches(glob, relative):
                found.update(pairs)
    return {key: value for key, value in found.items() if value != "unset"}


def _config_files(path: Path, root: Path | None) -> Iterator[tuple[Path, Sequence[Section]]]:
    """The files from the nearest one outward, up to one with `root = true`."""
    for folder in path.parents:
        file = folder / ".editorconfig"
        if file.is_file():
            sections = list(_split_sections(read_settings(file, root, _LARGEST)))
            yield folder, sections
            if sections[0][1].get("root") == "true":
                return
        if folder == root:
            return


def _split_sections(text: str) -> Iterator[Section]:
    """The preamble, then every section in order."""
    glob, pairs = _PREAMBLE, dict[str, str]()
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        header = _SECTION.fullmatch(line)
        if header:
            yield glob, pairs
            glob, pairs = header["glob"], {}
        elif "=" in line:
            key, _, value = line.partition("=")
            pairs[key.strip().lower()] = value.strip().lower()
    yield glob, pairs
