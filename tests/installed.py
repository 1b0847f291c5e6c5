"""What of this machine the tests may use: programs, and what was compiled for it."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path


@cache
def program(name: str, version: str = "--version") -> str | None:
    """The path of a program that is here and runs. One that is on the PATH and broken (a compiler's proxy
    without its compiler, say) counts as absent."""
    path = shutil.which(name)
    if path is None:
        return None
    try:
        said = subprocess.run(
            [path, version], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if said.returncode == 0 else None


def lend_operators(folder: Path) -> None:
    """Put the native operators of this machine's cache into another. Compiling them takes ten seconds of a
    core; engine/onnx/test_stored.py tries it."""
    from keystroke.config import load_settings
    from keystroke.engine.onnx.native import operators_library

    if (library := operators_library(load_settings().paths.cache)) is not None:
        (folder / "native").mkdir(mode=0o700, parents=True)
        shutil.copy2(library, folder / "native")
