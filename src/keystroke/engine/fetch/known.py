"""A model known by name becomes an entry of the library.

A file comes from its hub where that can be reached, else out of wheels of the package index; whatever is
not the file that was written down is refused, and nothing of those packages is run.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from keystroke.engine.builtin import BuiltIn
from keystroke.engine.fetch import hub
from keystroke.engine.fetch.packages import Packages
from keystroke.engine.fetch.parts import Part, PartedFile
from keystroke.engine.fetch.staging import clear, staging
from keystroke.engine.library import (
    InstalledModel,
    Kind,
    Library,
    Progress,
    StoredFile,
    hash_file,
    now,
    silent,
)
from keystroke.engine.traits import traits_of
from keystroke.errors import (
    KeystrokeError,
    ModelDamaged,
    ModelError,
    NotEnoughDisk,
    NotFound,
    Unavailable,
    UsageError,
)


def provide(library: Library, model: BuiltIn, progress: Progress = silent) -> Path:
    """The model's file, added to the library first where it is not there or no longer whole. Raises NotFound
    where it is too large to be fetched without being asked for."""
    if model.name in library.names():
        try:
            return library.path(library.get(model.name))
        except ModelDamaged:
            if not model.on_demand:
                raise
            library.remove(model.name)
    if not model.on_demand:
        raise NotFound(
            f"{model.name} is not on this machine yet; `keystroke models add {model.name}` brings it "
            f"({model.size / 1e9:.1f} GB)",
            param="model",
        )
    try:
        entry = add(library, model, progress)
    except UsageError:
        # Another process may have added it while we fetched; what counts is that it is there.
        entry = library.get(model.name)
    return library.path(entry)


def add(library: Library, model: BuiltIn, progress: Progress = silent) -> InstalledModel:
    """Take the file from an installed package, else from its hub, else from the package index. Raises
    Unavailable, ModelDamaged or NotEnoughDisk; what has come stays for the next time."""
    library.check_free(model.name)
    if (file := installed(model)) is not None:
        digest = hash_file(file, progress, f"add {model.name}", 0, model.size)
        if digest == model.sha256:
            return library.put(
                model.name, lambda _folder: _entry(model, file, str(file), location=str(file.parent))
            )
    with staging(library.folder, model.name, model.sha256, progress) as folder:
        if model.name in library.names():  # another process was quicker
            return library.get(model.name)
        path, source = _fetched(model, folder, progress)

        def moved(target: Path) -> InstalledModel:
            return _entry(model, path.rename(target / model.file), source)

        entry = library.put(model.name, moved)
        clear(folder)
        return entry


def installed(model: BuiltIn) -> Path | None:
    """The file inside site-packages, where a package that holds all of it is installed. The package is not
    imported."""
    if len(model.packed) != 1:
        return None
    package, _, inside = model.packed[0].member.partition("/")
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / inside
        if file.is_file() and file.stat().st_size == model.size:
            return file
    return None


def _fetched(model: BuiltIn, folder: Path, progress: Progress) -> tuple[Path, str]:
    """The whole, compared file and where it came from. What one source brought, the other need not."""
    reasons: list[str] = []
    parted = _parted(model, folder)
    if model.repository is not None:
        try:
            return _from_hub(model, model.repository, parted, progress), f"{model.repository}:{model.file}"
        except NotEnoughDisk:
            raise
        except (Unavailable, NotFound, ModelError) as error:
            reasons.append(str(error).partition(";")[0])
    try:
        packages = functools.partial(Packages, model.name, model.packed)
        return parted.fetch(packages, progress), model.packed[0].requirement
    except (Unavailable, ModelDamaged) as error:
        reasons.append(str(error))
        raise type(error)(
            f"{model.name} could not be downloaded ({'; '.join(reasons)}); check the network, or add a model "
            "file you have with `keystroke models add FILE.gguf`"
        ) from None


def _parted(model: BuiltIn, folder: Path) -> PartedFile:
    parts = [Part(f"the part in {one.requirement}", one.size, one.sha256) for one in model.packed]
    return PartedFile(
        model.name, model.file, model.sha256, parts, folder, spare=max(one.size for one in model.packed)
    )


def _from_hub(model: BuiltIn, repository: str, parted: PartedFile, progress: Progress) -> Path:
    found = hub.repository(repository)
    file = next((file for file in found.files if file.name == model.file), None)
    if file is None:
        raise NotFound(f"{repository} has no {model.file}")
    if file.size != model.size or file.sha256 not in (None, model.sha256):
        raise ModelDamaged(f"{repository} has another {model.file} than it had")
    return parted.fetch(functools.partial(hub.Ranges, found, model.file, parted.spans), progress)


def _entry(model: BuiltIn, file: Path, source: str, location: str | None = None) -> InstalledModel:
    stored = (StoredFile(model.file, model.size, model.sha256),)
    try:
        traits = traits_of(file)
    except KeystrokeError:
        traits = None  # it is the file it should be; whoever loads it says what is wrong with it
    return InstalledModel(model.name, Kind.GGUF, source, now(), stored, location, traits)
