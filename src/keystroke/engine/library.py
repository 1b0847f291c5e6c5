"""The models on this machine: named entries, each a small manifest beside (or pointing at) its files.

Knows names, files, sizes and hashes; opens no weights and starts no engine. An entry appears and
disappears whole (built aside, then renamed). Files that were added from elsewhere stay where they are
unless a copy is asked for, and removing such an entry never deletes them.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import IO

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
DOWNLOADS = ".downloads"  # what is being fetched grows there; see `fetch/staging`
EMBEDDED = "embedded"  # whichever model this installation brings; see `locate`
BLOCK = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
CHOICES = ("auto", "fast", "deep", "chat")  # these choose a model by its role, so no model is called so

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and of how much (0: unknown)."""


def silent(_what: str, _done: int, _total: int) -> None:
    """The progress nobody watches."""


class Kind(StrEnum):
    GGUF = "gguf"
    FOLDER = "huggingface"


class StoredFile(msgspec.Struct, frozen=True):
    """One file as it was when it was added."""

    name: str
    size: int
    sha256: str


class Traits(msgspec.Struct, frozen=True):
    """What a model is, read from its files when it was added. `chat`: it comes with a chat template."""

    architecture: str
    parameters: int
    context: int
    chat: bool


class InstalledModel(msgspec.Struct, frozen=True):
    """One model. `location` is None where the files lie in the entry's own folder; `traits` is None where it
    was added before they were recorded."""

    name: str
    kind: Kind
    source: str
    added: str
    files: tuple[StoredFile, ...]
    location: str | None = None
    traits: Traits | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Broken:
    """An entry whose manifest cannot be read, and why."""

    name: str
    reason: str


