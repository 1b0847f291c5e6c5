"""Remembers what `keystroke setup` changed, so that `keystroke setup --undo` can take it back.

The record is a file of the state folder that only its user can read. A file that was changed since is left
alone and named.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from keystroke.config.write import write_setting
from keystroke.errors import ConfigError, KeystrokeError
from keystroke.replacing import replace_file

if TYPE_CHECKING:
    from keystroke.clients.cli.options import Invocation

FILE = "setup.json"


class WrittenFile(msgspec.Struct):
    """A file that was written: what it held before (None: it did not exist) and after. `folders` were created
    for it, the innermost first."""

    path: str
    before: str | None
    after: str
    folders: list[str] = []


class SetupRecord(msgspec.Struct):
    """What was done, in order; `settings` holds the earlier value of each key that was set."""

    models: list[str] = []
    settings: dict[str, str | None] = {}
    files: list[WrittenFile] = []
    undo_commands: list[list[str]] = []

    @classmethod
    def load(cls, state: Path) -> SetupRecord | None:
        try:
            return msgspec.json.decode((state / FILE).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    def save(self, state: Path) -> None:
        state.mkdir(parents=True, exist_ok=True)
        replace_file(state / FILE, msgspec.json.encode(self))

    def write_file(self, path: Path, text: str) -> None:
        """Write a file and note what it held. Raises ConfigError if the system refuses."""
        try:
            before = path.read_text(encoding="utf-8") if path.exists() else None
            folders = [str(folder) for folder in path.parents if not folder.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode(), 0o666, keep=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be written: {error}; add the configuration by hand") from None
        known = next((file for file in self.files if file.path == str(path)), None)
        if known is not None and known.after == before:
            known.after = text
        else:
            self.files.append(WrittenFile(str(path), before, text, folders))

    def undo_programs(self) -> tuple[list[str], list[str]]:
        """Take back what was written for editors and agents. Returns what was undone and what was left, each
        a sentence."""
        done: list[str] = []
        left: list[str] = []
        for file in reversed(self.files):
            _undo_file(file, done, left)
        for command in reversed(self.undo_commands):
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=120)
                done.append(f"ran {' '.join(command)}")
            except (OSError, subprocess.SubprocessError) as error:
                left.append(f"{' '.join(command)} failed ({error}); run it yourself")
        return done, left

    def undo(self, run: Invocation) -> tuple[list[str], list[str]]:
        """Take everything back. Returns the same as `undo_programs`."""
        from keystroke.engine.library import ModelLibrary

        done, left = self.undo_programs()
        for key, value in self.settings.items():
            write_setting(key, value, run.environ)
            done.append(f"{key} is {value if value is not None else 'chosen automatically'} again")
        library = ModelLibrary(run.settings.paths.models)
        for name in self.models:
            if name in library.names():
                try:
                    library.remove(name)
                    done.append(f"removed the model {name}")
                except KeystrokeError as error:
                    left.append(str(error))
        with suppress(OSError):
            (run.settings.paths.state / FILE).unlink()
        return done, left


def _undo_file(file: WrittenFile, done: list[str], left: list[str]) -> None:
    path = Path(file.path)
    try:
        if path.read_text(encoding="utf-8") != file.after:
            left.append(f"{path} was changed since; remove what you do not want by hand")
        elif file.before is None:
            path.unlink()
            done.append(f"deleted {path}")
            with suppress(OSError):
                for folder in file.folders:
                    os.rmdir(folder)  # if it is empty now
        else:
            path.write_text(file.before, encoding="utf-8")
            done.append(f"restored {path}")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        left.append(f"{path} cannot be restored: {error}")
