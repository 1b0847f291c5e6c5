"""The models installed on this machine: named entries, each a manifest beside (or pointing at) its files.

Adding and removing an entry is atomic: it is built in another folder, then renamed. Files that were added
from elsewhere stay where they are unless a copy is requested, and removing the entry never deletes them.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import msgspec

from keystroke.errors import (
    ConfigError,
    InputError,
    KeystrokeError,
    ModelDamaged,
    ModelError,
    NotFound,
    UsageError,
)

MANIFEST = "model.json"
DOWNLOADS = ".downloads"  # incomplete downloads; see `fetch/staging`
EMBEDDED = "embedded"  # the model that comes with the installation; see `locate`
BLOCK = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
CHOICES = ("auto", "fast", "deep", "chat")  # names of roles, which no model may have

Progress = Callable[[str, int, int], None]
"""Called with a label, the amount done and the total (0: unknown)."""


def no_progress(_what: str, _done: int, _total: int) -> None:
    """A progress callback that does nothing."""


class ModelFormat(StrEnum):
    GGUF = "gguf"
    FOLDER = "huggingface"


class StoredFile(msgspec.Struct, frozen=True):
    """A file as it was when the model was added."""

    name: str
    size: int
    sha256: str


class Traits(msgspec.Struct, frozen=True):
    """Properties of a model, read from its files when it was added. `chat`: it has a chat template."""

    architecture: str
    parameters: int
    context: int
    chat: bool


class InstalledModel(msgspec.Struct, frozen=True):
    """The manifest of an entry. `location` is None if the files are in the entry's own folder; `traits` is
    None if it was added before they were recorded."""

    name: str
    kind: ModelFormat
    source: str
    added: str
    files: tuple[StoredFile, ...]
    location: str | None = None
    traits: Traits | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class BrokenEntry:
    """An entry whose manifest cannot be read, and why."""

    name: str
    reason: str


class ModelLibrary:
    """The entries under `folder`, which is created with the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        try:
            return sorted(
                p.parent.name for p in self.folder.glob(f"*/{MANIFEST}") if not p.parent.name.startswith(".")
            )
        except OSError as error:
            raise ConfigError(f"the models folder {self.folder} cannot be read: {error.strerror}") from None

    def entries(self) -> list[InstalledModel | BrokenEntry]:
        found: list[InstalledModel | BrokenEntry] = []
        for name in self.names():
            try:
                found.append(self.get(name))
            except KeystrokeError as error:
                found.append(BrokenEntry(name, str(error)))
        return found

    def get(self, name: str) -> InstalledModel:
        if name not in (names := self.names()):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "see `keystroke models list`"
            raise NotFound(f"there is no model called {name:.80}; {hint}", param="model")
        try:
            entry = msgspec.json.decode((self.folder / name / MANIFEST).read_bytes(), type=InstalledModel)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelDamaged(
                f"the manifest of {name} cannot be read ({error}); remove the model and add it again"
            ) from None
        return _check_entry(entry, name)

    def path(self, entry: InstalledModel) -> Path:
        """The GGUF file or the folder of weights. Raises ModelDamaged if a file is gone or changed its
        size."""
        base = self._entry_path(entry)
        for file in entry.files:
            try:
                size = (base / file.name).stat().st_size
            except OSError:
                raise ModelDamaged(
                    f"{entry.name} has lost its file {base / file.name}; put it back, "
                    "or remove the model and add it again"
                ) from None
            if size != file.size:
                raise ModelDamaged(
                    f"{base / file.name} has {size} bytes where {entry.name} had {file.size}; "
                    "remove the model and add it again"
                )
        return base / entry.files[0].name if entry.kind is ModelFormat.GGUF else base

    def verify(self, name: str, progress: Progress = no_progress) -> InstalledModel:
        """Compare the checksums of all files. Raises ModelDamaged for the first that differs."""
        entry = self.get(name)
        self.path(entry)
        base, done = self._entry_path(entry), 0
        for file in entry.files:
            found = hash_file(base / file.name, progress, f"verify {name}", done, entry.size)
            if found != file.sha256:
                raise ModelDamaged(
                    f"{base / file.name} does not hold what was added as {name} (SHA-256 {found[:12]}…, not "
                    f"{file.sha256[:12]}…); remove the model and add it again"
                )
            done += file.size
        return entry

    def partial_downloads(self) -> list[tuple[str, Path]]:
        """Incomplete downloads: the model's name and the folder of the parts."""
        found = sorted(p for p in self.folder.glob(f"{DOWNLOADS}/*@*") if p.is_dir())
        return [(p.name.rpartition("@")[0], p) for p in found if any(map(_is_model_file, p.rglob("*")))]

    def add(
        self,
        source: Path,
        name: str | None = None,
        *,
        copy: bool = False,
        progress: Progress = no_progress,
        traits: Traits | None = None,
    ) -> InstalledModel:
        """Add a Hugging Face folder or a GGUF file as `name` (by default its own name)."""
        source = source.expanduser()
        kind, files = identify_files(source)
        base = source.parent if kind is ModelFormat.GGUF else source
        name = name or name_from_path(source)
        self.check_name(name)
        with self._build_entry(name) as folder:
            total = sum(file.stat().st_size for file in files)
            done, stored = 0, []
            for file in files:
                target = folder / file.name if copy else None
                digest = hash_file(file, progress, f"add {name}", done, total, target)
                size = file.stat().st_size
                stored.append(StoredFile(file.name, size, digest))
                done += size
            location = None if copy else str(base.resolve())
            origin = str(source.resolve())
            entry = InstalledModel(name, kind, origin, timestamp(), tuple(stored), location, traits)
            write_manifest(folder, entry)
        return entry

    def add_built(self, name: str, build: Callable[[Path], InstalledModel]) -> InstalledModel:
        """Add an entry whose files `build` creates in the given folder."""
        self.check_name(name)
        with self._build_entry(name) as folder:
            entry = build(folder)
            write_manifest(folder, entry)
        return entry

    def remove(self, name: str) -> None:
        """Remove the entry, the files it owns and an incomplete download; files added from elsewhere stay."""
        begun = [folder for known, folder in self.partial_downloads() if known == name]
        for folder in begun:
            shutil.rmtree(folder, ignore_errors=True)
        if name not in self.names():
            if begun:
                return
            self.get(name)  # raises, with the nearest name
        with self._temporary() as aside:
            try:
                (self.folder / name).rename(aside / name)
            except OSError as error:
                raise ModelError(f"{self.folder / name} cannot be removed: {error.strerror}") from None

    def check_name(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise InputError(
                f"a model's name holds letters, digits and . _ : - only, not {name!r:.80}", param="name"
            )
        if name == EMBEDDED:
            raise InputError(
                f"{EMBEDDED} is the model that comes with this installation; choose another name",
                param="name",
            )
        if name.casefold() in CHOICES:
            raise InputError(f"{name} chooses a model by its role; choose another name", param="name")
        # Some file systems ignore case.
        if taken := [n for n in self.names() if n.casefold() == name.casefold()]:
            raise UsageError(
                f"a model called {taken[0]} exists already; remove it first or choose another name",
                param="name",
            )

    def _entry_path(self, entry: InstalledModel) -> Path:
        return Path(entry.location) if entry.location else self.folder / entry.name

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        """A temporary folder on the file system of the library."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = tempfile.mkdtemp(prefix=".incoming-", dir=self.folder)
        except OSError as error:
            raise ConfigError(
                f"the models folder {self.folder} cannot be written: {error.strerror}"
            ) from None
        try:
            yield Path(aside)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    @contextmanager
    def _build_entry(self, name: str) -> Iterator[Path]:
        """A folder that becomes the entry `name` if the block succeeds."""
        with self._temporary() as aside:
            folder = aside / name
            folder.mkdir()
            try:
                yield folder
                folder.rename(self.folder / name)
            except OSError as error:
                if (self.folder / name / MANIFEST).exists():
                    raise UsageError(f"a model called {name} was added meanwhile", param="name") from None
                raise ModelError(f"{name} cannot be added: {error.strerror or error}") from None


def check_exists(path: Path) -> Path:
    if not path.exists():
        raise NotFound(f"there is no model at {path}; check the path", param="model")
    return path


def identify_files(source: Path) -> tuple[ModelFormat, list[Path]]:
    """The format of `source` and the files of the model. Raises NotFound or InputError."""
    check_exists(source)
    if source.is_file():
        try:
            with source.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise InputError(f"{source} cannot be read: {error.strerror}") from None
        if magic != b"GGUF":
            raise InputError(f"{source} is not a GGUF file; give a .gguf file or a Hugging Face folder")
        from keystroke.engine.checkpoint.gguf_header import split_parts  # numpy is not needed before

        return ModelFormat.GGUF, split_parts(source)
    weights = sorted(source.glob("*.safetensors"))
    for wanted, there in (
        ("config.json", (source / "config.json").is_file()),
        ("*.safetensors", bool(weights)),
        ("tokenizer.json", (source / "tokenizer.json").is_file()),
    ):
        if not there:
            raise InputError(f"{source} is not a Hugging Face model folder: it has no {wanted}")
    kinds = (".json", ".jinja", ".txt", ".model")
    files = (p for p in sorted(source.iterdir()) if p.suffix in kinds and p.is_file())
    return ModelFormat.FOLDER, [*(p for p in files if p.name != MANIFEST), *weights]


def hash_file(
    path: Path, progress: Progress, what: str, before: int, total: int, copy_to: Path | None = None
) -> str:
    """The SHA-256 of a file, which is copied to `copy_to` if given. `before`: bytes done before it."""
    digest, done = hashlib.sha256(), before
    try:
        copy = copy_to.open("xb") if copy_to is not None else nullcontext()
        with path.open("rb") as source, copy as target:
            while block := source.read(BLOCK):
                digest.update(block)
                if target is not None:
                    target.write(block)
                done += len(block)
                progress(what, done, total)
    except OSError as error:
        raise ModelError(f"{path} cannot be read or copied: {error.strerror or error}") from None
    return digest.hexdigest()


def write_manifest(folder: Path, entry: InstalledModel) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(entry), indent=2) + b"\n")


def timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def name_from_path(source: Path) -> str:
    """A model name from that of a file or folder. Raises InputError if it has no usable characters."""
    place = source.resolve()
    name = re.sub(r"-\d{5}-of-\d{5}$", "", place.stem) if source.is_file() else place.name
    cleaned = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).strip("._-")
    if not cleaned:
        raise InputError(f"{source} gives no usable name; choose one with --name", param="name")
    return cleaned


def _is_model_file(file: Path) -> bool:
    """Whether a file is part of a model rather than state of its download."""
    return file.is_file() and file.stat().st_size > 4096


def _check_entry(entry: InstalledModel, name: str) -> InstalledModel:
    """`entry`, unless its manifest has paths instead of file names, or another name."""
    plain = all(file.name and Path(file.name).name == file.name for file in entry.files)
    if entry.name != name or not entry.files or not plain:
        raise ModelDamaged(f"the manifest of {name} is inconsistent; remove the model and add it again")
    return entry
