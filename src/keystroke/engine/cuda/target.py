"""The GPU architectures that kernels are compiled for. A GPU that is too old is refused here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from keystroke.errors import ConfigError, ModelError

INSTEAD = (
    "leave engine.kind at auto for the embedded engine, or name a server (llama.cpp, Ollama, vLLM) as "
    "[models.NAME] with its base_url"
)


@dataclass(frozen=True)
class Target:
    name: str  # the compiler's
    shared_bytes: int  # shared memory of a block, at most
    matrix_rate: float  # speed of a multiprocessor's tensor cores relative to Hopper's
    portable: bool = False  # compiled to PTX, which the driver finishes for the GPU

    @property
    def capability(self) -> tuple[int, int]:
        number = int(self.name.removeprefix("sm_"))
        return number // 10, number % 10


# Rates are those of products with float32 sums, of the slowest GPUs of each architecture.
AMPERE = Target("sm_80", 166_912, 0.4)  # A100, A30
HOPPER = Target("sm_90", 232_448, 1.0)  # H100, H200
TARGETS = {
    target.name: target
    for target in (
        AMPERE,
        Target("sm_86", 101_376, 0.125),  # RTX 30 series, A10, A40
        Target("sm_89", 101_376, 0.17),  # RTX 40 series, L4, L40
        HOPPER,
        Target("sm_100", 232_448, 1.0),  # B200
        Target("sm_120", 101_376, 0.17),  # RTX 50 series
    )
}


def target_for(capability: tuple[int, int], shared_bytes: int, wanted: str = "auto") -> Target:
    """The target for a GPU of this compute capability with so much shared memory per block (0: the usual).
    `wanted` names an older architecture to use instead. Raises ModelError for a GPU before Ampere,
    ConfigError if `wanted` is unknown or newer than the GPU."""
    version = "{}.{}".format(*capability)
    older = [target for target in TARGETS.values() if target.capability <= capability]
    if not older:
        raise ModelError(
            f"this GPU has compute capability {version}, and the CUDA engine needs 8.0 (Ampere, 2020) or "
            f"later; {INSTEAD}"
        )
    if wanted == "auto":
        found = older[-1]
    elif wanted in TARGETS:
        found = TARGETS[wanted]
        if found not in older:
            raise ConfigError(
                f"engine.cuda_target is {wanted}, and this GPU has compute capability {version}; "
                "set it to auto or to an older kind"
            )
    else:
        raise ConfigError(f"engine.cuda_target {wanted!r} is none of auto, {', '.join(TARGETS)}")
    room = shared_bytes or found.shared_bytes
    room = room if wanted == "auto" else min(found.shared_bytes, room)
    return replace(found, shared_bytes=room, portable=found.capability != capability)


def nearest_supported(target: Target, known: list[int]) -> Target:
    """`target`, or the newest before it among the `known` architectures (80, 86 ...) of the compiler."""
    if not known or int(target.name.removeprefix("sm_")) in known:
        return target
    older = (each for each in TARGETS.values() if each.capability <= target.capability)
    names = [each.name for each in older if int(each.name.removeprefix("sm_")) in known]
    if not names:
        raise ModelError(
            f"CUDA's run-time compiler does not know {target.name}; install a newer one with: "
            "pip install -U nvidia-cuda-nvrtc"
        )
    return replace(target, name=names[-1], portable=True)
