"""Weights as a file stores them, multiplied by the kernel: against float64 of those very weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cuda_emulator import EmulatedLauncher
from cuda_models import CPU, tiny_spec, tiny_tensors
from torch import Tensor

from keystroke.engine.base import Sampling
from keystroke.engine.checkpoint.spec import EMBEDDING, HEAD, ExpertsSpec, ModelSpec, tensor_shapes
from keystroke.engine.cuda.code_packing import shift_zero
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.packing import pack, plain_order, row_positions, unpack
from keystroke.engine.cuda.plan import (
    EIGHT,
    EIGHT_OFFSET,
    FOUR,
    FOUR_K,
    PAGE,
    SIX,
    SIX_OFFSET,
    TAIL_BYTES,
    Formats,
    Matrix,
    Plan,
    Precision,
)
from keystroke.engine.cuda.prefill import Prefill
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.stored import Codes, choose_precision, format_for, read_codes, typical_formats
from keystroke.engine.cuda.target import HOPPER, TARGETS, Target
from keystroke.engine.cuda.weights import _orders, build_weights, random_weights
from keystroke.errors import UnsupportedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from stored_models import KINDS, random_blocks, widened

PROBE = Sampling(logprobs=0)
Choice = Callable[[str], str]  # the type of a matrix by its name


def in_file(spec: ModelSpec, kind_of: Choice) -> tuple[dict[str, Tensor], dict[str, Tensor | Codes]]:
    """A tiny model whose matrices are random blocks: what they stand for, and what a source gives."""
    truth: dict[str, Tensor] = {}
    given: dict[str, Tensor | Codes] = {}
    for seed, (name, shape) in enumerate(tensor_shapes(spec).items()):
        if len(shape) != 2 or shape[1] % 32:
            truth[name] = given[name] = tiny_tensors(spec)[name].float()
            continue
        kind = kind_of(name)
        blocks = random_blocks(kind, *shape, deviation=shape[1] ** -0.5, seed=seed)
        truth[name] = torch.from_numpy(widened(kind, blocks))
        given[name] = read_codes(torch.from_numpy(blocks), kind)
    truth[EMBEDDING] = truth[EMBEDDING].to(torch.bfloat16).double()  # what is looked up, the engine keeps so
    return truth, given


def mixed(name: str) -> str:
    """As files of four bits are made: more bits for the head and, in some layers, for V and down."""
    more = name == HEAD or (".1." in name and ("v_proj" in name or "down_proj" in name))
    return "Q6_K" if more else "Q4_K"


MIXED = Formats(
    *(FOUR, SIX_OFFSET, FOUR, FOUR, FOUR, SIX),
    wide=SIX,
    wide_layers=frozenset({1}),
    all_q4_k=frozenset({"gate_up", "down"}),
)


def engine_of(
    spec: ModelSpec, formats: Formats, given: dict[str, Tensor | Codes], target: Target = HOPPER
) -> CudaEngine:
    plan = Plan(spec, "stored", 2, stored=formats, target=target)
    weights = build_weights(plan, lambda name, _: given[name], CPU)
    return CudaEngine(weights, EmulatedLauncher(weights.plan), 2048)


PACKED_KINDS = tuple(kind for kind in KINDS if format_for({kind}) is not None)


def test_the_formats_that_are_packed() -> None:
    assert PACKED_KINDS == ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_codes_stand_for_what_the_file_means(kind: str) -> None:
    blocks = random_blocks(kind, 5, 512)
    assert torch.equal(
        read_codes(torch.from_numpy(blocks), kind).weights().double(), torch.from_numpy(widened(kind, blocks))
    )


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "packed"),
    [
        *((kind, format_for({kind})) for kind in PACKED_KINDS),
        ("Q4_K", SIX_OFFSET),
        ("Q4_K", FOUR_K),
        ("Q6_K", EIGHT),
        ("Q5_K", EIGHT_OFFSET),
    ],
)
def test_packed_codes_come_back_rounded_once(kind: str, packed: int, split: int) -> None:
    """Parts of 128 columns are half of what two numbers of a Q4_K row stand for."""
    columns = 1024 if packed == FOUR_K else 512
    blocks = random_blocks(kind, 32, columns)
    truth = torch.from_numpy(widened(kind, blocks)).float()
    matrix = Matrix(2, split, columns // split, packed)
    body = pack(shift_zero(read_codes(torch.from_numpy(blocks), kind), packed), None, plain_order(32), matrix)
    assert body.numel() == matrix.bytes
    found = unpack(body, None, matrix, 32)
    assert found.dtype == torch.bfloat16
    # bf16 alone may be off by 2**-8 of a weight; the kernel's 11 bits add 2**-9 of the group's largest.
    room = truth.abs() * 2**-8 + truth.abs().view(32, -1, 16).amax(2).repeat_interleave(16, 1) * 2**-9
    assert bool(((found.float() - truth).abs() <= room).all())


@pytest.mark.parametrize("split", [1, 2])
def test_both_packings_of_q4_k_have_the_same_weights_and_factors(split: int) -> None:
    blocks = random_blocks("Q4_K", 32, 1024).reshape(32, 4, -1)
    blocks[0] = 0
    blocks[1, 1, 4:16] = 0  # neither scales nor minima
    blocks[2, 2, :2] = 0  # nothing but minima
    blocks[9, 3, 2:4] = 0  # no minima
    codes = read_codes(torch.from_numpy(blocks.reshape(32, -1)), "Q4_K")
    found = []
    for kind in (FOUR, FOUR_K):
        matrix = Matrix(2, split, 1024 // split, kind)
        body = pack(codes, None, plain_order(32), matrix)
        assert body.numel() == matrix.bytes
        found.append((unpack(body, None, matrix, 32), body.view(matrix.units, -1)[:, -TAIL_BYTES:]))
    for four, compact in zip(*found, strict=True):
        assert torch.equal(four, compact)


# Units of 24 blocks: with small shared memory they are divided into parts.
WIDE = replace(tiny_spec("qwen2", tied=False), hidden=1536, intermediate=768, vocab_size=72)
MIXTURE = replace(
    tiny_spec("qwen3", tied=False),
    architecture="qwen3_moe",
    hidden=512,
    vocab_size=72,
    experts=ExpertsSpec(32, 2, 768),
)


@pytest.mark.parametrize(
    ("spec", "target", "single"),
    [(WIDE, "sm_90", False), (WIDE, "sm_86", False), (MIXTURE, "sm_90", True), (MIXTURE, "sm_86", False)],
    ids=["dense", "dense on sm_86", "mixture, one row", "mixture on sm_86"],
)
def test_both_packings_of_q4_k_give_the_same_logits(spec: ModelSpec, target: str, single: bool) -> None:
    truth, given = in_file(spec, lambda name: "Q8_0" if name.endswith("mlp.gate.weight") else mixed(name))
    given |= {name: truth[name].float() for name in given if name.endswith("mlp.gate.weight")}
    prompt, found = [1, 2, 3, 4, 5, 6, 7, 8, 9], []
    for formats in (MIXED, MIXED.compacted()):
        with engine_of(spec, formats, given, TARGETS[target]) as engine:
            plan, launcher = engine._stepper.plan, engine._stepper._launcher
            assert plan.gate_up.format == (FOUR if formats is MIXED else FOUR_K)
            assert isinstance(launcher, EmulatedLauncher)
            launcher.single = single
            for rows in (1, min(9, plan.max_rows)):
                with engine.session() as session:
                    if rows < len(prompt):
                        session.extend(prompt[:-rows])
                        session.step(sampling=PROBE)
                    session.extend(prompt)
                    session.step(sampling=PROBE)
                    found.append(engine._stepper.logits[rows - 1].clone())
    assert all(torch.equal(found[0], other) for other in found[1:])


class SharedMemory:
    """Unpacks as a GPU does: the next matrix of the feed-forward part overwrites the last."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._last = torch.empty(0)

    def unpack(self, name: str, packed: Tensor, matrix: Matrix, rows: int, folded: Tensor | None) -> Tensor:
        found = unpack(packed, row_positions(_orders(self._plan)[name], rows), matrix, rows, folded)
        if name in ("gate_up", "down"):
            self._last.fill_(float("nan"))
            self._last = found
        return found


