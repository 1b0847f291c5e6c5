"""llama.cpp's own benchmark, the peer of bench/cuda.py for files: the same file and depth, one stream."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from bench.cuda_rows.cuda_parts import CONTEXT, TOKENS

READ = 8192  # tokens of the prompt that is read
_SECONDS = 150


def llama_speeds(program: Path, model: Path, depth: int = CONTEXT) -> dict[tuple[str, int], float]:
    """Tokens a second of `llama-bench`, by mode and context as in our rows. RuntimeError where it fails.

    Behind a long context only decoding is timed, once: reading the context takes most of the time.
    """
    counts = ("-p", str(READ), "-n", str(TOKENS), "-d", f"0,{depth}", "-r", "3")
    if depth > CONTEXT:
        counts = ("-p", "0", "-n", str(TOKENS), "-d", str(depth), "-r", "1")
    command = [str(program), "-m", str(model), "-ngl", "99", "-fa", "1", *counts, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise RuntimeError(f"llama-bench ended with code {done.returncode}: {done.stderr.strip()[-200:]}")
    return speeds_of(json.loads(done.stdout))


def speeds_of(rows: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    """Single tokens behind others, and a prompt behind none; of each the median of its runs."""
    found = {}
    for row in rows:
        speed = statistics.median(row["samples_ts"])
        if row["n_gen"] and row["n_depth"]:
            found["decode", row["n_depth"]] = speed
        elif row["n_prompt"] and not row["n_depth"]:
            found["prefill", row["n_prompt"]] = speed
    return found
