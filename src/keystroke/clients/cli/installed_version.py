"""The installed version. Imports nothing else of the command line, so that `--version` is fast."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def release() -> str:
    try:
        return installed("keystroke")
    except PackageNotFoundError:
        return "0 (not installed)"
