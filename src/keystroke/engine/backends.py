"""The registry of backends: which exist, whether each runs on this machine, and how each loads a model.

Importing the registry imports no backend. A new backend is a folder of this package whose `backend.py`
defines the functions of `BackendFunctions`, and its name in `keystroke.config.BACKENDS`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from keystroke.config import BACKENDS as NAMES
from keystroke.errors import ConfigError

if TYPE_CHECKING:
    from keystroke.config import Settings
    from keystroke.engine.adapter import AdapterFile
    from keystroke.engine.base import Engine
    from keystroke.engine.library import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadArguments:
    """A model to load, and how to run it."""

    path: Path
    precision: str
    settings: Settings
    progress: Progress
    adapter: AdapterFile | None = None
    kv_tokens: int | None = None  # tokens to reserve KV memory for; None: the backend decides


class BackendFunctions(Protocol):
    """The functions that `engine/NAME/backend.py` defines. Importing it is cheap; its functions import the
    rest."""

    def unavailable_reason(self) -> str | None:
        """Why the backend does not run on this machine, in one sentence with what to do; None if it does."""

    def load(self, request: LoadArguments) -> Engine:
        """Load a model. Raises ConfigError, NotEnoughMemory or another ModelError."""


@dataclass(frozen=True, slots=True)
class Backend:
    name: str

    def unavailable_reason(self) -> str | None:
        return self._module().unavailable_reason()

    def load(self, request: LoadArguments) -> Engine:
        return self._module().load(request)

    def _module(self) -> BackendFunctions:
        return cast(BackendFunctions, importlib.import_module(f"keystroke.engine.{self.name}.backend"))


BACKENDS = {name: Backend(name) for name in NAMES}  # in order of preference


def choose_backend(kind: str) -> Backend:
    """The backend that `engine.kind` names; `auto` is the first that runs on this machine."""
    if kind == "remote":
        raise ConfigError(
            "engine.kind is remote, which loads no local model; name a [models.NAME] with a base_url"
        )
    if kind != "auto":
        return BACKENDS[kind]
    reasons: list[str] = []
    for backend in BACKENDS.values():
        if (reason := backend.unavailable_reason()) is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ConfigError(f"no engine runs on this machine ({'; '.join(reasons)})")
