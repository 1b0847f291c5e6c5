"""Other GPUs than Hopper: neither how bytes come into shared memory nor how much there is changes results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.cuda_rows.cuda_parts import (
    GPT_OSS_20B,
    MELLUM2,
    QWEN3_CODER_30B,
    QWEN_27B_HYBRID,
    QWEN_35B_HYBRID,
)
from cuda_models import tiny_engine, tiny_spec, tiny_tensors
from torch import Tensor

from keystroke.engine.base import Interrupt, Sampling
from keystroke.engine.checkpoint.spec import ModelSpec, RopeSpec
from keystroke.engine.cuda.draft import has_room
from keystroke.engine.cuda.driver import PREFILL_PARTS, compile_kernel, known_architectures
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.gpu import choose_resident, context_bytes, kv_token_capacity, state_slots
from keystroke.engine.cuda.plan import BLOCK_BYTES, INT4, MAX_BATCH, TAIL_BYTES, WARPS, Plan, Precision
from keystroke.engine.cuda.prefill import WORK, operations_per_portion, portion_size
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.sparse import supports_sparse
from keystroke.engine.cuda.stored import typical_formats
from keystroke.engine.cuda.target import AMPERE, HOPPER, TARGETS, nearest_supported, target_for
from keystroke.engine.speculative.head_file import HeadConfig
from keystroke.errors import ConfigError, Interrupted, ModelError, NotEnoughMemory

PROBE = Sampling(logprobs=0)
BY_LANES = replace(AMPERE, shared_bytes=HOPPER.shared_bytes)  # everything as on Hopper but the copies
GEFORCE = TARGETS["sm_86"]


def text(length: int) -> list[int]:
    return [(11 * i * i + 3 * i) % 203 for i in range(length)]


def rows_of(engine: CudaEngine, length: int, drafted: int) -> Tensor:
    """Logits of a draft's rows, of one row behind them, and of one in a session beside."""
    prompt = text(length)
    with engine.session() as session, engine.session() as other:
        session.extend(prompt[: length - drafted])
        session.step(prompt[length - drafted :], sampling=PROBE)
        found = [engine._stepper.logits[: drafted + 1].clone()]
        session.extend(prompt)
        session.step(sampling=PROBE)
        found.append(engine._stepper.logits[:1].clone())
        other.extend(prompt[:70])
        other.step(sampling=PROBE)
        found.append(engine._stepper.logits[:1].clone())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("family", "precision", "length", "drafted"),
    [("qwen2", "bf16", 200, 3), ("qwen3", "int4", 2500, 2)],
    ids=["sent queries", "far keys"],
)
def test_copies_by_the_lanes_of_a_warp_give_the_bits_of_bulk_copies(
    family: str, precision: Precision, length: int, drafted: int
) -> None:
    spec, found = tiny_spec(family, context=2600), []
    for target in (HOPPER, BY_LANES):
        with tiny_engine(spec, precision, target=target) as engine:
            found.append(rows_of(engine, length, drafted))
    assert torch.equal(*found)


def test_sparse_attention_chooses_the_same_by_lanes() -> None:
    spec, found = tiny_spec(context=3000), []
    for target in (HOPPER, BY_LANES):
        with tiny_engine(spec, sparse="always", target=target) as engine:
            engine.sparse_from, engine.sparse_budget = 64, 6
            found.append(rows_of(engine, 2500, 2))
            assert engine.sparse_steps
    assert torch.equal(*found)


def test_pages_that_a_small_ring_cannot_hold_give_the_same_bits() -> None:
    spec = replace(tiny_spec(context=2600), head_dim=128)
    plan = Plan(spec, "bf16", 2, target=GEFORCE)
    assert plan.stage_bytes(1) < 64 * 128 * 2  # a page of keys
    found = []
    for target in (HOPPER, GEFORCE):
        with tiny_engine(spec, target=target) as engine:
            found.append(torch.cat((rows_of(engine, 150, 2), rows_of(engine, 2500, 2))))
    assert torch.equal(*found)
    truth = forward(spec, tiny_tensors(spec).__getitem__, text(2500))[-1]
    assert (found[1][-2] - truth).norm() / truth.norm() < 0.02