class Library:
    """The entries under `folder`, which is made when the first one is added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        try:
            return sorted(
                p.parent.name for p in self.folder.glob(f"*/{MANIFEST}") if not p.parent.name.startswith(".")
            )
        except OSError as error:
            raise ConfigError(f"the models folder {self.folder} cannot be read: {error.strerror}") from None

    def entries(self) -> list[InstalledModel | Broken]:
        found: list[InstalledModel | Broken] = []
        for name in self.names():
            try:
                found.append(self.get(name))
            except KeystrokeError as error:
                found.append(Broken(name, str(error)))
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
        return _consistent(entry, name)

    def path(self, entry: InstalledModel) -> Path:
        """The GGUF file or the folder of weights. ModelDamaged if a file is gone or has another size."""
        base = self._base(entry)
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
        return base / entry.files[0].name if entry.kind is Kind.GGUF else base

    def verify(self, name: str, progress: Progress = silent) -> InstalledModel:
        """Read every byte and compare. ModelDamaged names the first file that differs."""
        entry = self.get(name)
        self.path(entry)
        base, done = self._base(entry), 0
        for file in entry.files:
            if (
                found := hash_file(base / file.name, progress, f"verify {name}", done, entry.size)
            ) != file.sha256:
                raise ModelDamaged(
                    f"{base / file.name} does not hold what was added as {name} (SHA-256 {found[:12]}…, not "
                    f"{file.sha256[:12]}…); remove the model and add it again"
                )
            done += file.size
        return entry

    def partial(self) -> list[tuple[str, Path]]:
        """Downloads that were begun and are not whole: the model's name and the folder of what came."""
        found = sorted(p for p in self.folder.glob(f"{DOWNLOADS}/*@*") if p.is_dir())
        return [(p.name.rpartition("@")[0], p) for p in found if any(map(_counts, p.rglob("*")))]

    # ── changing ─────────────────────────────────────────────────────────────────────────────

    def add(
        self,
        source: Path,
        name: str | None = None,
        *,
        copy: bool = False,
        progress: Progress = silent,
        traits: Traits | None = None,
    ) -> InstalledModel:
        """Add a Hugging Face folder or a GGUF file under `name` (its own name where none is given)."""
        source = source.expanduser()
        kind, files = inspect(source)
        base = source.parent if kind is Kind.GGUF else source
        name = name or name_from(source)
        self.check_free(name)
        with self._built(name) as folder:
            total = sum(file.stat().st_size for file in files)
            done, stored = 0, []
            for file in files:
                target = folder / file.name if copy else None
                digest = hash_file(file, progress, f"add {name}", done, total, target)
                size = file.stat().st_size
                stored.append(StoredFile(file.name, size, digest))
                done += size
            location = None if copy else str(base.resolve())
            entry = InstalledModel(name, kind, str(source.resolve()), now(), tuple(stored), location, traits)
            write_manifest(folder, entry)
        return entry

    def put(self, name: str, build: Callable[[Path], InstalledModel]) -> InstalledModel:
        """Add an entry whose files `build` makes in the folder it is given."""
        self.check_free(name)
        with self._built(name) as folder:
            entry = build(folder)
            write_manifest(folder, entry)
        return entry

    def remove(self, name: str) -> None:
        """Forget the entry and delete the files it owns, half a download of it too; files added from
        elsewhere stay."""
        begun = [folder for known, folder in self.partial() if known == name]
        for folder in begun:
            shutil.rmtree(folder, ignore_errors=True)
        if name not in self.names():
            if begun:
                return
            self.get(name)  # raises, with the nearest name
        with self._aside() as aside:
            try:
                (self.folder / name).rename(aside / name)
            except OSError as error:
                raise ModelError(f"{self.folder / name} cannot be removed: {error.strerror}") from None

    def check_free(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise InputError(
                f"a model's name holds letters, digits and . _ : - only, not {name!r:.80}", param="name"
            )
        if name == EMBEDDED:
            raise InputError(
                f"{EMBEDDED} means the model this installation brings; choose another name", param="name"
            )
        if name.casefold() in CHOICES:
            raise InputError(f"{name} chooses a model by its role; choose another name", param="name")
        # Some file systems do not tell upper from lower case.
        if taken := [n for n in self.names() if n.casefold() == name.casefold()]:
            raise UsageError(
                f"a model called {taken[0]} exists already; remove it first or choose another name",
                param="name",
            )

    def _base(self, entry: InstalledModel) -> Path:
        return Path(entry.location) if entry.location else self.folder / entry.name

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        """A folder on the same file system as the library, gone afterwards."""
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
    def _built(self, name: str) -> Iterator[Path]:
        """A folder that becomes the entry `name` if the block ends well."""
        with self._aside() as aside:
            folder = aside / name
            folder.mkdir()
            try:
                yield folder
                folder.rename(self.folder / name)
            except OSError as error:
                if (self.folder / name / MANIFEST).exists():
                    raise UsageError(f"a model called {name} was added meanwhile", param="name") from None
                raise ModelError(f"{name} cannot be added: {error.strerror or error}") from None


def existing(path: Path) -> Path:
    if not path.exists():
        raise NotFound(f"there is no model at {path}; check the path", param="model")
    return path


def inspect(source: Path) -> tuple[Kind, list[Path]]:
    """What `source` is and which of its files make up the model. InputError or ModelDamaged if it is none."""
    existing(source)
    if source.is_file():
        try:
            with source.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise InputError(f"{source} cannot be read: {error.strerror}") from None
        if magic != b"GGUF":
            raise InputError(f"{source} is not a GGUF file; give a .gguf file or a Hugging Face folder")
        return Kind.GGUF, [source]
    weights = sorted(source.glob("*.safetensors"))
    for wanted, there in (
        ("config.json", (source / "config.json").is_file()),
        ("*.safetensors", bool(weights)),
        ("tokenizer.json", (source / "tokenizer.json").is_file()),
    ):
        if not there:
            raise InputError(f"{source} is not a Hugging Face model folder: it has no {wanted}")
    texts = [
        p
        for p in sorted(source.iterdir())
        if p.suffix in (".json", ".jinja", ".txt", ".model") and p.is_file()
    ]
    return Kind.FOLDER, [*(p for p in texts if p.name != MANIFEST), *weights]


def hash_file(
    path: Path, progress: Progress, what: str, before: int, total: int, copy_to: Path | None = None
) -> str:
    """SHA-256 of a file, written to `copy_to` on the way where that is given."""
    try:
        with path.open("rb") as source:
            if copy_to is None:
                return hash_stream(source, progress, what, before, total)
            with copy_to.open("xb") as target:
                return hash_stream(source, progress, what, before, total, target)
    except OSError as error:
        raise ModelError(f"{path} cannot be read or copied: {error.strerror or error}") from None


def hash_stream(
    source: IO[bytes], progress: Progress, what: str, before: int, total: int, target: IO[bytes] | None = None
) -> str:
    digest, done = hashlib.sha256(), before
    while block := source.read(BLOCK):
        digest.update(block)
        if target is not None:
            target.write(block)
        done += len(block)
        progress(what, done, total)
    return digest.hexdigest()


def write_manifest(folder: Path, entry: InstalledModel) -> None:
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(entry), indent=2) + b"\n")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def name_from(source: Path) -> str:
    """A name made from that of a file or a folder. Raises InputError where nothing usable is left of it."""
    name = source.resolve().stem if source.is_file() else source.resolve().name
    cleaned = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name).strip("._-")
    if not cleaned:
        raise InputError(f"{source} gives no usable name; choose one with --name", param="name")
    return cleaned


def _counts(file: Path) -> bool:
    """Whether a file is part of a model and not some note about its download."""
    return file.is_file() and file.stat().st_size > 4096


def _consistent(entry: InstalledModel, name: str) -> InstalledModel:
    """`entry`, if its manifest could have been written by this program: plain file names, its own name."""
    plain = all(file.name and Path(file.name).name == file.name for file in entry.files)
    if entry.name != name or not entry.files or not plain:
        raise ModelDamaged(f"the manifest of {name} is inconsistent; remove the model and add it again")
    return entry
