"""llama.cpp as a shared library: the few calls that a comparison needs.

Written for the interface of llama.cpp 0.5 (its
`llama_model_params` and `llama_context_params` are passed by value, so their layout must be the library's);
defaults that do not look like it end the bench instead of comparing with something else.

A folder of libraries for every kind of x86_64 processor comes with the package `@node-llama-cpp/linux-x64`
(`npm pack` it and take `package/bins/linux-x64`): llama.cpp chooses among them as it does for its own users.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path

import numpy as np


class _ModelParams(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("devices", "overrides")),
        *((name, c_int32) for name in ("gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
        *((name, c_void_p) for name in ("tensor_split", "progress", "progress_data", "kv_overrides")),
        *((name, c_bool) for name in ("vocab_only", "check", "extra_buffers", "no_host", "no_alloc", "mtp")),
    )


class _ContextParams(ctypes.Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch")),
        *((name, c_int) for name in ("context", "rope", "pooling", "attention", "flash_attention")),
        *((f"number_{index}", c_float) for index in range(6)),
        ("yarn_original", c_uint32),
        ("defragment", c_float),
        *((name, c_void_p) for name in ("evaluate", "evaluate_data")),
        *((name, c_int) for name in ("type_k", "type_v")),
        *((name, c_void_p) for name in ("abort", "abort_data")),
        *((f"flag_{index}", c_bool) for index in range(6)),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("other", c_void_p),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("count", c_int32),
        *((name, c_void_p) for name in ("token", "embedding", "position", "sequences", "ids", "logits")),
    )


class LlamaLibrary:
    """One model in one build of llama.cpp. Raises SystemExit where the folder holds no usable build."""

    def __init__(self, folder: Path, model: Path, threads: int, context: int = 1024) -> None:
        library = self._library = _loaded(folder)
        library.llama_log_set(_SILENT, None)
        library.llama_backend_init()
        params = library.llama_context_default_params()
        if (params.n_ctx, params.n_batch, params.type_k, params.type_v) != (512, 2048, 1, 1):
            raise SystemExit(
                f"{folder} holds a llama.cpp of another interface than this bench was written for"
            )
        params.n_ctx, params.n_threads, params.n_threads_batch = context, threads, threads
        self._model = library.llama_model_load_from_file(
            str(model).encode(), library.llama_model_default_params()
        )
        self._context = library.llama_init_from_model(self._model, params) if self._model else None
        if not self._context:
            raise SystemExit(f"llama.cpp from {folder} could not open {model}")

    def reset(self) -> None:
        """Forget every token."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def eval(self, tokens: Sequence[int]) -> None:
        """Append tokens and wait for the logits of the last."""
        array = np.array(tokens, np.int32)
        batch = self._library.llama_batch_get_one(array.ctypes.data, len(array))
        if self._library.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not decode")
        self._library.llama_get_logits(self._context)[0]

    def logits(self, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The logits of the last token."""
        pointer = self._library.llama_get_logits(self._context)
        return np.array(pointer[:vocabulary], np.float64)


_SILENT = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda *_: None)


def _loaded(folder: Path) -> ctypes.CDLL:
    def file(stem: str) -> Path:
        found = sorted(folder.glob(f"lib{stem}.so")) + sorted(folder.glob(f"lib{stem}.v*.so"))
        if not found:
            raise SystemExit(f"{folder} has no lib{stem}; give the folder with llama.cpp's shared libraries")
        return found[0]

    ctypes.CDLL(str(file("ggml-base")), mode=ctypes.RTLD_GLOBAL)
    backends = ctypes.CDLL(str(file("ggml")), mode=ctypes.RTLD_GLOBAL)
    backends.ggml_backend_load_all_from_path(str(folder).encode())
    library = ctypes.CDLL(str(file("llama")))
    signatures: dict[str, tuple[object, list[object]]] = {
        "llama_model_default_params": (_ModelParams, []),
        "llama_context_default_params": (_ContextParams, []),
        "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParams]),
        "llama_init_from_model": (c_void_p, [c_void_p, _ContextParams]),
        "llama_batch_get_one": (_Batch, [c_void_p, c_int32]),
        "llama_decode": (c_int32, [c_void_p, _Batch]),
        "llama_get_memory": (c_void_p, [c_void_p]),
        "llama_memory_clear": (None, [c_void_p, c_bool]),
        "llama_get_logits": (ctypes.POINTER(c_float), [c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
