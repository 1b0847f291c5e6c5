"""Makes quantised files for llama.cpp from the same weights that our engine runs.

llama.cpp's own quantiser makes them once per set of weights; they are cached. A partial
file is never used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

QUANTISED = {"Q4_0": 2, "Q8_0": 7}  # llama.cpp's numbers for them
_kept: list[object] = []


def llama_files(gguf: Path, cache: Path) -> dict[str, Path]:
    """The 4-bit and the 8-bit file by name. Raises ImportError where llama-cpp-python is not installed."""
    import llama_cpp

    quiet()
    cache.mkdir(parents=True, exist_ok=True)
    with gguf.open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()[:12]
    files = {}
    for name, kind in QUANTISED.items():
        file = cache / f"{gguf.stem}-{digest}-{name}.gguf"
        if not file.exists():
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize, params.nthread = kind, True, os.cpu_count() or 1
            part = file.with_suffix(".part")
            if llama_cpp.llama_model_quantize(str(gguf).encode(), str(part).encode(), ctypes.byref(params)):
                raise SystemExit(f"llama.cpp could not make {name} of {gguf}")
            part.replace(file)
        files[name] = file
    return files


def quiet() -> None:
    """Have llama.cpp print nothing."""
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    _kept.append(silent)  # llama.cpp holds only a pointer to it
