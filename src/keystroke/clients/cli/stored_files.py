"""The kinds of files that Keystroke stores outside its installation, and how each is deleted.

Only the files listed here are ever deleted, never a whole folder that a setting names: it may be the home
folder. Models that were added from elsewhere are unregistered; their files stay.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import platformdirs

from keystroke.config import Settings, user_file
from keystroke.engine.library import DOWNLOADS, ModelLibrary
from keystroke.errors import InputError


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """One kind of files. `regenerable`: they are created or downloaded again when needed."""

    name: str
    what: str
    where: tuple[Path, ...]
    regenerable: bool
    delete: Callable[[], None] | None = None  # how to delete them, if not by removing `where`

    def files(self) -> Iterator[Path]:
        for path in self.where:
            if path.is_file() and not path.is_dir():
                yield path
            elif path.is_dir():
                yield from (file for file in path.rglob("*") if file.is_file() and not file.is_symlink())

    def measure(self) -> tuple[int, int]:
        """The number of bytes and of files."""
        count, total = 0, 0
        for path in self.files():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
                count += 1
        return total, count

    def clear(self) -> int:
        """Delete the files; returns the bytes freed. Raises InputError if the system refuses."""
        before, _ = self.measure()
        try:
            if self.delete is not None:
                self.delete()
            else:
                for path in self.where:
                    _remove(path)
        except OSError as error:
            raise InputError(
                f"{error.filename} cannot be deleted: {error.strerror}; check its owner and permissions"
            ) from None
        return before - self.measure()[0]


def stored_files(settings: Settings, environ: dict[str, str]) -> list[StoredFiles]:
    """All kinds, regenerable ones first."""
    from keystroke.engine.onnx.cache import ConversionCache

    cache, state = settings.paths.cache, settings.paths.state
    shared = platformdirs.user_cache_path("keystroke", appauthor=False)  # settings do not move these
    converted, library = ConversionCache(cache / "onnx"), ModelLibrary(settings.paths.models)
    database = tuple(state / f"gateway.db{end}" for end in ("", "-wal", "-shm", "-journal"))
    learned = tuple(state / f"learned.db{end}" for end in ("", "-wal", "-shm", "-journal"))
    ended = (*_files_of_ended_gateways(state / "gateways"), state / "play.html")
    unregister = partial(_unregister, library)
    return [
        StoredFiles(
            "converted", "models converted for this machine", (converted.folder,), True, converted.clear
        ),
        StoredFiles("tokenizers", "tokenizers, ready to load", (cache / "tokenizers",), True),
        StoredFiles("prefixes", "prompt caches kept across restarts", (cache / "prefixes",), True),
        StoredFiles("probes", "measured edit formats of models", (cache / "probes.json",), True),
        StoredFiles(
            "kernels", "kernels compiled for this machine", (shared / "cuda", cache / "native"), True
        ),
        StoredFiles(
            "benchmarks", "downloads of benchmarks", (*sorted(shared.glob("bench-*")), cache / "eval"), True
        ),
        StoredFiles("gateways", "files of gateways that have ended", ended, True),
        StoredFiles("models", "models you added or downloaded", (library.folder,), False, unregister),
        StoredFiles("undo", "undo history of edits", (state / "undo",), False),
        StoredFiles("tasks", "tasks that can be resumed", (state / "tasks",), False),
        StoredFiles("sessions", "conversations in the terminal", (state / "sessions",), False),
        StoredFiles("history", "lines typed into chats", (state / "chat_history",), False),
        StoredFiles("learned", "outcomes of suggestions (`keystroke learn`)", learned, False),
        StoredFiles("database", "a server's responses, keys and usage", database, False),
        StoredFiles(
            "scale", "state and log of `keystroke scale`", (state / "scale.json", state / "scale.log"), False
        ),
        StoredFiles("setup", "what `keystroke setup --undo` takes back", (state / "setup.json",), False),
        StoredFiles("settings", "your own settings", (user_file(environ),), False),
    ]


def remove_empty_folders(settings: Settings, environ: dict[str, str]) -> None:
    """Remove empty folders that are named keystroke, or are in one that is."""
    folders = [settings.paths.state / "gateways", settings.paths.cache, settings.paths.state]
    folders += [settings.paths.models, settings.paths.models.parent, user_file(environ).parent]
    for folder in folders:
        if "keystroke" in folder.parts[-2:]:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _files_of_ended_gateways(folder: Path) -> Iterator[Path]:
    """Files of gateways whose process has ended."""
    from keystroke.clients.local_gateway import process_exists, read_announcement

    for path in sorted(folder.glob("*")):
        announcement = read_announcement(path.with_suffix(".json"))
        if announcement is None or not process_exists(announcement.pid):
            yield path


def _unregister(library: ModelLibrary) -> None:
    for name in library.names():
        library.remove(name)
    shutil.rmtree(library.folder / DOWNLOADS, ignore_errors=True)  # incomplete downloads


def _remove(path: Path) -> None:
    """Delete a file or folder. A link to a folder stays, because a user created it; its target is emptied."""
    if path.is_symlink() and path.is_dir():
        for inside in path.iterdir():
            _remove(inside)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
