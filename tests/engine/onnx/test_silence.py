"""Nothing leaves the machine: the library below the embedded engine is kept from telling its maker of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
LOADED = "import sys, keystroke.engine.onnx.engine; assert 'onnxruntime' in sys.modules"


def files_after(script: str, home: Path, **environment: str) -> list[str]:
    """The files that a new Python process leaves in an empty home.

    Nothing but PATH is inherited: ONNX Runtime is silent by itself where a variable such as CI is set.
    """
    environ = {
        "PATH": os.environ.get("PATH", ""),
        "HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        **environment,
    }
    subprocess.run([sys.executable, "-c", script], env=environ, check=True, capture_output=True, timeout=120)
    return sorted(path.name for path in home.rglob("*") if path.is_file())


def test_loading_the_engine_leaves_no_record_of_the_machine(tmp_path: Path) -> None:
    assert files_after(LOADED, tmp_path) == []


def test_the_record_would_be_there_otherwise(tmp_path: Path) -> None:
    assert "deviceid" in files_after(LOADED, tmp_path, ORT_DISABLE_TELEMETRY="0")


def test_nothing_but_the_engine_that_silences_it_imports_it() -> None:
    importers = {
        path.relative_to(ROOT).parent.as_posix()
        for folder in ("src", "bench", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(import|from) onnxruntime", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert importers == {"src/keystroke/engine/onnx"}
