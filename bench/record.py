"""Writes the figures of a benchmark: `record` prints the last JSON line and writes it to bench/results.

A result is one file: the command, the machine, the date, the version and the figures, nested names joined by
dots. BENCH_RESULT names the file where one benchmark has several results (`engine-arm`); BENCH_RESULTS names
another folder. `make figures` writes BENCHMARKS.md from these files.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from keystroke.engine.machine import processor_name

RESULTS = Path(__file__).parent / "results"


def record(name: str, figures: Mapping[str, Any]) -> None:
    """Print `figures` as one line of JSON and write them to bench/results/NAME.json."""
    print(json.dumps(figures))
    folder = Path(os.environ.get("BENCH_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "command": command(),
        "machine": machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "version": version("keystroke"),
        "figures": flattened(figures),
    }
    path = folder / f"{os.environ.get('BENCH_RESULT', name)}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def flattened(figures: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The same figures without nesting: {"a": {"b": 1}} is {"a.b": 1}."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def command() -> str:
    """How this program was started, as a person would type it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {spec.name}" if spec is not None else f"python {Path(sys.argv[0]).name}"
    return " ".join((program, *sys.argv[1:]))


def machine() -> str:
    """Cores and processor, and the GPU where torch has been using one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{count} cores, {_processor()}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        text = f"{torch.cuda.get_device_name()}, {text}"
    return text


def _processor() -> str:
    name, kind = processor_name(), platform.machine()
    return name if name == kind else f"{name} ({kind})"
