"""The kinds of GPU that the kernels are compiled for, and what of them decides how work is cut.

A table and a choice from it; it asks no device and knows no models. A GPU that is too old is refused
here, in one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keystroke.errors import ConfigError, ModelError

INSTEAD = (
    "leave engine.kind at auto for the embedded engine, or name a server (llama.cpp, Ollama, vLLM) as "
    "[models.NAME] with its base_url"
)


@dataclass(frozen=True)
class Target:
    name: str  # as the compiler calls it
    shared_bytes: int  # that one block may have
    matrix_rate: float  # of a multiprocessor's tensor cores, beside Hopper's
    portable: bool = False  # compiled to PTX, which the driver finishes for the GPU that is there

    @property
    def capability(self) -> tuple[int, int]:
        number = int(self.name.removeprefix("sm_"))
        return number // 10, number % 10

    @property
    def bulk(self) -> bool:
        """Whether it has an engine for bulk copies (kernels/copies.cuh)."""
        return self.capability >= (9, 0)


# Rates are those of products with sums in float32, of consumer GPUs where there are such.
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
    """What to compile for on a GPU of this compute capability whose blocks may have so much shared memory (0:
    what is usual); `wanted` names an older kind, to be run as that. Raises ModelError for a GPU before
    Ampere, and ConfigError where `wanted` is unknown or newer than the GPU."""
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


def nearest(target: Target, known: list[int]) -> Target:
    """`target`, or where the compiler knows only these (80, 86 ...), the newest before it that it does."""
    if not known or int(target.name.removeprefix("sm_")) in known:
        return target
    names = [
        name for name, each in TARGETS.items()
        if each.capability <= target.capability and int(name.removeprefix("sm_")) in known
    ]  # fmt: skip
    if not names:
        raise ModelError(
            f"CUDA's run-time compiler does not know {target.name}; install a newer one with: "
            "pip install -U nvidia-cuda-nvrtc"
        )
    return replace(target, name=names[-1], portable=True)
