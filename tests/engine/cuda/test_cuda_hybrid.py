"""Hybrid models (gated delta nets beside gated attention) in the decode kernel and in prefill: on the
emulator, against the textbook model and `transformers`."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cuda_emulator import EmulatedLauncher
from cuda_models import CPU, dense_tensors, tiny_engine, tiny_spec, tiny_tensors, tiny_weights

from keystroke.engine.base import Sampling, Session, StepRequest
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.checkpoint.spec import DeltaSpec, ExpertsSpec, ModelSpec
from keystroke.engine.cuda import states
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import MAX_ROWS, Plan, Precision
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.sparse import supports_sparse
from keystroke.engine.cuda.weights import build_weights, load_weights, plan_of
from keystroke.errors import UnsupportedModel

PROBE = Sampling(logprobs=0)
DELTA = DeltaSpec(frozenset({0, 2}), 1, 2, 32, 64, 4)
EXPERTS = ExpertsSpec(32, 16, 64, shared=64, shared_gate=True)


def hybrid(**changes: Any) -> ModelSpec:
    plain = replace(tiny_spec("qwen3", layers=3), architecture="qwen3_5", heads=2, kv_heads=1, head_dim=256)
    return replace(plain, rotary=64, gated_attention=True, **{"delta": DELTA, **changes})


def text(count: int) -> list[int]:
    return [(7 * i * i + 3 * i + 1) % 203 for i in range(count)]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def last_logits(engine: CudaEngine, tokens: list[int], rows: int) -> torch.Tensor:
    """The logits after `tokens`, of which the last `rows` are computed in one step of the kernel."""
    with engine.session() as session:
        if len(tokens) > rows:
            session.extend(tokens[:-rows])
            session.step(sampling=PROBE)
        session.extend(tokens)
        session.step(sampling=PROBE)
        return engine._stepper.logits[rows - 1].clone()


def test_gated_attention_with_large_heads_rotated_in_part_is_that_of_the_textbook() -> None:
    spec = hybrid(delta=None, layers=2)
    with tiny_engine(spec) as engine:
        alone, together = (last_logits(engine, text(6), rows) for rows in (1, 6))
        read = last_logits(engine, text(70), 1)
        tensors = dense_tensors(engine._prefill._weights)
    assert torch.equal(alone, together)
    assert relative(alone, forward(spec, tensors.__getitem__, text(6))[-1]) < 0.02
    assert relative(read, forward(spec, tensors.__getitem__, text(70))[-1]) < 0.02
    for other in (replace(spec, rotary=0), replace(spec, rotary=128)):
        assert relative(read, forward(other, tensors.__getitem__, text(70))[-1]) > 0.1


def test_keys_beyond_the_near_ones_may_have_large_heads() -> None:
    spec = hybrid(delta=None, layers=1, context_length=4096)
    with tiny_engine(spec) as engine:
        found = last_logits(engine, text(2400), 1)
        tensors = dense_tensors(engine._prefill._weights)
    assert relative(found, forward(spec, tensors.__getitem__, text(2400))[-1]) < 0.02


def test_logits_are_those_of_the_textbook_alone_and_in_company() -> None:
    spec = hybrid()
    with tiny_engine(spec, blocks=3) as engine:
        found = [last_logits(engine, text(6), rows) for rows in (1, 2, 6)]
        read = last_logits(engine, text(140), 3)
        tensors = dense_tensors(engine._prefill._weights)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert relative(found[0], forward(spec, tensors.__getitem__, text(6), torch.float64)[-1]) < 0.02
    assert relative(read, forward(spec, tensors.__getitem__, text(140), torch.float64)[-1]) < 0.02


@pytest.mark.slow
def test_a_mixture_has_an_expert_that_every_row_uses() -> None:
    """The experts that rounding decides about weigh little: many are used, and routers are sharp."""
    spec = hybrid(experts=EXPERTS, delta=replace(DELTA, key_heads=2, value_heads=4, tiled=True))
    tensors = dict(tiny_tensors(spec))
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name] * 2
    weights = build_weights(Plan(spec, "bf16", 2), lambda name, _: tensors[name], CPU)
    with CudaEngine(weights, EmulatedLauncher(weights.plan), 1024) as engine:
        alone, together = (last_logits(engine, text(4), rows) for rows in (1, 3))
        read = last_logits(engine, text(30), 1)
    assert torch.equal(alone, together)
    wanted = forward(spec, tensors.__getitem__, text(30), torch.float64)
    assert relative(alone, wanted[3]) < 0.02
    assert relative(read, wanted[-1]) < 0.02


def plain(engine: CudaEngine, prompt: list[int], count: int = 6) -> list[int]:
    with engine.session() as session:
        session.extend(prompt)
        return [token for _ in range(count) for token in session.step().tokens]


def test_drafts_rollbacks_forks_and_other_sessions_change_no_token() -> None:
    with tiny_engine(hybrid()) as engine:
        prompts = [text(5), text(9)[3:], [12]]
        alone = [plain(engine, prompt) for prompt in prompts]
        with engine.session() as session:
            session.extend(prompts[0])
            drafted = list(session.step([*alone[0][:3], 0, 0]).tokens)
            assert drafted == alone[0][:4]
            fork = session.fork()
            while len(drafted) < 6:
                drafted += session.step([0, 1]).tokens
            assert drafted[:6] == alone[0]
            session.rollback(len(prompts[0]))
            assert list(session.step(alone[0][:2]).tokens) == alone[0][:3]
            assert [token for _ in range(2) for token in fork.step().tokens] == alone[0][4:6]
            fork.close()
        sessions = [engine.session() for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.extend(prompt)
        steps = [engine.step_many([StepRequest(session) for session in sessions]) for _ in range(6)]
        assert [[step[i].tokens[0] for step in steps] for i in range(3)] == alone


def test_a_step_that_ran_ahead_and_is_not_used_changes_no_token() -> None:
    with tiny_engine(hybrid()) as engine:
        wanted = plain(engine, text(5))
        with engine.session() as session:
            session.extend(text(5))
            found = [token for _ in range(3) for token in session.step().tokens]
            assert engine._ahead is not None
            found += session.step([wanted[3], 0]).tokens  # another step than the one that ran
            found += session.step().tokens
        assert found[:6] == wanted[: len(found)][:6]


def strolled(engine: CudaEngine, seed: int, moves: int) -> list[list[int]]:
    """Texts of three sessions and forks that write alone, with drafts and together, and take words back."""
    dice = random.Random(seed)
    sessions: list[Session] = [engine.session() for _ in range(3)]
    for at, session in enumerate(sessions):
        session.extend(text(5 + 3 * at))
    for _ in range(moves):
        at = dice.choice((0, 0, 0, 1, 2))
        session, move = sessions[at], dice.randrange(8)
        if move < 4:
            for _ in range(dice.randrange(1, 4)):
                session.step()
        elif move == 4:
            session.step([dice.randrange(203) for _ in range(dice.randrange(1, 3))])
        elif move == 5:
            session.rollback(max(session.length - dice.randrange(1, 3), 5))
        elif move == 6:
            engine.step_many([StepRequest(each) for each in sessions])
        else:
            sessions[at] = session.fork()
            session.close()
    found = [list(session.tokens) for session in sessions]
    for session in sessions:
        session.close()
    return found


def replays(engine: CudaEngine) -> set[int]:
    """How many rows the last steps of one sequence read again, as their input says."""
    return {int(words[-MAX_ROWS]) for words in engine._stepper._controls}


@pytest.mark.parametrize(("precision", "slots"), [("int8", 5), ("bf16", 3)])
def test_states_behind_a_single_row_are_those_that_are_read_again(
    precision: Precision, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tiny_weights(hybrid(), precision)
    with CudaEngine(weights, EmulatedLauncher(weights.plan), 2048, slots=slots) as engine:
        assert engine.states is not None
        assert engine.states.seconds == -(-slots // 4)
        with engine.session() as session:
            session.extend(text(5))
            for _ in range(2):
                session.step()
            assert replays(engine) == {0, 5}
            for _ in range(8):
                session.step()
            assert replays(engine) == {0}
        found = [strolled(engine, seed, 16) for seed in range(3)]
    monkeypatch.setattr(states, "second_states", lambda _: 0)
    with CudaEngine(weights, EmulatedLauncher(weights.plan), 2048, slots=slots) as engine:
        assert [strolled(engine, seed, 16) for seed in range(3)] == found


def test_a_snapshot_serves_a_rollback_and_another_session() -> None:
    """A message of 70 tokens ends in an end token: what follows can be taken back to the page before it."""
    spec = replace(hybrid(), eos=frozenset({5}))
    prompt = [each if each != 5 else 6 for each in text(90)]
    prompt[69] = 5
    with tiny_engine(spec) as engine:
        with engine.session() as session:
            assert session.extend(prompt).reused == 0
            first = [token for _ in range(2) for token in session.step().tokens]
            turned = [*prompt[:70], *(each + 1 for each in prompt[70:80])]
            assert session.extend(turned).reused == 64
            second = [token for _ in range(2) for token in session.step().tokens]
            session.extend(prompt)
            assert [token for _ in range(2) for token in session.step().tokens] == first
        with engine.session() as other:
            assert other.extend(turned).reused == 64
            assert [token for _ in range(2) for token in other.step().tokens] == second
        with engine.session("elsewhere") as stranger:
            assert stranger.extend(turned).reused == 0
        assert engine.stats().cached_bytes > 0


@pytest.mark.parametrize("slots", [1, 2])
def test_sequences_that_share_too_few_slots_read_again(slots: int) -> None:
    weights = tiny_weights(hybrid())
    with CudaEngine(weights, EmulatedLauncher(weights.plan), 1024, slots=slots) as engine:
        prompts = [text(5), text(9)[3:], [12]]
        alone = [plain(engine, prompt, 5) for prompt in prompts]
        sessions: list[Session] = [engine.session() for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.extend(prompt)
        found: list[list[int]] = [[] for _ in prompts]
        for _ in range(2):
            for session, tokens in zip(sessions, found, strict=True):
                tokens += session.step().tokens
        for _ in range(2):
            for step, tokens in zip(
                engine.step_many([StepRequest(each) for each in sessions]), found, strict=True
            ):
                tokens += step.tokens
        fork = sessions[0].fork()
        assert list(fork.step().tokens) == list(sessions[0].step().tokens) == alone[0][4:]
        assert found == [tokens[:4] for tokens in alone]


def test_what_a_hybrid_cannot_have_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="8-bit keys"):
        Plan(hybrid(), "bf16", 2, "int8")
    with pytest.raises(UnsupportedModel, match="linear attention"):
        Plan(hybrid(delta=replace(DELTA, key_size=40)), "bf16", 2)
    with pytest.raises(UnsupportedModel, match="shared experts of another size"):
        Plan(hybrid(experts=replace(EXPERTS, shared=128)), "bf16", 2)
    assert not supports_sparse(Plan(hybrid(), "bf16", 2))


def test_qwen3_5_is_what_transformers_computes(tmp_path: Path) -> None:
    config = transformers.Qwen3_5MoeTextConfig(
        vocab_size=203,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=512,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        num_experts=32,
        num_experts_per_tok=16,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.1).bfloat16())
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    wanted = model.to(torch.float32)(torch.tensor([text(40)])).logits[0, -1].detach()
    with open_checkpoint(tmp_path) as checkpoint:
        plan = plan_of(checkpoint, "bf16", 2)
        weights = load_weights(checkpoint, plan, CPU)
    with CudaEngine(weights, EmulatedLauncher(plan), 1024) as engine:
        found = last_logits(engine, text(40), 1)
    assert relative(found, wanted) < 0.02