def test_the_contract_holds_by_lanes() -> None:
    """Sampled text with and without drafts, forks, rollbacks and interrupts."""
    spec, prompt = tiny_spec(), text(90)
    warm = Sampling(temperature=0.9, seed=3, top_p=0.95)

    def say(engine: CudaEngine) -> list[int]:
        with engine.session() as session:
            session.extend(prompt)
            return [session.step(sampling=warm).tokens[0] for _ in range(6)]

    with tiny_engine(spec) as engine:
        expected = say(engine)
    with tiny_engine(spec, target=BY_LANES) as engine, engine.session() as session:
        assert say(engine) == expected
        stopped = Interrupt()
        stopped.set()
        with pytest.raises(Interrupted):
            session.extend(prompt, stopped)
        session.extend(prompt)
        step = session.step([*expected[:2], (expected[2] + 1) % 203], sampling=warm)
        assert (list(step.tokens), step.accepted) == (expected[:3], 2)
        with session.fork() as other:
            assert list(other.step(sampling=warm).tokens) == [expected[3]]
        session.rollback(len(prompt) + 1)
        assert list(session.step(sampling=warm).tokens) == [expected[1]]


# Plans


def shape(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, head_dim: int) -> ModelSpec:
    return replace(
        tiny_spec("llama"),
        name=f"{hidden} wide",
        vocab_size=151_936,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        head_dim=head_dim,
        rope=RopeSpec(1e6),
        context_length=32_768,
    )


HALF = shape(896, 24, 14, 2, 4864, 64)  # Qwen2.5-0.5B
CODER = shape(1536, 28, 12, 2, 8960, 128)  # 1.5B
THREE = shape(2048, 36, 16, 2, 11_008, 128)
SEVEN = shape(3584, 28, 28, 4, 18_944, 128)
FOURTEEN = shape(5120, 48, 40, 8, 13_824, 128)
MULTIPROCESSORS = {"sm_80": 108, "sm_86": 28, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170}


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "stored"])
@pytest.mark.parametrize("name", TARGETS)
def test_every_size_of_model_fits_every_kind_of_gpu(name: str, precision: Precision) -> None:
    target = TARGETS[name]
    for spec, fewest in ((HALF, 8), (CODER, 8), (THREE, 8), (SEVEN, 4), (FOURTEEN, 4)):
        stored = typical_formats(spec) if precision == "stored" else None
        plan = Plan(spec, precision, MULTIPROCESSORS[name], "bf16", stored, target)
        assert plan.max_rows >= fewest
        for bucket in plan.buckets:
            stage = plan.stage_bytes(bucket.tiles_n)
            assert bucket.ring_offset + bucket.stages * stage <= target.shared_bytes
            holds_pages = stage >= 64 * spec.head_dim * 2
            assert bucket.stages >= (3 if holds_pages else 2)
            for matrix in (
                *plan.layer(0).values(),
                plan.head,
            ):  # whole units, or a part of one for every warp
                even = plan.formats.query_key >= INT4 and plan.macros(1)["SMALL_GRAIN"] == "0"
                part = WARPS * (1 + even) * BLOCK_BYTES[matrix.format] + TAIL_BYTES
                assert stage >= min(matrix.unit_bytes, part)
        sums = 1 + spec.layers * (plan.output.split + plan.down.split)
        assert sums < 1 << 12  # kernels/layout.cuh counts them in so many bits
        assert supports_sparse(plan) == plan.ring_fits_sparse


MIXTURES_AND_HYBRIDS = (QWEN3_CODER_30B, GPT_OSS_20B, MELLUM2, QWEN_35B_HYBRID, QWEN_27B_HYBRID)


