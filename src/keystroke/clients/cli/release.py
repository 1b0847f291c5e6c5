"""Which release this is.

Imports nothing else of the command line, so that asking costs next to nothing.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def release() -> str:
    try:
        return installed("keystroke")
    except PackageNotFoundError:
        return "0 (not installed)"