def test_prefill_needs_one_matrix_of_the_feed_forward_part_at_a_time() -> None:
    truth, given = in_file(MIXTURE, lambda name: "Q8_0" if name.endswith("mlp.gate.weight") else mixed(name))
    given |= {name: truth[name].float() for name in given if name.endswith("mlp.gate.weight")}
    weights = build_weights(Plan(MIXTURE, "stored", 2, stored=MIXED), lambda name, _: given[name], CPU)
    pages = (MIXTURE.layers, 2, MIXTURE.kv_heads, PAGE, MIXTURE.head_dim)
    found = []
    for unpacker in (None, SharedMemory(weights.plan)):
        weights.unpacker = unpacker
        keys = torch.zeros(pages, dtype=torch.bfloat16)
        Prefill(weights, keys, torch.zeros_like(keys).transpose(-1, -2).contiguous()).run(
            [*range(40)], 0, [0]
        )
        found.append(keys)
    assert torch.equal(found[0], found[1])
    with torch.inference_mode():
        assert not weights.dense(0).gate_up.isnan().any()


def test_logits_are_those_of_the_stored_weights() -> None:
    spec = replace(tiny_spec("qwen2", tied=False), hidden=256, intermediate=512, vocab_size=72)
    truth, given = in_file(spec, mixed)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with engine_of(spec, MIXED, given) as engine:
        with engine.session() as session:
            session.extend(prompt)
            session.step(sampling=PROBE)
            together = engine._stepper.logits[8].clone()
        with engine.session() as session:
            session.extend(prompt[:8])
            session.step(sampling=PROBE)
            session.extend(prompt)
            session.step(sampling=PROBE)
            alone = engine._stepper.logits[0].clone()
    assert torch.equal(alone, together)
    exact = forward(spec, truth.__getitem__, prompt, torch.float64)[-1]
    assert (alone - exact).norm() / exact.norm() < 0.006  # bf16 keys and values are most of it


