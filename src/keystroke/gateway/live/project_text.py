"""What the files of a project hold, as an index for ghost text; one for each connection.

Reads only below the root that the editor named, never through a link that leads out of it, never a file
that may hold secrets, and no more than a few megabytes. All of it happens in a pool thread, one at a time;
the event loop gets a finished index. Files that did not change are not read again.
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

STALE = 60.0  # seconds after which what was read is looked at again, if somebody types
CHARACTERS = 2_000_000  # of all files together, the nearest first: some 30 MB and a second of one core
LARGEST = 300_000  # of one file; more is generated
LONGEST_LINE = 2_000  # more is minified
SECONDS = 3.0  # that listing the files may take
_FAMILIES = {"typescript": "javascript", "tsx": "javascript", "jsx": "javascript", "cpp": "c"}


@dataclass(frozen=True, slots=True)
class _Made:
    """An index, when it was made, around which folder, and whether some files found no room."""

    at: float
    index: TextIndex
    folder: PurePosixPath
    cut: bool


class ProjectText:
    def __init__(self, root: str, exclude: Sequence[str]) -> None:
        self._root, self._exclude = Path(root), exclude
        self._lexicon = Lexicon()
        self._read: dict[str, tuple[tuple[int, int], Lexed]] = {}
        self._made: dict[str, _Made] = {}  # by family of languages
        self._lock = asyncio.Lock()

    def known(self, language: str) -> TextIndex | None:
        """The index of files in `language` and its relatives, as it was made last."""
        made = self._made.get(_family(language))
        return made.index if made is not None else None

    def stale(self, language: str, opened: str | None = None) -> bool:
        """Whether it is time to look again, and nobody does. `opened`: a file that was opened just now; where
        not everything found room, what lies around it may not be in there."""
        if self._lock.locked():
            return False
        made = self._made.get(_family(language))
        if made is None or time.monotonic() - made.at >= STALE:
            return True
        return opened is not None and made.cut and _folder(opened) != made.folder

    async def look(self, path: str, language: str, buffers: Mapping[str, str]) -> TextIndex:
        """Make the index anew, files near `path` first. `buffers`: open files, as they are in the editor.
        Paths are relative to the root."""
        family = _family(language)
        async with self._lock:
            made = await asyncio.to_thread(self._look, family, path, dict(buffers))
            self._made[family] = made
            return made.index

    # In a pool thread

    def _look(self, family: str, path: str, buffers: Mapping[str, str]) -> _Made:
        began = time.perf_counter()
        found: list[tuple[str, Lexed]] = []
        left, cut = CHARACTERS, False
        names = [self._name(file) for file in project_files(self._root, seconds=SECONDS)]
        related = [name for name in names if name is not None and family_of(name) == family]
        for name in by_nearness(path, related):
            lexed = self._buffer(name, buffers[name]) if name in buffers else self._file(name)
            if lexed is not None:
                left -= len(lexed.text)
                if left < 0:
                    cut = True
                    break
                found.append((name, lexed))
        gone = {name for name in self._read if family_of(name) == family} - {name for name, _ in found}
        for name in gone:
            del self._read[name]
        index = TextIndex.of(self._lexicon, found[::-1])
        log.debug("%d files of the project read in %.0f ms", len(found), 1e3 * (time.perf_counter() - began))
        return _Made(time.monotonic(), index, _folder(path), cut)

    def _name(self, file: Path) -> str | None:
        name = file.relative_to(self._root).as_posix()
        excluded = any(fnmatch.fnmatch(file.name, pattern) for pattern in self._exclude)
        return None if excluded else name

    def _buffer(self, name: str, text: str) -> Lexed | None:
        """An open file as it is in the editor."""
        mark = (hash(text), len(text))
        return self._known(name, mark) or self._lexed(name, mark, text)

    def _file(self, name: str) -> Lexed | None:
        file = self._root / name
        try:
            if file.is_symlink() and not file.resolve().is_relative_to(self._root.resolve()):
                return None
            found = os.stat(file)
            mark = (found.st_mtime_ns, found.st_size)
            if (known := self._known(name, mark)) is not None:
                return known
            if found.st_size > 4 * LARGEST or not stat.S_ISREG(found.st_mode):  # a pipe would never end
                return None
            return self._lexed(name, mark, file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _known(self, name: str, mark: tuple[int, int]) -> Lexed | None:
        """What was made of a file, if it has not changed since."""
        known = self._read.get(name)
        return known[1] if known is not None and known[0] == mark else None

    def _lexed(self, name: str, mark: tuple[int, int], text: str) -> Lexed | None:
        if len(text) > LARGEST or max(map(len, text.split("\n"))) > LONGEST_LINE:
            return None
        began = time.perf_counter()
        lexed = self._lexicon.lexed(text, keep=False)
        self._read[name] = mark, lexed
        # As long again for others: keys are answered by threads that need the interpreter, too.
        time.sleep(time.perf_counter() - began)
        return lexed


def _folder(path: str) -> PurePosixPath:
    return PurePosixPath(path).parent


def _family(language: str) -> str:
    return _FAMILIES.get(language, language)


def family_of(name: str) -> str | None:
    """The language of a file, those that share a project's names as one."""
    language = language_of(name)
    return _family(language) if language is not None else None


def by_nearness(path: str, names: Iterable[str]) -> list[str]:
    """Files in the order of how few folders lie between them and `path`."""
    here = _folder(path).parts
    return sorted(names, key=lambda name: (_distance(here, _folder(name).parts), name))


def _distance(here: Sequence[str], there: Sequence[str]) -> int:
    shared = 0
    while shared < min(len(here), len(there)) and here[shared] == there[shared]:
        shared += 1
    return len(here) + len(there) - 2 * shared
