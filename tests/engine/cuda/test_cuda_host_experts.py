"""Experts in host memory: the kernel on the emulator, the real operators in real threads."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from bench.cuda_rows.cuda_parts import PUBLISHED_35B, QWEN3_CODER_30B
from cuda_emulator import EmulatedLauncher
from cuda_models import CPU
from test_cuda_experts import PROMPT, engine_for, last_logits, mixture, qwen3_moe, write_gguf
from test_cuda_hybrid import hybrid
from test_cuda_stored import MIXED, PROBE, in_file, mixed
from test_cuda_windows import gpt_oss
from torch import Tensor

from keystroke.config import load_settings
from keystroke.engine.base import StepRequest
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.checkpoint.spec import DeltaSpec, ExpertsSpec, ModelSpec, tensor_shapes
from keystroke.engine.cuda import engine as engine_module
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.gpu import (
    _report_of_fit,
    _report_of_placement,
    bytes_beside_experts,
    choose_resident,
    expert_bytes,
    fit_plan,
)
from keystroke.engine.cuda.plan import FOUR, FOUR_K, PAGE, Formats, KvPrecision, Plan
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.stored import Codes, typical_formats
from keystroke.engine.cuda.target import HOPPER, TARGETS, Target
from keystroke.engine.cuda.weights import HostExperts, build_weights, load_weights, place_experts, plan_of
from keystroke.engine.host_experts import ExpertLayer, ExpertStore, ExpertTable, expert_store
from keystroke.engine.onnx.native import operators_library
from keystroke.errors import EngineError, NotEnoughMemory, UnsupportedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from stored_models import random_blocks

SPEC = mixture(experts=ExpertsSpec(32, 4, 256), hidden=256, vocab_size=72, tied=False)
Given = dict[str, Tensor | Codes]
HYBRID_MIXED = replace(MIXED, delta_in=FOUR, delta_out=FOUR)


def kind_of(spec: ModelSpec, name: str) -> str:
    if spec.architecture == "gpt_oss":
        return "MXFP4" if ".experts." in name else "Q8_0"
    if spec.name == "published" and any(each in name for each in ("_attn", "shared_expert")):
        return "Q8_0"
    if spec.name == "published" and "down_proj" in name:
        return "Q5_K"
    return "Q8_0" if name.endswith("mlp.gate.weight") else mixed(name)


@cache
def model(spec: ModelSpec) -> tuple[dict[str, Tensor], Given]:
    truth, given = in_file(spec, lambda name: kind_of(spec, name))
    for name in given:
        if name.endswith("mlp.gate.weight"):  # files keep routers wide
            given[name] = truth[name].float()
    return truth, given


@pytest.fixture
def library() -> Path:
    found = operators_library(load_settings().paths.cache)  # compiled once for all tests
    if found is None:
        pytest.skip("needs a C compiler")
    return found


def store_of(spec: ModelSpec, library: Path) -> ExpertStore:
    """The experts of `model`, as a file holds them."""
    seeds = {name: seed for seed, name in enumerate(tensor_shapes(spec))}

    def table(layer: int, which: str) -> ExpertTable:
        name = f"model.layers.{layer}.mlp.experts.{which}_proj.weight"
        shape = tensor_shapes(spec)[name]
        kind = kind_of(spec, name)
        blocks = random_blocks(kind, shape[0], shape[1], deviation=shape[1] ** -0.5, seed=seeds[name])
        return ExpertTable(blocks, kind)

    def layer(index: int) -> ExpertLayer:
        gate, up, down = (table(index, which) for which in ("gate", "up", "down"))
        if spec.experts is None or not spec.experts.bias:
            return ExpertLayer(gate, up, down)
        at, truth = f"model.layers.{index}.mlp.experts", model(spec)[0]
        biases = (truth[f"{at}.{which}_proj.bias"].float().numpy() for which in ("gate", "up", "down"))
        return ExpertLayer(gate, up, down, tuple(biases))

    return ExpertStore(library, tuple(layer(index) for index in range(spec.layers)))


def engine_with(
    library: Path,
    resident: list[list[int]] | None,
    spec: ModelSpec = SPEC,
    *,
    formats: Formats = MIXED,
    single: bool = False,
    target: Target = HOPPER,
) -> CudaEngine:
    """An engine whose GPU holds the experts `resident`, by layer; None: all."""
    formats = typical_formats(spec) if spec.architecture == "gpt_oss" else formats
    plan = Plan(
        spec,
        "stored",
        2,
        stored=formats,
        resident=None if resident is None else len(resident[0]),
        target=target,
    )
    host = (
        None if resident is None else HostExperts(store_of(spec, library), [list(held) for held in resident])
    )
    weights = build_weights(plan, lambda name, _: model(spec)[1][name], CPU, host)
    launcher = EmulatedLauncher(plan)
    launcher.single = single
    return CudaEngine(weights, launcher, 2048)


SOME = [[1, 30, 7, 8, 9, 10, 11, 12, 13, 14, 15], [3, 4, 5, 6, 0, 1, 2, 20, 21, 22, 31]]
PLACEMENTS: dict[str, list[list[int]]] = {
    "all on the host": [[], []],
    "some on the GPU": SOME,
}


@pytest.mark.parametrize("resident", PLACEMENTS.values(), ids=PLACEMENTS)
def test_logits_are_those_of_the_stored_weights_alone_and_in_company(
    library: Path, resident: list[list[int]]
) -> None:
    with engine_with(library, resident) as engine:
        found = [last_logits(engine, PROMPT, rows) for rows in (1, 2, 9)]
        server = engine._stepper.experts
        assert server is not None
        assert server.counts()[1] > 0
    truth = forward(SPEC, model(SPEC)[0].__getitem__, PROMPT, torch.float64)[-1]
    assert (found[0] - truth).norm() / truth.norm() < 0.03
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_biases_and_clamped_gates_of_mxfp4_experts(library: Path) -> None:
    spec = gpt_oss(hidden=256, vocab_size=72, tied=False)
    placements: list[list[list[int]]] = [[[]] * 3, [[0, 5, 9, 31]] * 3]
    for resident in placements:
        with engine_with(library, resident, spec) as engine:
            alone, together = last_logits(engine, PROMPT, 1), last_logits(engine, PROMPT, 9)
        truth = forward(spec, model(spec)[0].__getitem__, PROMPT, torch.float64)[-1]
        assert torch.equal(alone, together)
        assert (alone - truth).norm() / truth.norm() < 0.03


@pytest.mark.parametrize("formats", [HYBRID_MIXED, PUBLISHED_35B], ids=["Q4_K_M", "shared expert in Q8_0"])
def test_a_hybrid_with_a_shared_expert(library: Path, formats: Formats) -> None:
    shared = ExpertsSpec(32, 4, 256, shared=256, shared_gate=True)
    delta = DeltaSpec(frozenset({0, 2}), 1, 2, 32, 128, 4)
    name = "published" if formats is PUBLISHED_35B else "mixed"
    spec = hybrid(name=name, experts=shared, delta=delta, hidden=256, vocab_size=72, tied=False)
    truth = forward(spec, model(spec)[0].__getitem__, PROMPT, torch.float64)[-1]
    placements: list[list[list[int]] | None] = [None, [[]] * 3, [[0, 5, 9, 31]] * 3]
    for resident in placements:
        with (
            engine_with(library, resident, spec, formats=formats) as engine,
            engine_with(library, resident, spec, formats=formats, single=True) as single,
            engine_with(library, resident, spec, formats=formats, target=TARGETS["sm_86"]) as older,
        ):
            assert bool(engine._stepper.plan.shared_apart) == (formats is PUBLISHED_35B)
            found = [last_logits(engine, PROMPT, 1), last_logits(engine, PROMPT, 4)]
            found += [last_logits(each, PROMPT, 1) for each in (single, older)]
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert (found[0] - truth).norm() / truth.norm() < 0.03


def test_the_kernel_for_one_row_and_older_gpus_compute_the_same(library: Path) -> None:
    with (
        engine_with(library, SOME) as engine,
        engine_with(library, SOME, single=True) as single,
        engine_with(library, SOME, target=TARGETS["sm_86"]) as older,
    ):
        found = last_logits(engine, PROMPT, 1)
        assert torch.equal(found, last_logits(single, PROMPT, 1))
        assert torch.equal(found, last_logits(older, PROMPT, 1))


def test_both_packings_of_q4_k_compute_the_same_beside_the_host(library: Path) -> None:
    compact = MIXED.compacted()
    assert compact.gate_up == FOUR_K
    found = []
    for formats in (MIXED, compact):
        with engine_with(library, SOME, formats=formats) as engine:
            found += [last_logits(engine, PROMPT, rows) for rows in (1, 9)]
            weights = engine._prefill._weights
            weights.place_expert(0, 0, 2)
            assert weights.host is not None
            engine._stepper.set_placement(weights.host)
            found.append(last_logits(engine, PROMPT, 2))
    assert torch.equal(found[0], found[1])
    for four, packed in zip(found[:3], found[3:], strict=True):
        assert torch.equal(four, packed)


def test_drafts_and_other_sessions_change_no_token(library: Path) -> None:
    with engine_with(library, SOME) as engine:

        def plain(prompt: list[int]) -> list[int]:
            with engine.session() as session:
                session.extend(prompt)
                return [token for _ in range(4) for token in session.step().tokens]

        prompts = [[5, 6, 7], [8, 9, 10, 11], [12]]
        alone = [plain(prompt) for prompt in prompts]
        with engine.session() as session:
            session.extend(prompts[0])
            drafted = list(session.step([*alone[0][:2], 0]).tokens)
            while len(drafted) < 4:
                drafted += session.step([0, 1]).tokens
        assert drafted[:4] == alone[0]
        sessions = [engine.session() for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.extend(prompt)
        steps = [engine.step_many([StepRequest(session) for session in sessions]) for _ in range(4)]
        assert [[step[i].tokens[0] for step in steps] for i in range(3)] == alone


@pytest.mark.parametrize("resident", PLACEMENTS.values(), ids=PLACEMENTS)
def test_a_prompt_that_is_read_at_once_gives_what_its_steps_give(
    library: Path, resident: list[list[int]]
) -> None:
    prompt, kept = [(7 * i * i + 3) % 72 for i in range(40)], []

    def keep(_: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        kept.append(values)
        return keys, values

    with engine_with(library, resident) as engine:
        assert engine.tail < len(prompt) <= engine.steps_up_to
        in_steps = [last_logits(engine, prompt, rows) for rows in (1, 5)]
        assert torch.equal(in_steps[0], in_steps[1])
        engine.steps_up_to = 0
        with engine.session(scope="read at once") as session:
            session.extend(prompt)
            session.read_appended()
            row = session.length - session.resident - 1
            session.step(sampling=PROBE)
            pages = list(session._table.pages)
            found = engine._stepper.logits[row].clone()
        values = engine._values.view(SPEC.layers, -1, SPEC.kv_heads, SPEC.head_dim, PAGE)[1, pages]
    truth = forward(SPEC, model(SPEC)[0].__getitem__, prompt, torch.float64, keep)[-1]
    for logits in (found, in_steps[0]):
        assert (logits - truth).norm() / truth.norm() < 0.03
    read = values.permute(0, 3, 1, 2).flatten(0, 1)[:39].double().flatten(1)
    each = (read - kept[1][:39].flatten(1)).norm(dim=1) / kept[1][:39].flatten(1).norm(dim=1)
    assert float(each.median()) < 0.02


def test_every_choice_of_an_expert_is_counted(library: Path) -> None:
    assert SPEC.experts is not None
    with engine_with(library, SOME) as engine:
        last_logits(engine, PROMPT, len(PROMPT))
        uses = engine._stepper.expert_uses
        assert uses is not None
        assert uses.sum(1).tolist() == [len(PROMPT) * SPEC.experts.top] * SPEC.layers


def test_numbers_that_are_not_finite_are_an_error(library: Path) -> None:
    with engine_with(library, PLACEMENTS["all on the host"]) as engine, engine.session() as session:
        host = engine._prefill._weights.host
        assert host is not None
        for layer in host.store.layers:
            layer.down.rows[:, :2] = 0x7C  # a scale that is no number
            layer.down.rows[:, -2:] = 0x7C
        session.extend(PROMPT)
        with pytest.raises(EngineError, match="not finite"):
            session.step()


def test_an_expert_moves_to_the_gpu(library: Path) -> None:
    """The GPU then computes what it would if the expert had been there from the beginning."""
    moved = [[2, *SOME[0][1:]], [*SOME[1][:-1], 18]]
    with engine_with(library, SOME) as engine, engine_with(library, moved) as other:
        weights = engine._prefill._weights
        weights.place_expert(0, 0, 2)
        weights.place_expert(1, len(SOME[1]) - 1, 18)
        assert weights.host is not None
        assert weights.host.resident == moved
        assert torch.equal(weights.layers, other._prefill._weights.layers)
        engine._stepper.set_placement(weights.host)
        assert torch.equal(last_logits(engine, PROMPT, 2), last_logits(other, PROMPT, 2))


def test_experts_used_often_are_on_the_gpu_in_the_next_turn(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_FOLLOW_AFTER", 1)
    prompt = [(7 * i * i + 3) % 72 for i in range(20)]
    with engine_with(library, SOME) as engine:
        host, uses = engine._prefill._weights.host, engine._stepper.expert_uses
        assert host is not None
        assert uses is not None
        for follows in (False, True):
            engine.follows_use, engine.steps_up_to = follows, 0
            uses[:] = 50
            uses[0, 2], uses[0, 9] = 100, 1
            with engine.session(scope=str(follows)) as session:
                session.extend(prompt)
                session.step()
            wanted = [2 if expert == 9 and follows else expert for expert in SOME[0]]
            assert host.resident == [wanted, SOME[1]]
        place = engine._stepper._buffers["placement"][0]
        assert (int(place[2]), int(place[9])) == (SOME[0].index(9), -1)


def plan_of_shape() -> Plan:
    spec = replace(SPEC, layers=48, hidden=2048, experts=ExpertsSpec(128, 8, 768), context_length=65_536)
    return Plan(spec, "stored", 132, stored=MIXED)


def test_as_many_experts_as_fit_are_on_the_gpu() -> None:
    plan = plan_of_shape()
    sizes = [choose_resident(plan, "auto", size << 30, size << 30) for size in (6, 8, 12, 16, 48)]
    assert sizes[-1] is None
    fewer = [size for size in sizes if size is not None]
    assert len(fewer) == 4
    assert fewer == sorted(fewer)
    each, held = expert_bytes(plan), choose_resident(plan, "auto", 16 << 30, 16 << 30)
    assert held is not None
    assert bytes_beside_experts(plan, 16 << 30) + held * each <= 16 << 30
    assert choose_resident(plan, "auto", 48 << 30, 48 << 30, most=10 * each) == 10
    assert choose_resident(plan, "host", 48 << 30, 48 << 30) == 0
    assert choose_resident(plan, "gpu", 48 << 30, 48 << 30) is None
    with pytest.raises(NotEnoughMemory, match=r"need 1\d\.\d GB more GPU memory; set engine.experts to auto"):
        choose_resident(plan, "gpu", 8 << 30, 8 << 30)
    fits, sentence = _report_of_placement(plan, held, 16 << 30, 16 << 30, "a GPU")
    assert fits
    assert f"runs with {held} of 128 experts of each layer on the GPU and the others (" in sentence
    assert not _report_of_placement(plan, 0, 2 << 30, 16 << 30, "a GPU")[0]
    dense = Plan(replace(SPEC, experts=None, architecture="qwen3"), "bf16", 2)
    assert choose_resident(dense, "host", 8 << 30, 8 << 30) is None


def coder_30b(kv_precision: KvPrecision = "bf16") -> Plan:
    spec = replace(QWEN3_CODER_30B, context_length=262_144)
    return Plan(spec, "stored", 128, kv_precision, typical_formats(spec), TARGETS["sm_89"])


def left_by_driver(mebibytes: int) -> tuple[int, int]:
    """Free and total memory of a card."""
    return (mebibytes << 20) - 500_000_000, mebibytes << 20


@pytest.mark.parametrize(
    ("mebibytes", "kv_precision", "gate_up"),
    [(24_564, "bf16", FOUR_K), (24_564, "int8", FOUR), (32_607, "bf16", FOUR)],
)
def test_a_card_of_24_gb_holds_all_experts_of_coder_30b_and_32k_tokens(
    mebibytes: int, kv_precision: KvPrecision, gate_up: int
) -> None:
    """In the faster packing where that leaves room for as many tokens."""
    free, total = left_by_driver(mebibytes)
    plan = fit_plan(coder_30b(kv_precision), "auto", free, total)
    assert (plan.gate_up.format, plan.resident) == (gate_up, None)
    fits, sentence = _report_of_fit(plan, free, total, "a GPU")
    assert fits
    assert "with all 128 experts of each layer on the GPU" in sentence
    assert int(sentence.split(" tokens of KV")[0].split()[-1].replace(",", "")) >= 32_768


def test_the_smaller_packing_holds_more_experts_where_not_all_fit() -> None:
    free, total = left_by_driver(16_384)
    plan = coder_30b()
    fitted = fit_plan(plan, "auto", free, total)
    four = choose_resident(plan, "auto", free, total)
    assert four is not None
    assert fitted.gate_up.format == FOUR_K
    assert fitted.resident is not None
    assert fitted.resident > four
    assert fit_plan(plan, "host", free, total) == replace(plan, resident=0)
    with pytest.raises(NotEnoughMemory):
        fit_plan(plan, "gpu", free, total)
    most = expert_bytes(replace(plan, stored=fitted.stored)) * 128
    assert fit_plan(plan, "auto", 80 << 30, 80 << 30, most=most).gate_up.format == FOUR_K
    assert fit_plan(plan, "auto", 80 << 30, 80 << 30) == plan


def test_a_file_is_used_in_place(library: Path, tmp_path: Path) -> None:
    """Numbers of 32 bits on the host, bf16 on the GPU; nearly what the GPU alone computes."""
    model_of = qwen3_moe()
    model_of.to(torch.bfloat16).save_pretrained(tmp_path / "folder")
    with open_checkpoint(tmp_path / "folder") as folder:
        write_gguf(tmp_path / "model.gguf", model_of, folder)
        with pytest.raises(UnsupportedModel, match="use a GGUF file"):
            expert_store(folder, load_settings().paths.cache)
    with open_checkpoint(tmp_path / "model.gguf") as file:
        plan = replace(plan_of(file, "bf16", 2), resident=3)
        host = place_experts(plan, expert_store(file, load_settings().paths.cache), tmp_path / "profile.npy")
        weights = load_weights(file, plan, CPU, host)
        with engine_for(file) as whole:
            wanted = last_logits(whole, PROMPT, 1)
    with CudaEngine(weights, EmulatedLauncher(plan), 1024) as engine:
        found = last_logits(engine, PROMPT, 1)
    assert (found - wanted).norm() / wanted.norm() < 0.01
    assert place_experts(plan, host.store, tmp_path / "profile.npy").resident != host.resident
