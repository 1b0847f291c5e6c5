"""Which draft head belongs to a model that is being loaded.

Looks at folders and their config.json, loads no weights. A head that was named must be there and fit;
one that was not named is taken where it lies beside the model, in the library or in this installation, and
fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.speculative.head_file import WEIGHTS, read_config
from keystroke.errors import KeystrokeError, NotFound

AUTO, OFF = "auto", "off"


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
        read_config(folder).fits(spec)
        return folder
    beside = model if model.is_dir() else model.parent
    suited: list[tuple[bool, Path]] = []
    for folder in _heads((beside, *folders)):
        try:
            config = read_config(folder)
            config.fits(spec)
        except KeystrokeError:
            continue  # another model's, or half copied: nobody asked for it
        suited.append((config.target.casefold() != spec.name.casefold(), folder))
    return min(suited, key=lambda found: found[0])[1] if suited else None


def _heads(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        try:
            yield from sorted(path.parent for path in folder.glob(f"*/{WEIGHTS}"))
        except OSError:
            continue
