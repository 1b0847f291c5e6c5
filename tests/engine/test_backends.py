"""Every backend is found by its name, says whether it runs here, and is imported only when used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keystroke import config
from keystroke.config.sections import ENGINES
from keystroke.engine.backends import BACKENDS, Backend, choose_backend
from keystroke.errors import ConfigError


def test_the_settings_allow_every_backend() -> None:
    assert tuple(BACKENDS) == config.BACKENDS
    assert set(ENGINES) == {"auto", *BACKENDS, "remote"}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=lambda backend: backend.name)
def test_a_backend_says_whether_it_runs_here_and_is_found_by_name(backend: Backend) -> None:
    reason = backend.unavailable_reason()
    assert reason is None or len(reason.split()) > 3
    assert choose_backend(backend.name) is backend
    assert callable(backend._module().load)


def test_importing_the_registry_imports_no_backend() -> None:
    code = "import sys, keystroke.engine.backends; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = {f"keystroke.engine.{name}" for name in BACKENDS} | {"torch", "onnxruntime", "numpy"}
    assert not names & set(found.split())


def test_auto_is_the_first_backend_that_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {name for name, backend in BACKENDS.items() if backend.unavailable_reason() is None}
    assert choose_backend("auto").name == next(name for name in BACKENDS if name in runs)
    for name in runs:
        monkeypatch.setattr(BACKENDS[name]._module(), "unavailable_reason", lambda: "a test took it away")
    with pytest.raises(ConfigError, match="onnx: a test took it away"):
        choose_backend("auto")


def test_the_remote_engine_loads_nothing_here() -> None:
    with pytest.raises(ConfigError, match="base_url"):
        choose_backend("remote")
