"""Compiles kernels with NVRTC, caches them on disk and launches them through the CUDA driver.

The only module that calls NVRTC and the driver. Errors say what to do in one sentence.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from keystroke.engine.cuda.draft import DraftParameters, HeadPlan
from keystroke.engine.cuda.plan import NEAR, THREADS, Bucket, Plan, StepShape
from keystroke.engine.cuda.step import Parameters
from keystroke.engine.cuda.target import HOPPER, Target, nearest_supported
from keystroke.errors import EngineError, ModelError

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DECODE_PARTS = (  # in order of dependence
    "copies.cuh",
    "layout.cuh",
    "worker.cuh",
    "multiply.cuh",
    "project.cuh",
    "delta.cuh",
    "host_experts.cuh",
    "experts.cuh",
    "early_scores.cuh",
    "attention.cuh",
    "selection.cuh",
    "combine.cuh",
    "filter.cuh",
    "choice.cuh",
    "features.cuh",
    "decode.cu",
)
_DRAFT_OWN = ("draft.cuh", "draft_layer.cuh", "draft_choice.cuh", "draft.cu")
DRAFT_PARTS = (*DECODE_PARTS[: DECODE_PARTS.index("features.cuh")], *_DRAFT_OWN)
PREFILL_PARTS = ("prefill.cu",)
UNPACK_PARTS = (*DECODE_PARTS[: DECODE_PARTS.index("project.cuh")], "unpack.cu")
_NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class Gpu:
    """One device: loads machine code and launches it in torch's stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._driver = ctypes.CDLL("libcuda.so.1")
        numbers = [ctypes.c_uint] * 7
        pointers = [ctypes.c_void_p] * 2
        self._driver.cuLaunchCooperativeKernel.argtypes = [ctypes.c_void_p, *numbers, *pointers]
        self._driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *numbers, *pointers, ctypes.c_void_p]
        torch.cuda.synchronize(device)  # creates the primary context and makes it current
        self._context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(self._context))

    def enter(self) -> int:
        """Make the device's context current in this thread. Returns torch's stream."""
        self.call("cuCtxSetCurrent", self._context)
        return torch.cuda.current_stream(self.device).cuda_stream

    def load(self, image: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.enter()
        self.call("cuModuleLoadData", ctypes.byref(module), image)
        return module

    def function(self, module: ctypes.c_void_p, name: str, shared: int = 0) -> ctypes.c_void_p:
        """A kernel of `module` with `shared` bytes of dynamic shared memory."""
        found = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(found), module, name.encode())
        if shared:
            self.call("cuFuncSetAttribute", found, _DYNAMIC_SHARED, shared)
        return found

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise EngineError(f"the GPU refused {name}: {reason}; check the driver with nvidia-smi")


class GpuLauncher:
    """Compiles the decode kernel of a plan, one variant per operand width, when first needed."""

    asynchronous = True

    def __init__(self, plan: Plan, device: torch.device, *, profile: int = 0) -> None:
        self.blocks = plan.blocks
        self._plan = plan
        self._profile = profile
        self._gpu = Gpu(device)
        self._functions: dict[tuple[int, bool, StepShape], ctypes.c_void_p] = {}
        self._lock = threading.Lock()

    def launch(self, parameters: Parameters, bucket: Bucket, sparse: bool, shape: StepShape) -> None:
        key = (bucket.tiles_n, sparse, shape)
        function = self._functions.get(key) or self.prepare(*key)
        stream = self._gpu.enter()
        sizes = (self.blocks, 1, 1, self._plan.threads, 1, 1, self._plan.target.shared_bytes)
        self._gpu.call("cuLaunchCooperativeKernel", function, *sizes, stream, _argument_array(parameters))

    def prepare(self, tiles_n: int, sparse: bool = False, shape: StepShape = "any") -> ctypes.c_void_p:
        with self._lock:
            found = self._functions.get((tiles_n, sparse, shape))
            if found is not None:
                return found
            macros = self._plan.macros(tiles_n, sparse, shape)
            if self._profile:
                macros["PROFILE"] = str(self._profile)
            target = self._plan.target
            module = self._gpu.load(compile_kernel(macros, target=target))
            function = self._gpu.function(module, "decode_step", target.shared_bytes)
            self._functions[tiles_n, sparse, shape] = function
            return function

    def draft_launcher(self, plan: HeadPlan) -> GpuDraftLauncher:
        return GpuDraftLauncher(self._gpu, plan)

    def check(self) -> None:
        try:
            torch.cuda.current_stream(self._gpu.device).query()
        except RuntimeError as error:
            raise EngineError(
                f"the GPU stopped working ({str(error).splitlines()[0]}); restart the server"
            ) from error

    def host_buffer(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int32).pin_memory()


