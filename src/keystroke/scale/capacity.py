"""Checks before any Ray is started: whether the models exist here and the replicas fit this machine.

Does not import Ray, so that a mistake is reported within a second.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from keystroke.config import Settings
from keystroke.engine.backends import choose_backend
from keystroke.engine.cores import usable_cores
from keystroke.engine.library import Progress, no_progress
from keystroke.engine.locate import adapter_path, resolve
from keystroke.engine.memory import available_bytes
from keystroke.errors import ConfigError
from keystroke.scale.rollout import missing_resources
from keystroke.scale.served_models import initial_replicas, model_tables, replica_needs, served_models

PROCESS_BYTES = 190 << 20  # a gateway or an engine replica without weights, measured with Ray 2.60
RAY_BYTES = 700 << 20  # Ray's own processes on one machine, measured
_PER_CORE = 8  # replicas that share a core still take turns at a useful rate; more only wait for each other


def check_models(settings: Settings, progress: Progress = no_progress) -> dict[str, Path]:
    """The files of every model that runs here; a built-in one is fetched the first time. Raises what naming,
    finding or fetching a model raises."""
    files = {}
    for name, table in served_models(settings).items():
        if table.engine == "remote":
            continue
        choose_backend(table.engine if table.engine != "auto" else settings.engine.kind)
        adapter_path(name, settings)
        files[name] = resolve(name, settings, progress)
    return files


def check_fits(settings: Settings, *, echo: bool = False, files: dict[str, Path] | None = None) -> None:
    """Raises ConfigError where this machine has fewer GPUs, cores or memory than the replicas take."""
    cores, cards = usable_cores(), visible_gpus()
    needs = replica_needs(settings, echo=echo)
    one = {kind: float("inf") for resources in needs.values() for kind in resources} | {"GPU": float(cards)}
    if lacking := missing_resources(needs, [one]):
        raise ConfigError(f"The replicas have no place on this machine: {'; '.join(lacking)}.")
    counts = {
        name: initial_replicas(table, settings)
        for name, table in model_tables(settings, echo).items()
        if table.engine != "remote"
    }
    tables = model_tables(settings, echo)
    gpus = sum(tables[name].gpus * count for name, count in counts.items())
    if gpus > cards:
        raise _too_many(counts, f"{gpus:g} GPUs", f"{cards}", int(cards // (gpus / sum(counts.values()))))
    taken = sum(tables[name].cpus * count for name, count in counts.items())
    if taken > cores * _PER_CORE:
        most = int(cores * _PER_CORE / (taken / sum(counts.values())))
        raise _too_many(counts, f"{taken:g} cores", f"{cores} ({_PER_CORE} replicas a core at most)", most)
    available = available_bytes()
    # Replicas map the same files, so weights of CPU models are counted once.
    weights = sum(_size(path) for name, path in (files or {}).items() if not tables[name].gpus)
    fixed = RAY_BYTES + weights + settings.scale.gateways * PROCESS_BYTES
    total = fixed + sum(counts.values()) * PROCESS_BYTES
    if available is not None and total > available:
        most = max(0, (available - fixed) // PROCESS_BYTES)
        raise _too_many(counts, f"{total / 1e9:.1f} GB of memory", f"{available / 1e9:.1f} GB free", most)


def _too_many(counts: dict[str, int], needed: str, available: str, most: int) -> ConfigError:
    replicas = ", ".join(f"{count} of {name}" for name, count in counts.items())
    cure = f"start at most {most} with --replicas" if most else "use a smaller model or another machine"
    return ConfigError(
        f"the engine replicas ({replicas}) take {needed}, and this machine has {available}; {cure}, or name "
        "a cluster with --address"
    )


def visible_gpus() -> int:
    """NVIDIA GPUs that a process started here would see."""
    limited = os.environ.get("CUDA_VISIBLE_DEVICES")
    if limited is not None:
        return len([name for name in limited.split(",") if name.strip() not in ("", "-1")])
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
