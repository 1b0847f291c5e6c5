"""Finds a Chromium on this machine for the benchmark, the demonstration and the tests; downloads nothing."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

# The sandbox of a browser inside a container needs rights that are seldom there; the page is our own.
FLAGS = ["--no-sandbox", "--disable-gpu"]


def chromium() -> str | None:
    """The one named by KEYSTROKE_CHROMIUM, or one on the PATH."""
    named = os.environ.get("KEYSTROKE_CHROMIUM")
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))
    return named or next((path for path in found if path), None)


def reason_why_not() -> str | None:
    """Why no browser can be driven here; None where one can."""
    if find_spec("playwright") is None:
        return "Playwright is not installed: pip install playwright"
    return (
        None if chromium() else "no Chromium is installed: apt install chromium, or KEYSTROKE_CHROMIUM=PATH"
    )
