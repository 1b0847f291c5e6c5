"""The hardware of this machine (processor, memory, GPU, disk), and the models of the catalogue that suit it.

`Machine` is a plain value, so that recommendations can be computed for a machine that is not at hand. Speeds
are estimates: how often the memory can be read per second, over what one token reads.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keystroke.engine.builtin import BuiltInModel
from keystroke.engine.cores import usable_cores
from keystroke.engine.memory import total_memory

# Published memory bandwidth of GPUs in GB/s, the first name that is part of the GPU's counts.
_GPU_BANDWIDTH = (
    ("H200", 4800),
    ("H100", 3350),
    ("B200", 8000),
    ("A100", 1935),
    ("L40", 864),
    ("L4", 300),
    ("RTX 5090", 1792),
    ("RTX 5080", 960),
    ("RTX 4090", 1008),
    ("RTX 4080", 717),
    ("RTX 4070", 504),
    ("RTX 3090", 936),
    ("RTX 3080", 760),
    ("A6000", 768),
    ("T4", 300),
)
# Measured: decoding reaches this share of the bandwidth on an H200 without drafts (BENCHMARKS.md), and so
# many weights a second on a core of a Xeon.
_GPU_SHARE, _CPU_SHARE, _WEIGHTS_PER_CORE = 0.3, 0.8, 14e9
_GPU_RESERVED = 1_500_000_000  # bytes that the driver, kernels and the desktop take
_MEMORY_SHARE = 0.7  # of a machine's memory; the rest is for the editor, the browser and the project
_LEFT = 2_000_000_000  # bytes that the system itself needs beside a model that takes the rest
SLOW, COMFORTABLE = 5.0, 15.0  # tokens a second: below the first a model is not recommended
_CAPABLE = 20  # rank below which a model is recommended only where nothing else runs
_PLAIN = ("llama", "qwen2", "qwen3")  # architectures that the CPU engine runs without compiled operators


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """An NVIDIA GPU as its driver reports it."""

    name: str
    memory_bytes: int
    driver: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`bandwidth` is how fast the processor reads memory, in bytes a second; None: not measured. `engines`
    are the names of the engines whose packages and drivers are there; `compiler`: there is one for C."""

    system: str
    processor: str
    architecture: str
    cores: int
    memory_bytes: int
    disk_bytes: int | None = None
    gpu: NvidiaGpu | None = None
    bandwidth: float | None = None
    engines: tuple[str, ...] = ("onnx",)
    compiler: bool = True

    @property
    def is_mac(self) -> bool:
        return self.system == "Darwin"

    def describe(self) -> str:
        """One line for people."""
        parts = [self.processor, f"{self.cores} cores", f"{self.memory_bytes / 1e9:.0f} GB of memory"]
        if self.gpu is not None:
            parts.append(f"{self.gpu.name} with {self.gpu.memory_bytes / 1e9:.0f} GB")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class ModelFit:
    """Whether a model suits a machine. `reason` is why not; `engine` is the one that would run it, and
    `speed` its expected rate in tokens a second (None: cannot be estimated). `tight`: it runs, since its file
    is mapped and not loaded, but leaves little for other programs; whatever they push out is read again."""

    model: BuiltInModel
    reason: str | None
    engine: str | None = None
    speed: float | None = None
    tight: bool = False

    def describe(self) -> str:
        """One line for people."""
        if self.reason is not None:
            return f"no: {self.reason}"
        rate = self.speed or 0.0
        speed = f", about {rate:.{1 if rate < 10 else 0}f} tokens a second" if rate else ""
        if self.tight:
            return (
                f"yes, mapped, on the {self.engine} engine{speed} while other programs leave its "
                f"{self.model.size / 1e9:.1f} GB in memory, else at the speed of the disk"
            )
        return f"yes, on the {self.engine} engine{speed}"


def look_up_machine(models: Path, *, measure: bool = True) -> Machine:
    """This machine. `models` is the folder whose disk counts; `measure`: read memory for a tenth of a
    second."""
    from keystroke.engine.backends import BACKENDS

    return Machine(
        system=platform.system(),
        processor=processor_name(),
        architecture=platform.machine(),
        cores=usable_cores(),
        memory_bytes=total_memory(),
        disk_bytes=_free_disk(models),
        gpu=nvidia_gpu(),
        bandwidth=memory_bandwidth() if measure else None,
        compiler=any(map(shutil.which, ("cc", "gcc", "clang"))),
        engines=tuple(name for name, backend in BACKENDS.items() if backend.unavailable_reason() is None),
    )


