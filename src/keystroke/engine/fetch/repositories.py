"""Installs a repository of the hub in the library.

The configuration is downloaded first, so that an unsupported model is refused before its weights. The entry
is added atomically; a partial download is kept.
"""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.checkpoint.huggingface import configured_spec
from keystroke.engine.fetch import hub
from keystroke.engine.fetch.staging import remove_folder, staging_folder
from keystroke.engine.library import (
    InstalledModel,
    ModelFormat,
    ModelLibrary,
    Progress,
    StoredFile,
    hash_file,
    name_from_path,
    timestamp,
)
from keystroke.engine.traits import traits_of
from keystroke.errors import ModelDamaged, UnsupportedModel


def add_repository(
    library: ModelLibrary, repo: str, wanted: str | None, name: str | None, progress: Progress
) -> InstalledModel:
    """Add `owner/name`, or one file of it. Raises NotFound, InputError, Unavailable, NotEnoughDisk,
    ModelDamaged or UnsupportedModel."""
    if name is not None:
        library.check_name(name)
    found = hub.list_repository(repo)
    files = hub.choose_files(found, wanted)
    kind = ModelFormat.GGUF if len(files) == 1 else ModelFormat.FOLDER
    name = name or name_from_path(
        Path(files[0].name).with_suffix("") if kind is ModelFormat.GGUF else Path(repo)
    )
    library.check_name(name)
    with staging_folder(library.folder, name, f"{repo}@{found.commit}", progress) as folder:
        if kind is ModelFormat.FOLDER:
            texts = [file for file in files if not file.name.endswith(".safetensors")]
            hub.fetch_files(found, texts, folder, name, progress)
            _check_runnable(folder)
        paths = hub.fetch_files(found, files, folder, name, progress)
        try:
            traits = traits_of(paths[0] if kind is ModelFormat.GGUF else folder)
        except (UnsupportedModel, ModelDamaged):
            remove_folder(folder)
            raise
        total, done = sum(file.size for file in files), 0
        stored: list[StoredFile] = []
        for file, path in zip(files, paths, strict=True):
            digest = file.sha256 or hash_file(path, progress, f"add {name}", done, total)
            done += file.size
            stored.append(StoredFile(path.name, file.size, digest))
        source = f"{repo}:{files[0].name}" if kind is ModelFormat.GGUF else repo

        def move_files(target: Path) -> InstalledModel:
            for path in paths:
                path.rename(target / path.name)
            return InstalledModel(name, kind, source, timestamp(), tuple(stored), None, traits)

        entry = library.add_built(name, move_files)
        remove_folder(folder)
        return entry


def _check_runnable(folder: Path) -> None:
    try:
        configured_spec(folder)
    except (UnsupportedModel, ModelDamaged):
        remove_folder(folder)
        raise
