"""Where the model that a name stands for lies on this machine.

Turns a name or a path into a GGUF file or a folder, fetching a built-in model the first time it is
wanted. Settings come first, then what this installation brings, then the library, then the file system.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path

from keystroke.config import NamedModel, Settings
from keystroke.engine import builtin
from keystroke.engine.library import EMBEDDED, Library, Progress, existing, silent
from keystroke.errors import ConfigError, KeystrokeError, ModelDamaged, NotFound

EDIT = ":edit"  # behind a model's name: the same model with the adapter that has learned edits


def resolve(model: str, settings: Settings, progress: Progress = silent) -> Path:
    """The GGUF file or folder that `model` stands for: a `[models.NAME]` table, "embedded", a name in the
    library, a built-in name (fetched the first time), or a path; NAME:edit stands for NAME with an adapter.
    NotFound says what was looked for."""
    library = Library(settings.paths.models)
    named = settings.models.get(model)
    if named is not None and named.path is not None:
        return existing(named.path)
    # A table may stand for another model, or only set limits for the one it is named after.
    if named is not None and named.model and named.model != model:
        if named.model in settings.models:
            raise ConfigError(
                f"models.{model} names models.{named.model}; name a path or a model of the library",
                param="model",
            )
        return resolve(named.model, settings, progress)
    if (base := base_of(model)) is not None:
        return resolve(base, settings, progress)
    if model == EMBEDDED:
        return shipped() or _provided(library, builtin.SMOLLM2, progress)
    if model in builtin.BUILT_IN:
        return _provided(library, builtin.BUILT_IN[model], progress)
    if model in library.names():
        return library.path(library.get(model))
    if "/" in model or model.startswith((".", "~")) or model.endswith(".gguf") or Path(model).exists():
        return existing(Path(model).expanduser())
    known = [EMBEDDED, *settings.models, *builtin.BUILT_IN, *library.names()]
    near = difflib.get_close_matches(model, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "add one with `keystroke models add`"
    raise NotFound(f"there is no model called {model:.80}; {hint}", param="model")


def adapter_path(model: str, settings: Settings) -> Path | None:
    """The adapter that `model` is to be run with: what its `[models.NAME]` table names, or for NAME:edit the
    one that is shipped, also where a table stands for NAME:edit. None: none. Raises NotFound where it is not
    there."""
    named = settings.models.get(model)
    if named is not None and named.adapter is not None:
        return existing(named.adapter)
    wanted = named.model if named is not None and named.path is None and named.model else model
    if base_of(wanted) is None:
        return None
    if (file := shipped_adapter()) is not None:
        return file
    by = "" if wanted == model else f", which models.{model:.80} names"
    raise NotFound(
        f"this installation brings no adapter, so there is no {wanted:.80}{by}; name a file as adapter in "
        "[models.NAME]",
        param="model",
    )


def base_of(model: str) -> str | None:
    """What stands before `:edit` in a name; None in any other."""
    base = model.removesuffix(EDIT)
    return base if base and base != model else None


def table_for(model: str, settings: Settings) -> NamedModel | None:
    """What the settings say about how `model` is run: its own table, or for NAME:edit that of NAME."""
    return settings.models.get(model) or settings.models.get(base_of(model) or model)


def shipped_adapter() -> Path | None:
    """The adapter that has learned edits, for the weights that `coder` stands for."""
    for place in shipped_folders():
        for file in sorted((place / "coder-edit").glob("*.safetensors")):
            return file
    return None


def has_adapter(weights: Path, settings: Settings) -> bool:
    """Whether this installation brings an adapter for these weights: those of `coder`, by whatever name.
    Another model of the same sizes would take it and talk nonsense."""
    library, name = Library(settings.paths.models), builtin.CODER.name
    with suppress(KeystrokeError):
        if shipped_adapter() is not None and name in library.names():
            return library.path(library.get(name)).resolve() == weights.resolve()
    return False


def _provided(library: Library, model: builtin.BuiltIn, progress: Progress) -> Path:
    if model.name in library.names():
        with suppress(ModelDamaged):
            return library.path(library.get(model.name))
    from keystroke.engine.fetch.known import provide  # here: what is on this machine needs no network

    return provide(library, model, progress)


def shipped_folders() -> list[Path]:
    """Where this installation may hold weights: inside the package, or in the checkout it runs from."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "models"]
    if (package.parents[1] / "pyproject.toml").is_file():
        places.append(package.parents[1] / "models")
    return places


def shipped() -> Path | None:
    """Weights of our own."""
    for place in shipped_folders():
        for folder in sorted(place.glob("keystroke-*")):
            if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
                return folder
            if file := next(iter(sorted(folder.glob("*.gguf"))), None):
                return file
    return None
