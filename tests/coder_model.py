"""The real code model, for tests that need its 1.1 GB file: found, or a sentence that says how to get it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keystroke.config import load_settings
from keystroke.engine.library import ModelLibrary

VARIABLE = "CODER_GGUF"
MISSING = f"the code model is not here: run `keystroke models add coder`, or set {VARIABLE} to its GGUF file"


def coder_file() -> Path | None:
    """The file that the variable names, or the library's model of that name."""
    if named := os.environ.get(VARIABLE):
        return Path(named) if Path(named).is_file() else None
    library = ModelLibrary(load_settings().paths.models)
    return library.path(library.get("coder")) if "coder" in library.names() else None


def needed_coder() -> Path:
    """The file; skips the test that asks where there is none."""
    path = coder_file()
    if path is None:
        pytest.skip(MISSING)
    return path