def fit(model: BuiltInModel, machine: Machine, *, installed: bool = False) -> ModelFit:
    """Whether `model` runs on `machine`. `installed`: it needs no disk space any more."""
    if not is_runnable(model):
        return ModelFit(
            model,
            f"no engine of this version runs its architecture ({model.architecture}); "
            "use it through a server",
        )
    gpu = machine.gpu
    crowded = model.memory_bytes > machine.memory_bytes * _MEMORY_SHARE
    # MLX copies weights into its own memory, so that only the CPU engine runs from a mapped file.
    mapped = "mlx" not in machine.engines and model.memory_bytes <= machine.memory_bytes - _LEFT
    if (
        gpu is not None
        and "cuda" in model.engines
        and model.gpu_memory_bytes <= gpu.memory_bytes - _GPU_RESERVED
    ):
        engine = "cuda"
    elif crowded and not (mapped and machine.compiler and "onnx" in model.engines):
        needed = model.memory_bytes / _MEMORY_SHARE / 1e9
        on_gpu = f", or a GPU with {(model.gpu_memory_bytes + _GPU_RESERVED) / 1e9:.0f}"
        return ModelFit(
            model,
            f"needs {needed:.0f} GB of memory{on_gpu if 'cuda' in model.engines else ''}; this machine has "
            f"{machine.memory_bytes / 1e9:.0f}{f' and {_gpu_words(gpu)}' if gpu is not None else ''}",
        )
    elif "mlx" in model.engines and "mlx" in machine.engines:
        engine = "mlx"
    elif "onnx" not in model.engines:
        return ModelFit(model, f"runs on {' or '.join(model.engines)} only")
    elif model.architecture not in _PLAIN and not machine.compiler:
        return ModelFit(model, "needs a C compiler (cc, gcc or clang) on this machine")
    else:
        engine = "onnx"
    if not installed and machine.disk_bytes is not None and machine.disk_bytes < model.size * 1.1:
        return ModelFit(
            model, f"needs {model.size / 1e9:.1f} GB of disk; {machine.disk_bytes / 1e9:.1f} are free", engine
        )
    return ModelFit(
        model, None, engine, expected_speed(model, machine, engine), tight=crowded and engine == "onnx"
    )


def expected_speed(model: BuiltInModel, machine: Machine, engine: str) -> float | None:
    """Tokens a second in one stream without drafts; None where the memory's speed is not known."""
    if not model.read_bytes:
        return None
    if engine == "cuda":
        bandwidth = _gpu_bandwidth(machine.gpu)
        return bandwidth * _GPU_SHARE / model.read_bytes if bandwidth else None
    if machine.bandwidth is None:
        return None
    by_memory = machine.bandwidth * _CPU_SHARE / model.read_bytes
    return min(by_memory, machine.cores * _WEIGHTS_PER_CORE / (model.active * 1e9))


def recommend_deep(
    models: Iterable[BuiltInModel], machine: Machine, installed: Iterable[str] = ()
) -> ModelFit | None:
    """The best model for instructions that runs here at a usable speed; None if there is none."""
    present = set(installed)
    fits = [fit(model, machine, installed=model.name in present) for model in models if model.role == "deep"]
    usable = [item for item in fits if item.reason is None and item.model.rank > 0 and not item.tight]
    quick = [item for item in usable if item.speed is None or item.speed >= SLOW]
    # Without a quick one, the smallest: it is slow, but less so than the others.
    if not quick:
        best = min(usable, key=lambda item: item.model.read_bytes, default=None)
    else:
        capable = [item for item in quick if item.model.rank >= _CAPABLE] or quick
        best = max(capable, key=_preference)
    # A busy machine measures slow: that is no reason to download a lesser model than the installed one.
    kept = max(
        (item for item in usable if item.model.name in present),
        key=lambda item: item.model.rank,
        default=None,
    )
    if best is not None and kept is not None and best.model.name not in present:
        return kept if kept.model.rank > best.model.rank else best
    return best


def _preference(found: ModelFit) -> tuple[bool, float]:
    """The better one of those that are comfortable, else the quicker one."""
    if found.speed is None or found.speed >= COMFORTABLE:
        return True, float(found.model.rank)
    return False, found.speed


def is_runnable(model: BuiltInModel) -> bool:
    """Whether an engine of this version knows the model's architecture."""
    from keystroke.engine.checkpoint.gguf_file import gguf_architectures

    return not model.architecture or model.architecture in gguf_architectures()


def _gpu_words(gpu: NvidiaGpu) -> str:
    return f"{gpu.name} with {gpu.memory_bytes / 1e9:.0f}"


def _gpu_bandwidth(gpu: NvidiaGpu | None) -> float | None:
    name = gpu.name.upper() if gpu is not None else ""
    return next((rate * 1e9 for part, rate in _GPU_BANDWIDTH if part in name), None)


def nvidia_gpu() -> NvidiaGpu | None:
    """The first NVIDIA GPU as its driver reports it; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True)
        name, memory, driver = (part.strip() for part in done.stdout.strip().splitlines()[0].split(","))
        return NvidiaGpu(name, int(float(memory)) << 20, driver)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def processor_name() -> str:
    if sys.platform == "darwin":
        return _first_line("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


def _free_disk(folder: Path) -> int | None:
    """Free bytes on the disk of a folder that may not exist yet."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None


@functools.cache
def memory_bandwidth() -> float:
    """How fast all cores together read memory, in bytes a second; takes a tenth of a second."""
    import time
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    workers = min(usable_cores(), 16)
    blocks = [np.ones(4 << 20, dtype=np.float64) for _ in range(workers)]  # 32 MB each: more than a cache
    best = 0.0
    with ThreadPoolExecutor(workers) as pool:
        for _ in range(8):
            began = time.perf_counter()
            list(pool.map(np.sum, blocks))
            best = max(best, sum(block.nbytes for block in blocks) / (time.perf_counter() - began))
    return best
