"""Finds the draft head for a model that is being loaded, from the config.json of each head.

A head that the settings name must exist and fit. Otherwise a fitting head beside the model, in the library or
in this installation is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from keystroke.config import Settings
from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.locate import shipped_folders
from keystroke.engine.speculative.head_file import WEIGHTS, read_config
from keystroke.errors import KeystrokeError, NotFound

AUTO, OFF = "auto", "off"


def head_of_model(path: Path, spec: ModelSpec, settings: Settings) -> Path | None:
    """The folder of the head that the settings choose for the model at `path`, as `find_head`."""
    if not settings.speculation.enabled:
        return None
    return find_head(settings.speculation.draft_head, path, spec, (settings.paths.models, *shipped_folders()))


def find_head(wanted: str, model: Path, spec: ModelSpec, folders: Iterable[Path]) -> Path | None:
    """The folder of the head that drafts for the model at `model`, or None. `wanted` is "auto", "off" or a
    path; `folders` hold heads, each in a folder of its own. Raises NotFound, ModelDamaged or UsageError for a
    head that was named and is not there, is damaged, or belongs to another model."""
    if wanted == OFF:
        return None
    if wanted != AUTO:
        folder = Path(wanted).expanduser()
        if not folder.is_dir():
            raise NotFound(
                f"there is no draft head at {folder}; set speculation.draft_head to its folder, auto or off"
            )
        read_config(folder).check_target(spec)
        return folder
    beside = model if model.is_dir() else model.parent
    suited: list[tuple[bool, Path]] = []
    for folder in _list_heads((beside, *folders)):
        try:
            config = read_config(folder)
            config.check_target(spec)
        except KeystrokeError:
            continue  # another model's, or incomplete
        suited.append((config.target.casefold() != spec.name.casefold(), folder))
    return min(suited, key=lambda found: found[0])[1] if suited else None


def _list_heads(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        try:
            yield from sorted(path.parent for path in folder.glob(f"*/{WEIGHTS}"))
        except OSError:
            continue
