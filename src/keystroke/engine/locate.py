"""Finds the GGUF file or folder that a model name or path stands for.

Looks in the settings, in this installation, in the library and in the file system, in that order. A built-in
model is downloaded the first time.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path

from keystroke.config import NamedModel, Settings
from keystroke.engine import builtin
from keystroke.engine.library import EMBEDDED, ModelLibrary, Progress, check_exists, no_progress
from keystroke.errors import ConfigError, KeystrokeError, ModelDamaged, NotFound

EDIT = ":edit"  # suffix of a model's name: the same model with the adapter for edits


def resolve(model: str, settings: Settings, progress: Progress = no_progress) -> Path:
    """The GGUF file or folder that `model` stands for: a `[models.NAME]` table, "embedded", a name in the
    library, a built-in name (fetched the first time), or a path; NAME:edit stands for NAME with an adapter.
    Raises NotFound."""
    library = ModelLibrary(settings.paths.models)
    named = settings.models.get(model)
    if named is not None and named.path is not None:
        return check_exists(named.path)
    # A table may name another model, or only set limits for the model of its own name.
    if named is not None and named.model and named.model != model:
        if named.model in settings.models:
            raise ConfigError(
                f"models.{model} names models.{named.model}; name a path or a model of the library",
                param="model",
            )
        return resolve(named.model, settings, progress)
    if (base := base_model(model)) is not None:
        return resolve(base, settings, progress)
    if model == EMBEDDED:
        return shipped_model() or _provide(library, builtin.SMOLLM2, progress)
    if model in builtin.BUILT_IN:
        return _provide(library, builtin.BUILT_IN[model], progress)
    if model in library.names():
        return library.path(library.get(model))
    if "/" in model or model.startswith((".", "~")) or model.endswith(".gguf") or Path(model).exists():
        return check_exists(Path(model).expanduser())
    known = [EMBEDDED, *settings.models, *builtin.BUILT_IN, *library.names()]
    near = difflib.get_close_matches(model, [name for name in known if name != model], n=1)
    hint = f"did you mean {near[0]}?" if near else "add one with `keystroke models add`"
    if named is not None and named != NamedModel():
        hint = f"models.{model} names neither a path nor a model of the library; {hint}"
    raise NotFound(f"there is no model called {model:.80}; {hint}", param="model")


def adapter_path(model: str, settings: Settings) -> Path | None:
    """The adapter of `model`: the one that its `[models.NAME]` table names, or for NAME:edit (also through a
    table) the shipped one. None if it has none. Raises NotFound if the file does not exist."""
    named = settings.models.get(model)
    if named is not None and named.adapter is not None:
        return check_exists(named.adapter)
    wanted = named.model if named is not None and named.path is None and named.model else model
    if base_model(wanted) is None:
        return None
    if (file := shipped_adapter()) is not None:
        return file
    by = "" if wanted == model else f", which models.{model:.80} names"
    raise NotFound(
        f"this installation has no adapter, so there is no {wanted:.80}{by}; name a file as adapter in "
        "[models.NAME]",
        param="model",
    )


def base_model(model: str) -> str | None:
    """NAME of NAME:edit; None for any other name."""
    base = model.removesuffix(EDIT)
    return base if base and base != model else None


def table_for(model: str, settings: Settings) -> NamedModel | None:
    """The settings table of `model`; for NAME:edit that of NAME if it has none of its own."""
    return settings.models.get(model) or settings.models.get(base_model(model) or model)


def shipped_adapter() -> Path | None:
    """The adapter for edits that belongs to the weights of `coder`."""
    for place in shipped_folders():
        for file in sorted((place / "coder-edit").glob("*.safetensors")):
            return file
    return None


def has_adapter(weights: Path, settings: Settings) -> bool:
    """Whether this installation has an adapter for these weights: those of `coder`, by whatever name. A
    different model of the same sizes would accept it and produce nonsense."""
    library, name = ModelLibrary(settings.paths.models), builtin.CODER.name
    with suppress(KeystrokeError):
        if shipped_adapter() is not None and name in library.names():
            return library.path(library.get(name)).resolve() == weights.resolve()
    return False


def _provide(library: ModelLibrary, model: builtin.BuiltInModel, progress: Progress) -> Path:
    if model.name in library.names():
        with suppress(ModelDamaged):
            return library.path(library.get(model.name))
    from keystroke.engine.fetch.install import ensure_installed  # not needed for installed models

    return ensure_installed(library, model, progress)


def shipped_folders() -> list[Path]:
    """Folders of shipped weights: inside the package, and in the checkout it runs from."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "models"]
    if (package.parents[1] / "pyproject.toml").is_file():
        places.append(package.parents[1] / "models")
    return places


def shipped_model() -> Path | None:
    """The weights that come with this installation."""
    for place in shipped_folders():
        for folder in sorted(place.glob("keystroke-*")):
            if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
                return folder
            if file := next(iter(sorted(folder.glob("*.gguf"))), None):
                return file
    return None
