"""Which programs of this machine the tests may use."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache


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
