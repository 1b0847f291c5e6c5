"""Checks the GPU of this machine: whether the engine runs on it, and whether a model fits. Allocates
nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.plan import MAX_BATCH, Formats, KvPrecision, Plan, Precision
from keystroke.engine.cuda.prefill import portion_bytes
from keystroke.engine.cuda.target import INSTEAD, Target, target_for
from keystroke.engine.snapshots import SNAPSHOT_SHARE
from keystroke.errors import KeystrokeError, ModelError, NotEnoughMemory

_MOST_SPARE = 4 << 30
_FEWEST_TOKENS = 1024  # of KV; with less room a model is not loaded
_TOKENS_BESIDE_EXPERTS = 16_384  # of KV that experts leave room for
_USUAL_TOKENS = 32_768  # of KV for which weights are packed more densely, and prompts get only what they need
_STEP_BYTES = 128 << 20  # the kernel's buffers, at most
_STATE_SHARE = 8  # more states than a step needs take at most one part in so many of the room for contexts

ExpertPlacement = Literal["auto", "gpu", "host"]


def spare_bytes(total: int) -> int:
    """Memory that the KV cache leaves for prefill and other programs."""
    return min(_MOST_SPARE, total // 6)


def _prompt_room(plan: Plan, total: int) -> int:
    """What the KV cache leaves, and for prompts the experts of one layer if the host has some."""
    experts = plan.spec.experts
    if plan.resident is None or experts is None:
        return spare_bytes(total)
    return 2 * 3 * experts.count * experts.width * plan.spec.hidden + spare_bytes(total) // 2


def _least_prompt_room(plan: Plan, total: int) -> int:
    """The same where memory is scarce: only what a portion of a prompt takes, where that is known."""
    spec, experts, usual = plan.spec, plan.spec.experts, _prompt_room(plan, total)
    if plan.stored is None or plan.resident is not None or experts is None or experts.bias:
        return usual
    if plan.shared_apart or spec.delta is not None:
        return usual
    return min(usual, portion_bytes(plan) + _STEP_BYTES)


def kv_token_capacity(plan: Plan, free: int, total: int, each: int, most: int | None = None) -> int:
    """How many tokens with KV of `each` bytes fit in the free memory, or in `most` bytes of it. Raises
    NotEnoughMemory if they are too few."""
    usual, least = (
        int((free - room) * 0.9) // each
        for room in (_prompt_room(plan, total), _least_prompt_room(plan, total))
    )
    asked = most // each if most is not None else min(plan.spec.context_length, _USUAL_TOKENS)
    tokens = max(usual, min(least, asked))
    if tokens < _FEWEST_TOKENS:
        raise NotEnoughMemory(
            f"{plan.spec.name} in {plan.precision} leaves {max(free, 0) / 1e9:.1f} of the GPU's "
            f"{total / 1e9:.0f} GB, too little for a context; choose fewer bits (model.precision), a "
            "smaller model, or engine.kv_budget_mb so that models share the memory"
        )
    wanted = 16 * plan.spec.context_length if most is None else max(most // each, _FEWEST_TOKENS)
    return min(tokens, wanted)


def state_slots(plan: Plan, free: int, total: int) -> int:
    """How many recurrent states of a hybrid the GPU holds. Sequences beyond them share slots and continue
    from snapshots."""
    if plan.spec.delta is None:
        return 0
    room = max(free - _prompt_room(plan, total), 0) // _STATE_SHARE
    most = max((n for n in range(MAX_BATCH + 1) if plan.state_bytes(n) <= room), default=0)
    return max(most, _fewest_states(plan))


def _fewest_states(plan: Plan) -> int:
    """Those of a step's sequences, and two so that a conversation does not lose its state to one request."""
    return min(max(plan.max_rows, 2), MAX_BATCH)


def _fewest_state_bytes(plan: Plan) -> int:
    return plan.state_bytes(_fewest_states(plan))


def context_bytes(plan: Plan) -> int:
    """Bytes of a token of context: its KV, and of a hybrid the snapshots of states."""
    return int(plan.kv_bytes_per_token * (1 if plan.spec.delta is None else 1 + SNAPSHOT_SHARE))