def test_every_format_is_multiplied_as_stored() -> None:
    spec = replace(tiny_spec("llama", layers=1, tied=False), hidden=256, intermediate=512, vocab_size=72)
    kinds = {"q_proj": "Q5_K", "k_proj": "Q6_K", "v_proj": "Q4_1", "o_proj": "Q8_0", "down_proj": "Q5_0"}
    truth, given = in_file(spec, lambda name: kinds.get(name.split(".")[-2], "Q5_1"))
    formats = Formats(SIX_OFFSET, EIGHT_OFFSET, EIGHT, SIX_OFFSET, SIX, EIGHT_OFFSET, wide=SIX)
    with engine_of(spec, formats, given) as engine, engine.session() as session:
        session.extend([1, 2, 3])
        session.step(sampling=PROBE)
        logits = engine._stepper.logits[2].clone()
    exact = forward(spec, truth.__getitem__, [1, 2, 3], torch.float64)[-1]
    assert (logits - exact).norm() / exact.norm() < 0.006


def test_types_choose_the_narrowest_format_that_holds_them() -> None:
    assert format_for({"Q4_K"}) == FOUR
    assert format_for({"Q6_K"}) == SIX
    assert format_for({"Q4_K", "Q6_K"}) == SIX_OFFSET
    assert format_for({"Q8_0", "Q6_K"}) == EIGHT
    assert format_for({"Q8_0", "Q4_K"}) == EIGHT_OFFSET
    assert format_for({"Q4_K", "F16"}) is None


