"""Every file that Keystroke keeps outside its own installation, and how each kind is taken away.

Only what is named here is ever removed, never a whole folder that a setting points to: it may be
somebody's home. What is made again by itself is told apart from what is not. Models that were added from
elsewhere are forgotten; their files stay.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from keystroke.config import Settings, user_file
from keystroke.errors import InputError

if TYPE_CHECKING:
    from keystroke.engine.library import Library


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """One kind of files. `again`: they are made or fetched again when they are needed."""

    name: str
    what: str
    where: tuple[Path, ...]
    regenerable: bool
    sweep: Callable[[], None] | None = None  # how it is cleared, where deleting `where` would be wrong

    def files(self) -> Iterator[Path]:
        for place in self.where:
            if place.is_file() and not place.is_dir():
                yield place
            elif place.is_dir():
                yield from (path for path in place.rglob("*") if path.is_file() and not path.is_symlink())

    def measure(self) -> tuple[int, int]:
        """Bytes and files. What goes away meanwhile is not counted."""
        count, total = 0, 0
        for path in self.files():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                count += 1
        return total, count

    def clear(self) -> int:
        """Remove them; returns the bytes freed. Raises InputError where the system refuses."""
        before, _ = self.measure()
        try:
            if self.sweep is not None:
                self.sweep()
            else:
                for place in self.where:
                    _remove(place)
        except OSError as error:
            raise InputError(
                f"{error.filename} cannot be removed: {error.strerror}; see who owns it"
            ) from None
        return before - self.measure()[0]


def stored_files(settings: Settings, environ: dict[str, str]) -> list[StoredFiles]:
    """All kinds, those that are made again first."""
    from keystroke.engine.library import Library
    from keystroke.engine.onnx.cache import Cache

    cache, state = settings.paths.cache, settings.paths.state
    shared = platformdirs.user_cache_path("keystroke", appauthor=False)  # settings do not move these
    converted, library = Cache(cache / "onnx"), Library(settings.paths.models)
    database = tuple(state / f"gateway.db{end}" for end in ("", "-wal", "-shm", "-journal"))
    learned = tuple(state / f"learned.db{end}" for end in ("", "-wal", "-shm", "-journal"))
    return [
        StoredFiles(
            "converted", "models converted for this machine", (converted.folder,), True, converted.clear
        ),
        StoredFiles("tokenizers", "tokenizers, ready to load", (cache / "tokenizers",), True),
        StoredFiles("prefixes", "contexts kept warm across restarts", (cache / "prefixes",), True),
        StoredFiles("probes", "how well models write edits", (cache / "probes.json",), True),
        StoredFiles(
            "kernels", "kernels compiled for this machine", (shared / "cuda", cache / "native"), True
        ),
        StoredFiles("benchmarks", "what benchmarks fetched", tuple(sorted(shared.glob("bench-*"))), True),
        StoredFiles("gateways", "left by gateways that have ended", tuple(_ended(state / "gateways")), True),
        StoredFiles(
            "models", "models you added or fetched", (library.folder,), False, partial(_forget, library)
        ),
        StoredFiles("undo", "what edits replaced", (state / "undo",), False),
        StoredFiles("tasks", "tasks that can be gone on with", (state / "tasks",), False),
        StoredFiles("history", "lines typed into chats", (state / "chat_history",), False),
        StoredFiles("learned", "what became of suggestions (`keystroke learn`)", learned, False),
        StoredFiles("database", "a server's responses, keys and usage", database, False),
        StoredFiles("settings", "your own settings", (user_file(environ),), False),
    ]


def remove_empty_folders(settings: Settings, environ: dict[str, str]) -> None:
    """Remove folders that are ours by name and empty now."""
    folders = [settings.paths.state / "gateways", settings.paths.cache, settings.paths.state]
    folders += [settings.paths.models, settings.paths.models.parent, user_file(environ).parent]
    for folder in folders:
        if "keystroke" in folder.parts[-2:]:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _ended(folder: Path) -> Iterator[Path]:
    """Files of gateways whose process is gone."""
    from keystroke.clients.local_gateway import process_exists, read_announcement

    for path in sorted(folder.glob("*")):
        said = read_announcement(path.with_suffix(".json"))
        if said is None or not process_exists(said.pid):
            yield path


def _forget(library: Library) -> None:
    from keystroke.engine.library import DOWNLOADS

    for name in library.names():
        library.remove(name)
    shutil.rmtree(library.folder / DOWNLOADS, ignore_errors=True)  # what broken downloads left


def _remove(place: Path) -> None:
    """A file, or a folder with all it holds. A link to a folder is emptied and stays: a user put it there."""
    if place.is_symlink() and place.is_dir():
        for inside in place.iterdir():
            _remove(inside)
    elif place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