def expert_bytes(plan: Plan) -> int:
    """Bytes of one expert of every layer."""
    whole = replace(plan, resident=None)
    layers = (whole.layer(index) for index in range(plan.spec.layers))
    return sum((layer["gate_up"].bytes + layer["down"].bytes) // whole.expert_slots for layer in layers)


def weight_bytes(plan: Plan) -> int:
    """Bytes of all weights on the GPU, and of the rotary table."""
    spec, experts = plan.spec, plan.spec.experts
    routers = spec.layers * experts.count * spec.hidden * 4 if experts else 0
    return (
        plan.packed_bytes
        + spec.vocab_size * spec.hidden * 2
        + routers
        + plan.early_bytes
        + spec.context_length * spec.head_dim * 4
    )


def bytes_beside_experts(plan: Plan, total: int, kv_tokens: int | None = None) -> int:
    """GPU memory that a mixture needs beside the experts in it: other weights, a context, recurrent states,
    and room to read a prompt with the experts of one layer at a time."""
    spec, experts = plan.spec, plan.spec.experts
    assert experts is not None
    tokens = min(spec.context_length, _TOKENS_BESIDE_EXPERTS) if kv_tokens is None else kv_tokens
    without = replace(plan, resident=0)
    return weight_bytes(without) + _prompt_room(without, total) + _sequence_bytes(plan, tokens)


def _sequence_bytes(plan: Plan, tokens: int) -> int:
    """Memory for so many tokens of context, of which a ninth more is left free, and the fewest recurrent
    states."""
    return tokens * context_bytes(plan) * 10 // 9 + _fewest_state_bytes(plan)


def fit_plan(
    plan: Plan,
    wanted: ExpertPlacement,
    free: int,
    total: int,
    *,
    kv_tokens: int | None = None,
    most: int | None = None,
) -> Plan:
    """The plan as it fits this memory: the faster packing if the GPU then holds all experts beside a usual
    context, otherwise the smaller one, with as many experts as `choose_resident` says."""
    if plan.spec.experts is None:
        return plan
    smaller = plan if plan.stored is None else replace(plan, stored=plan.stored.compacted())
    tokens = kv_tokens or min(plan.spec.context_length, _USUAL_TOKENS)
    if wanted == "host" or _lack(plan, free, total, tokens, most) <= 0:
        smaller = plan
    resident = choose_resident(smaller, wanted, free, total, kv_tokens=kv_tokens, most=most)
    return replace(smaller, resident=resident)


def _lack(plan: Plan, free: int, total: int, tokens: int, most: int | None) -> int:
    """How many bytes too many all experts are beside so many tokens of context."""
    need = weight_bytes(plan) + _least_prompt_room(plan, total) + _sequence_bytes(plan, tokens)
    lack = need - free
    experts = plan.spec.experts
    if most is not None and experts is not None:
        lack = max(lack, expert_bytes(plan) * experts.count - most)
    return lack


def choose_resident(
    plan: Plan,
    wanted: ExpertPlacement,
    free: int,
    total: int,
    *,
    kv_tokens: int | None = None,
    most: int | None = None,
) -> int | None:
    """How many experts of each layer the GPU holds; None: all. `most`: bytes for experts. Raises
    NotEnoughMemory if all are wanted and do not fit."""
    experts = plan.spec.experts
    if experts is None:
        return None
    if wanted == "host":
        return 0
    fewest = kv_tokens or _FEWEST_TOKENS
    if wanted == "auto" and plan.stored is not None:  # the host can have some
        fewest = kv_tokens or min(plan.spec.context_length, _TOKENS_BESIDE_EXPERTS)
    lack = _lack(plan, free, total, fewest, most)
    if lack <= 0:
        return None
    if wanted == "gpu":
        raise NotEnoughMemory(
            f"the experts of {plan.spec.name} need {lack / 1e9:.1f} GB more GPU memory; set "
            "engine.experts to auto to leave some of them in host memory"
        )
    room = free - bytes_beside_experts(plan, total, kv_tokens)
    room = room if most is None else min(room, most)
    return min(max(room // expert_bytes(plan), 0), experts.count - 1)


def nvidia_gpu() -> torch.device:
    """The first GPU. Raises ModelError if torch has none."""
    if torch.version.hip is not None:
        raise ModelError(f"the CUDA engine needs an NVIDIA GPU, and this torch is built for AMD's; {INSTEAD}")
    if torch.version.cuda is None:
        raise ModelError(
            "the installed torch was built without CUDA; install one with it "
            "(https://pytorch.org), or use the CPU engine"
        )
    if not torch.cuda.is_available():
        raise ModelError(
            f"no usable NVIDIA GPU was found: it needs a driver for CUDA {torch.version.cuda}; "
            "check nvidia-smi, or use the CPU engine"
        )
    return torch.device("cuda", 0)


def gpu_target(device: torch.device, wanted: str = "auto") -> Target:
    """The compile target of this GPU. Raises as `target_for` does."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    room: int = getattr(properties, "shared_memory_per_block_optin", 0)  # missing in torch's stubs
    return target_for(capability, room, wanted)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gpu_report(
    spec: ModelSpec,
    precision: Precision = "bf16",
    kv_precision: KvPrecision = "bf16",
    stored: Formats | None = None,
    target: str = "auto",
    experts: ExpertPlacement = "auto",
    most: int | None = None,
) -> tuple[bool, str]:
    """Whether this machine's GPU suits a model, and one sentence about it. `stored`: the formats of precision
    "stored"; `experts` and `most`: as for `choose_resident`."""
    try:
        device = nvidia_gpu()
        kind = gpu_target(device, target)
        plan = Plan(spec, precision, multiprocessors(device), kv_precision, stored, kind)
        _ = plan.max_rows  # raises for a model that does not fit a multiprocessor
        free, total = torch.cuda.mem_get_info(device)
        plan = fit_plan(plan, experts, free, total, most=most)
    except KeystrokeError as error:
        return False, str(error)
    name = torch.cuda.get_device_name(device)
    if plan.resident is not None:
        return _report_of_placement(plan, plan.resident, free, total, name)
    return _report_of_fit(plan, free, total, name)


def _report_of_fit(plan: Plan, free: int, total: int, name: str) -> tuple[bool, str]:
    """The report of a model that the GPU holds whole."""
    spec, experts = plan.spec, plan.spec.experts
    need = weight_bytes(plan) + _least_prompt_room(plan, total) + _fewest_state_bytes(plan)
    sizes = f"{name}: {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    lack = f"{sizes}, but {spec.name} in {plan.precision} needs {need / 1e9:.0f} GB"
    advice = "choose fewer bits (model.precision) or a smaller model"
    if free < need:
        return False, f"{lack}; {advice}"
    try:
        tokens = _context_tokens(plan, free, total)
    except NotEnoughMemory:
        return False, f"{lack} and a context; {advice}"
    room = f"leaves room for {tokens:,} tokens of KV in {plan.kv_precision}"
    how = f"kernels for {plan.target.name}, up to {plan.max_rows} rows a step"
    whole = "" if experts is None else f" with all {experts.count} experts of each layer on the GPU"
    return True, f"{sizes}; {how}; {spec.name} in {plan.precision}{whole} {room}"


def _context_tokens(plan: Plan, free: int, total: int) -> int:
    """How many tokens of context fit beside the weights of a plan that is not loaded."""
    left = free - weight_bytes(plan)
    left -= plan.state_bytes(state_slots(plan, left, total))
    return kv_token_capacity(plan, left, total, context_bytes(plan))


def _report_of_placement(plan: Plan, resident: int, free: int, total: int, name: str) -> tuple[bool, str]:
    """The report of a mixture of which the host computes some experts."""
    spec, experts = plan.spec, plan.spec.experts
    assert experts is not None
    sizes = f"{name}: {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
    if free < (need := bytes_beside_experts(plan, total)):
        lack = f"{spec.name} needs {need / 1e9:.1f} GB even with all experts in host memory"
        return False, f"{sizes}, but {lack}; choose a smaller model"
    host = expert_bytes(plan) * (experts.count - resident)
    tokens = _context_tokens(replace(plan, resident=resident), free, total)
    return True, (
        f"{sizes}; {spec.name} in {plan.precision} runs with {resident} of {experts.count} experts of each "
        f"layer on the GPU and the others ({host / 1e9:.1f} GB) in host memory (engine.experts); there "
        f"is room for {tokens:,} tokens of KV in {plan.kv_precision}"
    )
