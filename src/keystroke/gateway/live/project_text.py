"""An index of the files of a project, for ghost text; one for each connection.

It reads only below the root that the editor named, never through a link that leads out of it, never an
excluded file, and at most a few megabytes. Reading happens in a pool thread, one at a time; unchanged files
are not read again.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from keystroke.analysis.project_files import project_files
from keystroke.analysis.syntax import language_of
from keystroke.analysis.text_index import Lexed, Lexicon, TextIndex

log = logging.getLogger("keystroke.live")

STALE = 60.0  # seconds after which the index is updated, if somebody types
CHARACTERS = 2_000_000  # of all files, the nearest first: about 30 MB and one second of one core
LARGEST = 300_000  # of one file; larger ones are generated
LONGEST_LINE = 2_000  # longer ones are minified
SECONDS = 3.0  # that listing the files may take
_FAMILIES = {"typescript": "javascript", "tsx": "javascript", "jsx": "javascript", "cpp": "c"}


@dataclass(frozen=True, slots=True)
class _BuiltIndex:
    """An index, when it was built, around which folder, and whether files were left out for lack of room."""

    at: float
    index: TextIndex
    folder: PurePosixPath
    cut: bool


class ProjectIndex:
    def __init__(self, root: str, exclude: Sequence[str]) -> None:
        self._root, self._exclude = Path(root), exclude
        self._lexicon = Lexicon()
        self._read: dict[str, tuple[tuple[int, int], Lexed]] = {}
        self._indexes: dict[str, _BuiltIndex] = {}  # by family of languages
        self._lock = asyncio.Lock()

    def latest(self, language: str) -> TextIndex | None:
        """The latest index of files in `language` and related languages."""
        built = self._indexes.get(_family(language))
        return built.index if built is not None else None

    def needs_update(self, language: str, opened: str | None = None) -> bool:
        """Whether the index is old and not being updated. `opened`: a file that was just opened; if files
        were left out, those around it may be missing."""
        if self._lock.locked():
            return False
        built = self._indexes.get(_family(language))
        if built is None or time.monotonic() - built.at >= STALE:
            return True
        return opened is not None and built.cut and _folder(opened) != built.folder

    async def update(self, path: str, language: str, buffers: Mapping[str, str]) -> TextIndex:
        """Rebuild the index, files near `path` first. `buffers`: the texts of open files. Paths are relative
        to the root."""
        family = _family(language)
        async with self._lock:
            built = await asyncio.to_thread(self._build, family, path, dict(buffers))
            self._indexes[family] = built
            return built.index

    # In a pool thread

    def _build(self, family: str, path: str, buffers: Mapping[str, str]) -> _BuiltIndex:
        began = time.perf_counter()
        found: list[tuple[str, Lexed]] = []
        room, cut = CHARACTERS, False
        names = [self._name_in_project(file) for file in project_files(self._root, seconds=SECONDS)]
        related = [name for name in names if name is not None and language_family(name) == family]
        for name in sort_by_distance(path, related):
            lexed = self._lex_buffer(name, buffers[name]) if name in buffers else self._lex_file(name)
            if lexed is not None:
                room -= len(lexed.text)
                if room < 0:
                    cut = True
                    break
                found.append((name, lexed))
        listed = {name for name, _ in found}
        for name in [n for n in self._read if language_family(n) == family and n not in listed]:
            del self._read[name]
        index = TextIndex.build(self._lexicon, found[::-1])
        log.debug("%d files of the project read in %.0f ms", len(found), 1e3 * (time.perf_counter() - began))
        return _BuiltIndex(time.monotonic(), index, _folder(path), cut)

    def _name_in_project(self, file: Path) -> str | None:
        name = file.relative_to(self._root).as_posix()
        excluded = any(fnmatch.fnmatch(file.name, pattern) for pattern in self._exclude)
        return None if excluded else name

    def _lex_buffer(self, name: str, text: str) -> Lexed | None:
        mark = (hash(text), len(text))
        return self._find_cached(name, mark) or self._lex(name, mark, text)

    def _lex_file(self, name: str) -> Lexed | None:
        file = self._root / name
        try:
            if file.is_symlink() and not file.resolve().is_relative_to(self._root.resolve()):
                return None
            found = os.stat(file)
            mark = (found.st_mtime_ns, found.st_size)
            if (known := self._find_cached(name, mark)) is not None:
                return known
            if found.st_size > 4 * LARGEST or not stat.S_ISREG(found.st_mode):  # reading a pipe would block
                return None
            return self._lex(name, mark, file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _find_cached(self, name: str, mark: tuple[int, int]) -> Lexed | None:
        """The cached result for a file, if it has not changed."""
        known = self._read.get(name)
        return known[1] if known is not None and known[0] == mark else None

    def _lex(self, name: str, mark: tuple[int, int], text: str) -> Lexed | None:
        if len(text) > LARGEST or max(map(len, text.split("\n"))) > LONGEST_LINE:
            return None
        began = time.perf_counter()
        lexed = self._lexicon.lex(text, keep=False)
        self._read[name] = mark, lexed
        # Release the interpreter for as long again: other threads answer keys.
        time.sleep(time.perf_counter() - began)
        return lexed


def _folder(path: str) -> PurePosixPath:
    return PurePosixPath(path).parent


def _family(language: str) -> str:
    return _FAMILIES.get(language, language)


def language_family(name: str) -> str | None:
    """The language of a file; languages that share names in a project count as one."""
    language = language_of(name)
    return _family(language) if language is not None else None


def sort_by_distance(path: str, names: Iterable[str]) -> list[str]:
    """Files by the number of folders between them and `path`."""
    here = _folder(path).parts
    return sorted(names, key=lambda name: (_distance(here, _folder(name).parts), name))


def _distance(here: Sequence[str], other: Sequence[str]) -> int:
    shared = 0
    while shared < min(len(here), len(other)) and here[shared] == other[shared]:
        shared += 1
    return len(here) + len(other) - 2 * shared