@pytest.mark.parametrize("spec", MIXTURES_AND_HYBRIDS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("name", TARGETS)
def test_mixtures_and_hybrids_fit_every_kind_of_gpu(name: str, spec: ModelSpec) -> None:
    target = TARGETS[name]
    plan = Plan(spec, "stored", MULTIPROCESSORS[name], "bf16", typical_formats(spec), target)
    for bucket in plan.buckets:
        assert bucket.ring_offset + bucket.stages * plan.stage_bytes(bucket.tiles_n) <= target.shared_bytes


def test_blackwell_with_hoppers_memory_is_cut_as_hopper_is() -> None:
    for precision in ("bf16", "int8", "int4"):
        plans = [Plan(CODER, precision, 132, target=target) for target in (HOPPER, TARGETS["sm_100"])]
        assert plans[0].buckets == plans[1].buckets
        assert plans[0].macros(1, sparse=True) == plans[1].macros(1, sparse=True)


def test_a_draft_head_that_does_not_fit_is_left_out() -> None:
    head = HeadConfig("coder", 151_936, 1536, 12, 2, 128, 5120, 16_384, (2, 14, 25), 1e-6)
    fits = {name: has_room(head, CODER, MULTIPROCESSORS[name], target) for name, target in TARGETS.items()}
    assert fits == {name: target.shared_bytes == HOPPER.shared_bytes for name, target in TARGETS.items()}


def test_a_smaller_gpu_reads_prompts_in_smaller_portions() -> None:
    large = Plan(SEVEN, "int4", 132)
    assert operations_per_portion(large) == WORK
    assert portion_size(SEVEN, 0, 8192, operations_per_portion(large)) == portion_size(SEVEN, 0, 8192) == 4096
    small = Plan(SEVEN, "int4", 28, target=GEFORCE)
    assert portion_size(SEVEN, 0, 8192, operations_per_portion(small)) == 512


@pytest.mark.parametrize(
    ("total", "spec", "precision", "tokens"),
    [
        (12, CODER, "bf16", 200_000),  # an RTX 3060
        (12, SEVEN, "int4", 60_000),
        (24, SEVEN, "bf16", 64_000),  # an RTX 4090
        (24, FOURTEEN, "int8", 9_000),
        (80, FOURTEEN, "bf16", 200_000),  # an A100
    ],
)
def test_the_context_takes_what_weights_and_prompts_leave(
    total: int, spec: ModelSpec, precision: Precision, tokens: int
) -> None:
    plan, memory = Plan(spec, precision, 108, target=AMPERE), total << 30
    left = memory - plan.streamed_bytes - spec.vocab_size * spec.hidden * 2
    assert kv_token_capacity(plan, left, memory, plan.kv_bytes_per_token) >= tokens
    bytewise = Plan(spec, precision, 108, "int8", target=AMPERE)
    most = 16 * spec.context_length
    assert kv_token_capacity(bytewise, left, memory, bytewise.kv_bytes_per_token) >= min(2 * tokens, most)


@pytest.mark.parametrize("size", [12, 16, 24, 32, 80])
def test_recurrent_states_leave_room_for_a_context(size: int) -> None:
    """With fewer slots where memory is scarce; the experts that then do not fit are on the host."""
    memory = size << 30
    plan = Plan(QWEN_35B_HYBRID, "stored", 84, "bf16", typical_formats(QWEN_35B_HYBRID), TARGETS["sm_89"])
    resident = choose_resident(plan, "auto", memory, memory)
    assert (resident is None) == (size >= 32)
    plan = replace(plan, resident=resident)
    left = memory - plan.packed_bytes - plan.spec.vocab_size * plan.spec.hidden * 2
    slots = state_slots(plan, left, memory)
    assert plan.max_rows <= slots <= MAX_BATCH
    assert (slots == MAX_BATCH) == (size == 80)
    left -= plan.state_bytes(slots)
    assert kv_token_capacity(plan, left, memory, context_bytes(plan)) >= 16_384


def test_a_model_that_leaves_no_room_is_refused_in_a_sentence() -> None:
    plan, memory = Plan(SEVEN, "bf16", 28, target=GEFORCE), 16 << 30
    left = memory - plan.streamed_bytes - SEVEN.vocab_size * SEVEN.hidden * 2
    with pytest.raises(NotEnoughMemory, match=r"bf16 leaves .* 17 GB.*fewer bits \(model\.precision\)"):
        kv_token_capacity(plan, left, memory, plan.kv_bytes_per_token)


# Which kind


def test_a_gpu_is_compiled_for_as_what_it_is() -> None:
    for target in TARGETS.values():
        assert target_for(target.capability, target.shared_bytes) == target


@pytest.mark.parametrize(
    ("capability", "name"), [((8, 7), "sm_86"), ((10, 3), "sm_100"), ((12, 1), "sm_120"), ((13, 0), "sm_120")]
)
def test_a_gpu_between_the_known_ones_gets_portable_code(capability: tuple[int, int], name: str) -> None:
    found = target_for(capability, 150_000)
    assert (found.name, found.portable, found.shared_bytes) == (name, True, 150_000)


def test_hopper_can_be_run_as_an_older_kind() -> None:
    assert target_for((9, 0), 232_448, "sm_80") == replace(AMPERE, portable=True)
    assert target_for((9, 0), 232_448, "sm_90") == HOPPER
    with pytest.raises(ConfigError, match=r"sm_100.*compute capability 9\.0.*auto"):
        target_for((9, 0), 232_448, "sm_100")
    with pytest.raises(ConfigError, match="none of auto, sm_80"):
        target_for((9, 0), 232_448, "hopper")


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_an_older_gpu_is_told_what_to_use_instead(capability: tuple[int, int]) -> None:
    with pytest.raises(ModelError, match=r"8\.0 \(Ampere.*embedded engine.*base_url"):
        target_for(capability, 65_536)


def test_an_older_compiler_makes_portable_code_of_what_it_knows() -> None:
    assert nearest_supported(TARGETS["sm_120"], [75, 80, 86, 89, 90]) == replace(
        TARGETS["sm_120"], name="sm_90", portable=True
    )
    assert nearest_supported(HOPPER, [80, 86, 90]) == HOPPER
    with pytest.raises(ModelError, match="newer"):
        nearest_supported(HOPPER, [60, 70])


# Compiled

VARIANTS: list[tuple[str, Precision, bool]] = [
    *((name, "bf16", False) for name in TARGETS),
    ("sm_80", "int4", True),
    ("sm_86", "stored", False),
]


def compiler() -> list[int]:
    try:
        return known_architectures()
    except ModelError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("name", "precision", "sparse"), VARIANTS)
def test_kernels_compile_for_every_kind(
    name: str, precision: Precision, sparse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if int(name.removeprefix("sm_")) not in compiler():
        pytest.skip(f"the compiler found here does not know {name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = TARGETS[name]
    stored = typical_formats(CODER) if precision == "stored" else None
    plan = Plan(CODER, precision, MULTIPROCESSORS[name], stored=stored, target=target)
    assert compile_kernel(plan.macros(1, sparse), target=target).startswith(b"\x7fELF")
    assert compile_kernel(plan.prefill_macros(2), PREFILL_PARTS, target).startswith(b"\x7fELF")


def test_hopper_run_as_ampere_gets_ptx_without_bulk_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = target_for((9, 0), HOPPER.shared_bytes, "sm_80")
    code = compile_kernel(Plan(tiny_spec(), "bf16", 132, target=target).macros(1), target=target)
    assert b".target sm_80" in code
    assert b"cp.async.mbarrier.arrive.noinc" in code
    assert b"cp.async.bulk" not in code
