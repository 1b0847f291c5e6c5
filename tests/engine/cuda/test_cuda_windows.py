"""Sliding windows, sinks, and gpt-oss's experts in the decode kernel and in prefill, on the emulator, against
the textbook model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cuda_emulator import EmulatedLauncher
from cuda_models import CPU, dense_tensors, tiny_engine, tiny_spec
from test_cuda_experts import last_logits
from test_cuda_stored import engine_of, in_file

from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.checkpoint.spec import ExpertsSpec, ModelSpec, RopeSpec
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import FLOAT_FOUR, Plan, Precision
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.sparse import supports_sparse
from keystroke.engine.cuda.stored import typical_formats
from keystroke.engine.cuda.target import TARGETS
from keystroke.engine.cuda.weights import load_weights, plan_of
from keystroke.errors import UnsupportedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_models import SIZES

GEFORCE = TARGETS["sm_89"]
EXPERTS = ExpertsSpec(32, 4, 64, router_bias=True, bias=True, limit=7.0)


def text(length: int) -> list[int]:
    return [(7 * i * i + 3) % 71 for i in range(length)]


def gpt_oss(**changes: Any) -> ModelSpec:
    return replace(
        tiny_spec("llama", layers=3),
        architecture="gpt_oss",
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        window=20,
        windowed=frozenset({0, 2}),
        experts=EXPERTS,
        **changes,
    )


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


# Two experts of nearly the same score may change places; in a long text that happens somewhere, so its logits
# may be further off.
@pytest.mark.parametrize(
    ("precision", "length", "most"), [("bf16", 9, 0.02), ("int8", 6, 0.05), ("bf16", 150, 0.05)]
)
def test_logits_are_those_of_the_textbook_alone_and_in_company(
    precision: Precision, length: int, most: float
) -> None:
    spec, prompt = gpt_oss(), text(length)
    with tiny_engine(spec, precision, blocks=3) as engine:
        found = [last_logits(engine, prompt, rows) for rows in (1, 2, 4, 9)]
        tensors = dense_tensors(engine._prefill._weights)
    truth = forward(spec, tensors.__getitem__, prompt)[-1]
    assert relative(found[0], truth) < most
    if length < 16:  # a prompt that is read at once differs from steps in its last bits
        for other in found[1:]:
            assert torch.equal(found[0], other)
    else:
        assert all(relative(other, truth) < most for other in found)


@pytest.mark.parametrize(
    "without",
    [
        {"sinks": False},
        {"windowed": frozenset()},
        {"experts": replace(EXPERTS, limit=0.0)},
        {"experts": replace(EXPERTS, router_bias=False)},
        {"experts": replace(EXPERTS, bias=False)},
    ],
)
def test_each_feature_matters(without: dict[str, Any]) -> None:
    """The comparison above would notice if the kernel left one of them out."""
    spec, prompt = gpt_oss(), text(40)
    with tiny_engine(spec, blocks=3) as engine:
        found = last_logits(engine, prompt, 1)
        tensors = dense_tensors(engine._prefill._weights)
    other = forward(replace(spec, **without), tensors.__getitem__, prompt)[-1]
    assert relative(found, other) > 0.03


@pytest.mark.parametrize("length", [100, 500])
def test_windows_over_several_pages_with_a_rotary_embedding_of_their_own(length: int) -> None:
    spec = replace(
        tiny_spec("qwen3", layers=2, context=4096),
        window=100,
        windowed=frozenset({1}),
        window_rope=RopeSpec(100.0),
    )
    with tiny_engine(spec, blocks=3) as engine:
        found = last_logits(engine, text(length), 1)
        together = last_logits(engine, text(length), 9)
        tensors = dense_tensors(engine._prefill._weights)
    truth = forward(spec, tensors.__getitem__, text(length))[-1]
    assert relative(found, truth) < 0.02
    assert relative(together, truth) < 0.02
    plain = forward(replace(spec, window_rope=None), tensors.__getitem__, text(length))[-1]
    assert relative(found, plain) > 0.05


def test_far_keys_outside_a_window_are_not_read() -> None:
    """Beyond 2,048 keys a unit of attention covers four pages, and most of them lie before the window."""
    spec = replace(
        tiny_spec("llama", layers=2, context=4096), window=300, windowed=frozenset({0}), sinks=True
    )
    with tiny_engine(spec, blocks=2) as engine:
        found = last_logits(engine, text(2900), 1)
        tensors = dense_tensors(engine._prefill._weights)
    truth = forward(spec, tensors.__getitem__, text(2900))[-1]
    assert relative(found, truth) < 0.02


def test_drafts_change_no_token_behind_a_window() -> None:
    with tiny_engine(gpt_oss()) as engine:
        with engine.session() as session:
            session.extend(text(90))
            alone = [token for _ in range(6) for token in session.step().tokens]
        with engine.session() as session:
            session.extend(text(90))
            drafted = list(session.step([*alone[:3], 0]).tokens)
            while len(drafted) < 6:
                drafted += session.step([0, 1]).tokens
    assert drafted[:6] == alone


@pytest.mark.slow
def test_experts_in_mxfp4_are_multiplied_as_stored() -> None:
    spec = gpt_oss(hidden=256, vocab_size=72, tied=False)
    wide = replace(spec, experts=replace(EXPERTS, width=1600, top=2))  # long units are divided among warps
    for each in (spec, wide):
        truth, given = in_file(each, lambda name: "MXFP4" if ".experts." in name else "Q8_0")
        for name in given:
            if name.endswith("mlp.gate.weight"):  # files keep routers wide
                given[name] = truth[name].float()
        with engine_of(each, typical_formats(each), given) as engine:
            assert engine._stepper.plan.gate_up.format == FLOAT_FOUR
            alone, together = last_logits(engine, text(9), 1), last_logits(engine, text(9), 9)
        wanted = forward(each, truth.__getitem__, text(9), torch.float64)[-1]
        assert torch.equal(alone, together)
        assert relative(alone, wanted) < 0.02
    # With less shared memory a stage of the ring holds only a part of a long unit.
    with engine_of(wide, typical_formats(wide), given, GEFORCE) as engine:
        plan = engine._stepper.plan
        assert plan.stage_bytes(1) < plan.down.unit_bytes
        assert torch.equal(last_logits(engine, text(9), 1), alone)
        assert torch.equal(last_logits(engine, text(9), 8), alone)


def test_keys_and_values_may_be_bytes() -> None:
    spec = gpt_oss()
    with tiny_engine(spec, kv_precision="int8") as engine:
        found = last_logits(engine, text(90), 1)
        tensors = dense_tensors(engine._prefill._weights)
    truth = forward(spec, tensors.__getitem__, text(90))[-1]
    assert relative(found, truth) < 0.1
    windowless = forward(replace(spec, windowed=frozenset()), tensors.__getitem__, text(90))[-1]
    assert relative(found, windowless) > 0.2


def test_sparse_attention_is_left_out() -> None:
    assert not supports_sparse(Plan(gpt_oss(), "bf16", 2))


def test_too_many_layers_with_windows_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="sliding windows in at most 128"):
        Plan(replace(tiny_spec(layers=129), window=8, windowed=frozenset({0})), "bf16", 2)


def engine_for(folder: Path) -> CudaEngine:
    with open_checkpoint(folder) as checkpoint:
        plan = plan_of(checkpoint, "bf16", 2)
        return CudaEngine(load_weights(checkpoint, plan, CPU), EmulatedLauncher(plan), 1024)


def test_gpt_oss_is_what_transformers_computes(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        **{
            **SIZES,
            "hidden_size": 128,
            "head_dim": 64,
            "intermediate_size": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 16,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": None,
        }
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.1).bfloat16())
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    prompt = [each % config.vocab_size for each in text(60)]
    wanted = model.to(torch.float32)(torch.tensor([prompt])).logits[0, -1].detach()
    with engine_for(tmp_path) as engine:
        found = last_logits(engine, prompt, 1)
    assert relative(found, wanted) < 0.02
