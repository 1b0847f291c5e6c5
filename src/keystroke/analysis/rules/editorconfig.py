"""`.editorconfig`: the properties that hold for one file.

Reads the files from the root of the project down; later sections and nearer files win. A line it cannot
read is skipped, as the format asks; nothing here raises for what a project contains.
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
_PREAMBLE = ""  # the glob of what stands before the first section


def editorconfig_properties(path: Path, root: Path | None = None) -> dict[str, str]:
    """What every `.editorconfig` above `path` says about it, nearest last."""
    found: dict[str, str] = {}
    for folder, sections in reversed(list(_files(path, root))):
        relative = path.relative_to(folder).as_posix()
        for glob, pairs in sections:
            if glob != _PREAMBLE and matches(glob, relative):
                found.update(pairs)
    return {key: value for key, value in found.items() if value != "unset"}


def _files(path: Path, root: Path | None) -> Iterator[tuple[Path, Sequence[Section]]]:
    """From the nearest outward, as far as a file that calls itself the root."""
    for folder in path.parents:
        file = folder / ".editorconfig"
        if file.is_file():
            sections = list(_sections(read_settings(file, root, _LARGEST)))
            yield folder, sections
            if sections[0][1].get("root") == "true":
                return
        if folder == root:
            return


def _sections(text: str) -> Iterator[Section]:
    """The preamble first, then every section in its order."""
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