class Stored:
    """A checkpoint that says only what its matrices are stored as."""

    def __init__(self, kind_of: Choice, experts: ExpertsSpec | None = None) -> None:
        self.spec = replace(tiny_spec("qwen2", layers=2, tied=False), experts=experts)
        self.storage = kind_of


def test_auto_keeps_files_of_four_bits_and_widens_others() -> None:
    assert choose_precision(Stored(mixed), "auto") == ("stored", MIXED)  # type: ignore[arg-type]
    assert choose_precision(Stored(lambda _: "Q8_0"), "auto") == ("bf16", None)  # type: ignore[arg-type]
    assert choose_precision(Stored(lambda _: "F16"), "auto") == ("bf16", None)  # type: ignore[arg-type]
    assert choose_precision(Stored(mixed), "int8") == ("int8", None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModel, match=r"set model\.precision to int8"):
        choose_precision(Stored(lambda _: "BF16"), "stored")  # type: ignore[arg-type]


def test_mixtures_stay_as_stored_with_a_shared_expert_of_its_own_types() -> None:
    experts = ExpertsSpec(32, 4, 256, shared=256, shared_gate=True)

    def choice(kind_of: Choice) -> tuple[Precision, Formats | None]:
        return choose_precision(Stored(kind_of, experts), "auto")  # type: ignore[arg-type]

    def shared(kind: str, part: str = "shared_expert") -> Choice:
        return lambda name: kind if part in name else mixed(name)

    assert choice(mixed) == ("stored", MIXED)
    some = replace(MIXED, all_q4_k=frozenset({"down"}))
    assert choice(lambda name: "Q4_0" if ".0.mlp.experts.up" in name else mixed(name)) == ("stored", some)
    assert (some.compacted().gate_up, some.compacted().down) == (FOUR, FOUR_K)
    assert some.compacted().wide == SIX
    assert choice(shared("Q8_0")) == ("stored", replace(MIXED, shared_gate_up=EIGHT, shared_down=EIGHT))
    apart = replace(MIXED, shared_gate_up=FOUR, shared_down=SIX)
    assert choice(shared("Q6_K", "shared_expert.down")) == ("stored", apart)
    assert choice(shared("F16")) == ("bf16", None)
    eight = choice(lambda _: "Q8_0")[1]
    assert eight is not None
    assert (eight.gate_up, eight.shared_gate_up) == (EIGHT, None)


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "intermediate"), [(1536, 12, 2, 8960), (3584, 28, 4, 18944)]
)
def test_plans_of_stored_weights_fit_shared_memory(
    hidden: int, heads: int, kv_heads: int, intermediate: int
) -> None:
    spec = replace(
        tiny_spec(layers=28),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate=intermediate,
    )
    plan = Plan(spec, "stored", 132, stored=typical_formats(spec))
    assert plan.max_rows >= 16
    assert plan.stage_bytes(1) >= plan.gate_up.unit_bytes  # parts of it cost more than stages
    for bucket in plan.buckets:
        assert bucket.ring_offset + bucket.stages * plan.stage_bytes(bucket.tiles_n) <= HOPPER.shared_bytes


def test_random_codes_of_the_usual_formats_make_a_model() -> None:
    spec = replace(tiny_spec("qwen2", tied=True), hidden=256, intermediate=512, vocab_size=72)
    weights = random_weights(spec, "stored", CPU, 2)
    compact = random_weights(spec, "stored", CPU, 2, stored=typical_formats(spec).compacted())
    assert weights.plan.layer(0)["down"].format == SIX
    assert compact.plan.gate_up.format == FOUR_K
    assert torch.equal(weights.dense(1).gate_up, compact.dense(1).gate_up)
    for layer in range(spec.layers):
        down = weights.dense(layer).down.float()
        assert 0.5 < float(down.std()) * 512**0.5 < 2
