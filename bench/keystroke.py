"""`make bench-keystroke`: runs typing_replay.py, which says what is measured and how.

This file bears the package's name, so the folder it lies in must not be searched for the package.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != HERE]
    runpy.run_path(str(HERE / "typing_replay.py"), run_name="__main__")
