"""Kernels for steps of a single row: the bits of the kernel for any number of rows, on the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_emulator import EmulatedLauncher
from cuda_models import tiny_spec, tiny_weights

from keystroke.engine.base import Sampling
from keystroke.engine.checkpoint.spec import DeltaSpec, ExpertsSpec, ModelSpec
from keystroke.engine.cuda import plan
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import Bucket, StepShape
from keystroke.engine.cuda.step import Parameters

PROBE = Sampling(logprobs=0)
MIXTURE = replace(tiny_spec("qwen3"), architecture="qwen3_moe", experts=ExpertsSpec(32, 4, 64))
HYBRID = replace(
    tiny_spec("qwen3"),
    architecture="qwen3_5",
    heads=2,
    kv_heads=1,
    head_dim=256,
    rotary=64,
    gated_attention=True,
    delta=DeltaSpec(frozenset({0}), 1, 2, 32, 64, 4),
)
NETS = DeltaSpec(frozenset({0, 1, 3, 4}), 1, 2, 32, 64, 4)


class RecordingLauncher(EmulatedLauncher):
    """Keeps the shapes of the steps it was asked for."""

    def launch(self, parameters: Parameters, bucket: Bucket, sparse: bool, shape: StepShape) -> None:
        self.__dict__.setdefault("shapes", []).append(shape)
        super().launch(parameters, bucket, sparse, shape)


DENSE = tiny_spec("qwen3")


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        pytest.param(MIXTURE, 3, id="mixture"),
        pytest.param(MIXTURE, 10, id="mixture, two blocks without experts"),
        pytest.param(DENSE, 3, id="dense"),
        pytest.param(DENSE, 10, id="dense, two blocks without a part of some matrices"),
        pytest.param(HYBRID, 3, id="hybrid"),
        pytest.param(replace(HYBRID, layers=5, delta=NETS), 3, id="hybrid of several delta nets"),
        pytest.param(replace(HYBRID, layers=6, delta=NETS), 10, id="blocks without columns of a state"),
    ],
)
def test_a_kernel_for_one_row_gives_the_bits_of_the_kernel_for_any(
    spec: ModelSpec, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tiny_weights(spec, "int8", blocks=blocks)
    launcher = RecordingLauncher(weights.plan)
    found: dict[str, list[torch.Tensor]] = {}
    for name, single, near in (("any", False, 2048), ("near", True, 2048), ("far", True, 0)):
        launcher.single = single
        found[name] = []
        # Each has an engine of its own, so that none continues from pages of another.
        with CudaEngine(weights, launcher, 1024) as engine, engine.session() as session:
            monkeypatch.setattr(plan, "NEAR", near)
            session.extend([(7 * i) % 203 for i in range(66)])
            session.step(sampling=PROBE)
            for _ in range(3):
                session.step(sampling=PROBE)
                found[name].append(engine._stepper.logits[0].clone())
        monkeypatch.undo()
        assert launcher.__dict__["shapes"][-1] == ("far" if name == "far" else "near")
    for name in ("near", "far"):
        assert all(map(torch.equal, found[name], found["any"])), name
    assert not torch.equal(found["any"][0], found["any"][1])


# Six layers, so that tags come back; more blocks than experts and than parts of some matrices.
DEEP = replace(tiny_spec("qwen3", layers=6), hidden=256, heads=12, kv_heads=4)
DEEP_MIXTURE = replace(DEEP, architecture="qwen3_moe", experts=ExpertsSpec(32, 4, 64))
DEEP_HYBRID = replace(
    tiny_spec("qwen3", layers=6),
    architecture="qwen3_5_moe",
    heads=2,
    kv_heads=1,
    head_dim=256,
    rotary=64,
    gated_attention=True,
    delta=DeltaSpec(frozenset({0, 2, 4}), 1, 2, 32, 64, 4),
    experts=ExpertsSpec(32, 4, 64),
)
ONE_NET = replace(
    DEEP_HYBRID,
    layers=4,
    delta=DeltaSpec(frozenset({1}), 2, 4, 32, 64, 4),
    experts=ExpertsSpec(32, 4, 64, shared=64, shared_gate=True),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        pytest.param(DEEP, 24, id="dense"),
        pytest.param(DEEP_MIXTURE, 40, id="mixture"),
        pytest.param(DEEP_HYBRID, 10, id="hybrid mixture"),
        pytest.param(replace(MIXTURE, layers=6), 100, id="blocks without a part of anything"),
    ],
)
def test_warps_that_are_held_back_change_nothing(spec: ModelSpec, blocks: int) -> None:
    weights = tiny_weights(spec, "int8", blocks=blocks)
    launcher = EmulatedLauncher(weights.plan)
    found: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for stalled, logits in found.items():
        launcher.single = stalled
        with CudaEngine(weights, launcher, 1024) as engine, engine.session() as session:
            session.extend([(7 * i) % 203 for i in range(66)])
            session.step(sampling=PROBE)
            launcher.stalls = 25 if stalled else 0
            for _ in range(3):
                session.step(sampling=PROBE)
                logits.append(engine._stepper.logits[0].clone())
    assert all(map(torch.equal, found[True], found[False]))
    assert not torch.equal(found[True][0], found[True][1])


def test_what_a_warp_of_its_own_computes_is_waited_for() -> None:
    """Early scores by three warps of a block, and a single delta net, which passes nothing with tags."""
    weights = tiny_weights(ONE_NET, "int8", blocks=3)
    assert weights.plan.early_scores is not None
    assert weights.plan.early_scores.warps > 1
    launcher = EmulatedLauncher(weights.plan)
    found = []
    for launcher.single in (False, True, True, True):
        launcher.stalls = 0
        with CudaEngine(weights, launcher, 1024) as engine, engine.session() as session:
            session.extend([(7 * i) % 203 for i in range(20)])
            session.step(sampling=PROBE)
            launcher.stalls = 25 if launcher.single else 0
            logits = []
            for _ in range(6):
                session.step(sampling=PROBE)
                logits.append(engine._stepper.logits[0].clone())
            found.append(torch.stack(logits))
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.slow
def test_a_block_without_a_part_of_anything_keeps_step_with_what_it_streams() -> None:
    weights = tiny_weights(replace(MIXTURE, layers=6), "int8", blocks=100)
    launcher = EmulatedLauncher(weights.plan)
    found = []
    for launcher.stalls in (0, 25, 25, 25):
        with CudaEngine(weights, launcher, 1024) as engine, engine.session() as session:
            session.extend([(7 * i) % 203 for i in range(6)])
            for _ in range(3):
                session.step(sampling=PROBE)
            found.append(engine._stepper.logits[0].clone())
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.parametrize("spec", [MIXTURE, tiny_spec("llama")], ids=["mixture", "dense"])
def test_far_keys_meet_queries_that_are_sent_as_they_meet_stored_ones(spec: ModelSpec) -> None:
    """The own key of the step is in the second of four pages of a chunk, then in the third."""
    weights = tiny_weights(replace(spec, context_length=2600), "int8", blocks=3)
    launcher = RecordingLauncher(weights.plan)
    found: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for single, logits in found.items():
        launcher.single = single
        with CudaEngine(weights, launcher, 3072) as engine, engine.session() as session:
            session.extend([(7 * i) % 203 for i in range(2174)])
            for _ in range(4):
                session.step(sampling=PROBE)
                logits.append(engine._stepper.logits[0].clone())
    assert launcher.__dict__["shapes"][-1] == "far"
    assert all(map(torch.equal, found[True], found[False]))
    assert not torch.equal(found[True][0], found[True][1])