class GpuDraftLauncher:
    """Compiles the drafting kernel of one head on construction."""

    def __init__(self, gpu: Gpu, plan: HeadPlan) -> None:
        self._gpu, self._blocks = gpu, plan.target.blocks
        self._shared = plan.target.target.shared_bytes
        module = gpu.load(compile_kernel(plan.macros, DRAFT_PARTS, plan.target.target))
        self._function = gpu.function(module, "draft_step", self._shared)

    def launch(self, parameters: DraftParameters) -> None:
        stream = self._gpu.enter()
        sizes = (self._blocks, 1, 1, THREADS, 1, 1, self._shared)
        self._gpu.call(
            "cuLaunchCooperativeKernel", self._function, *sizes, stream, _argument_array(parameters)
        )


class KernelModule:
    """Kernels of one source file, each with one structure of parameters. Call `begin` before the launches of
    a portion: it looks up the stream once for all of them."""

    def __init__(
        self,
        device: torch.device,
        macros: dict[str, str],
        target: Target,
        parts: Sequence[str] = PREFILL_PARTS,
    ) -> None:
        self._gpu = Gpu(device)
        self._module = self._gpu.load(compile_kernel(macros, parts, target))
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._stream = 0

    def begin(self) -> None:
        self._stream = self._gpu.enter()

    def launch(self, name: str, grid: tuple[int, int], threads: int, parameters: ctypes.Structure) -> None:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._gpu.function(self._module, name)
        sizes = (*grid, 1, threads, 1, 1, 0)
        self._gpu.call("cuLaunchKernel", function, *sizes, self._stream, _argument_array(parameters), None)


def _argument_array(parameters: ctypes.Structure) -> ctypes.Array[ctypes.c_void_p]:
    """The arguments of a kernel with one parameter; the launch copies it."""
    return (ctypes.c_void_p * 1)(ctypes.addressof(parameters))


def kernel_source(instructions: str | None = None, parts: Sequence[str] = DECODE_PARTS) -> str:
    """The source of a kernel, after device.cuh or the emulator's replacement of it."""
    folder = resources.files("keystroke.engine.cuda") / "kernels"
    if instructions is None:
        instructions = (folder / "device.cuh").read_text()
    return "\n".join([instructions, *((folder / name).read_text() for name in parts)])


def compile_kernel(
    macros: dict[str, str], parts: Sequence[str] = DECODE_PARTS, target: Target = HOPPER
) -> bytes:
    """Machine code for these macros (PTX for a portable target), from the disk cache or compiled now."""
    options = [f"--gpu-architecture={_architecture(target)}", "--std=c++17", "-default-device"]
    options += [f"-D{name}={value}" for name, value in sorted(macros.items())]
    source = kernel_source(parts=parts)
    name = hashlib.sha256("\0".join([source, *options]).encode()).hexdigest()[:32]
    path = cache_folder() / f"{Path(parts[-1]).stem}-{name}.{'ptx' if target.portable else 'cubin'}"
    if path.is_file():
        return path.read_bytes()
    compiled_for = nearest_supported(target, known_architectures())
    options[0] = f"--gpu-architecture={_architecture(compiled_for)}"
    image = _compile(source, options, portable=compiled_for.portable)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        partial.write_bytes(image)
        partial.replace(path)
    except OSError:
        pass  # with a read-only home every start compiles again
    return image


def _architecture(target: Target) -> str:
    return target.name.replace("sm_", "compute_") if target.portable else target.name


def compile_all(wanted: Iterable[dict[str, str]], target: Target = HOPPER) -> None:
    """Fill the cache for all these macros, in parallel."""
    distinct = {tuple(sorted(macros.items())): macros for macros in wanted}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile_kernel, macros, target=target) for macros in distinct.values()]
        for done in jobs:
            done.result()


@contextlib.contextmanager
def compile_in_background(
    plan: Plan, *, sparse: bool = False, head: HeadPlan | None = None
) -> Iterator[None]:
    """Compile the kernels of a model's first answers (decode of few rows, prefill, draft head) in threads,
    which end with the context. Compile errors are raised by the later launch."""
    sizes = sorted({bucket.tiles_n for bucket in plan.buckets} & {1, 2})
    kinds: set[tuple[int, bool, StepShape]]
    kinds = {(tiles, each, "any") for tiles in sizes for each in ((False, True) if sparse else (False,))}
    kinds |= {(1, False, plan.shape(1, reach)) for reach in (0, NEAR)}
    with ThreadPoolExecutor(len(kinds) + 3) as pool:
        if head is not None:
            pool.submit(compile_kernel, head.macros, DRAFT_PARTS, plan.target)
        for kind in kinds:
            pool.submit(compile_kernel, plan.macros(*kind), target=plan.target)
        for kv_bytes in {2, plan.kv_bytes}:
            pool.submit(compile_kernel, plan.prefill_macros(kv_bytes), PREFILL_PARTS, plan.target)
        yield


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "keystroke" / "cuda"


def known_architectures() -> list[int]:
    """The architectures that the installed compiler supports (80, 86 ...); empty if it does not report
    them."""
    library, count = _nvrtc(), ctypes.c_int()
    if not hasattr(library, "nvrtcGetNumSupportedArchs"):
        return []
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(found)
    return list(found)


def _compile(source: str, options: list[str], *, portable: bool = False) -> bytes:
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
    kind = "PTX" if portable else "CUBIN"
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{kind}")(program, image)
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
