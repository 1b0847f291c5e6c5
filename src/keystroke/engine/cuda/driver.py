"""The GPU behind the decode kernel: compiled at run time, kept on disk, launched through the CUDA driver.

Law: the only file that talks to NVRTC and the driver. It knows source text and launches, no models. A missing
library or an unsuitable GPU is one sentence that says what to do.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from keystroke.engine.cuda.plan import SHARED_BYTES, Bucket, Plan
from keystroke.engine.cuda.step import Parameters
from keystroke.errors import EngineError, ModelError

_THREADS = 288  # of a block: eight warps that compute, one that streams
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PARTS = (  # in the order in which they build on each other
    "layout.cuh",
    "worker.cuh",
    "multiply.cuh",
    "project.cuh",
    "attention.cuh",
    "selection.cuh",
    "combine.cuh",
    "filter.cuh",
    "choice.cuh",
    "decode.cu",
)
_NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class GpuLauncher:
    """Compiles the kernel for a plan, one variant for each width of the operand, when first needed."""

    def __init__(self, plan: Plan, device: torch.device, *, profile: int = 0) -> None:
        self.blocks = plan.blocks
        self._plan = plan
        self._device = device
        self._profile = profile
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[tuple[int, bool], ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        torch.cuda.synchronize(device)  # makes the primary context, and makes it current
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))

    def launch(self, parameters: Parameters, bucket: Bucket, sparse: bool) -> None:
        function = self._functions.get((bucket.tiles_n, sparse)) or self.prepare(bucket.tiles_n, sparse)
        self._call("cuCtxSetCurrent", self._context)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        self._call(
            "cuLaunchCooperativeKernel",
            function,
            *(ctypes.c_uint(n) for n in (self.blocks, 1, 1, _THREADS, 1, 1, SHARED_BYTES)),
            stream,
            arguments,
        )

    def prepare(self, tiles_n: int, sparse: bool = False) -> ctypes.c_void_p:
        with self._lock:
            found = self._functions.get((tiles_n, sparse))
            if found is not None:
                return found
            macros = self._plan.macros(tiles_n, sparse)
            if self._profile:
                macros["PROFILE"] = str(self._profile)
            image = compiled(macros)
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call("cuCtxSetCurrent", self._context)
            self._call("cuModuleLoadData", ctypes.byref(module), image)
            self._call("cuModuleGetFunction", ctypes.byref(function), module, b"decode_step")
            self._call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, SHARED_BYTES)
            self._functions[tiles_n, sparse] = function
            return function

    def check(self) -> None:
        try:
            torch.cuda.current_stream(self._device).query()
        except RuntimeError as error:
            raise EngineError(
                f"the GPU stopped working ({str(error).splitlines()[0]}); restart the server"
            ) from error

    def host_buffer(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32).pin_memory()

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise EngineError(f"the GPU refused {name}: {reason}; check the driver with nvidia-smi")


def kernel_source(instructions: str | None = None) -> str:
    """The kernel as one text, over the GPU's instructions or a stand-in for them."""
    folder = resources.files("keystroke.engine.cuda") / "kernels"
    if instructions is None:
        instructions = (folder / "device.cuh").read_text()
    return "\n".join([instructions, *((folder / name).read_text() for name in _PARTS)])


def compiled(macros: dict[str, str]) -> bytes:
    """The machine code for these macros, from the cache on disk or made now (some seconds)."""
    options = ["--gpu-architecture=sm_90", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in sorted(macros.items())]
    source = kernel_source()
    name = hashlib.sha256("\0".join([source, *options]).encode()).hexdigest()[:32]
    path = cache_folder() / f"decode-{name}.cubin"
    if path.is_file():
        return path.read_bytes()
    image = _compile(source, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_bytes(image)
        partial.replace(path)
    except OSError:
        pass  # a read-only home costs a compilation at each start, nothing else
    return image


def compile_together(wanted: Iterable[dict[str, str]]) -> None:
    """Fill the cache for all these macros at once: the compiler is slow, and the machine has cores."""
    distinct = {tuple(sorted(macros.items())): macros for macros in wanted}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(compiled, macros) for macros in distinct.values()]:
            done.result()


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "keystroke" / "cuda"


def _compile(source: str, options: list[str]) -> bytes:
    library = _nvrtc()
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"decode.cu", 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = library.nvrtcCompileProgram(program, len(options), given)
    size = ctypes.c_size_t()
    if failed:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise ModelError(f"the decode kernel does not compile for this model: {log.value.decode()[:2000]}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, image)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def _nvrtc() -> ctypes.CDLL:
    names = list(_NVRTC_NAMES)
    for folder in (*sys.path, "/usr/local/cuda/lib64"):
        names += [
            str(p) for p in sorted(Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.1?"), reverse=True)
        ]
        names += [str(p) for p in Path(folder or ".").glob("libnvrtc.so.1?")]
    for name in names:
        builtins = Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ()
        try:
            for extra in builtins:
                ctypes.CDLL(str(extra), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise ModelError(
        "CUDA's run-time compiler (libnvrtc) was not found; install it with: pip install nvidia-cuda-nvrtc"
    )
