"""Mixtures of experts in the decode kernel and in prefill, on the emulator, against the textbook model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from cuda_emulator import EmulatedLauncher
from cuda_models import CPU, dense_tensors, tiny_engine, tiny_spec
from test_cuda_kv8 import in_steps, steps_of
from test_cuda_sparse import chooses_all_and_equals_dense
from test_cuda_stored import MIXED, PROBE, engine_of, in_file, mixed

from keystroke.engine.base import StepRequest
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.checkpoint.spec import Checkpoint, ExpertsSpec, ModelSpec, tensor_shapes
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import KvPrecision, Plan, Precision
from keystroke.engine.cuda.reference import forward
from keystroke.engine.cuda.target import TARGETS
from keystroke.engine.cuda.weights import load_weights, plan_of
from keystroke.engine.onnx.convert import convert_model
from keystroke.errors import ModelDamaged, UnsupportedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_models import SIZES

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
EXPERTS = ExpertsSpec(32, 4, 64)


def mixture(layers: int = 2, experts: ExpertsSpec = EXPERTS, **changes: Any) -> ModelSpec:
    return replace(tiny_spec("qwen3", layers=layers), architecture="qwen3_moe", experts=experts, **changes)


def last_logits(engine: CudaEngine, tokens: list[int], rows: int) -> torch.Tensor:
    """The logits after `tokens`, of which the last `rows` are computed in one step of the kernel."""
    with engine.session() as session:
        if len(tokens) > rows:
            session.extend(tokens[:-rows])
            session.step(sampling=PROBE)
        session.extend(tokens)
        session.step(sampling=PROBE)
        return engine._stepper.logits[min(rows, len(tokens)) - 1].clone()


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_logits_are_those_of_the_textbook_alone_and_in_company(precision: Precision) -> None:
    spec = mixture(3)
    with tiny_engine(spec, precision, blocks=3) as engine:
        found = [last_logits(engine, PROMPT, rows) for rows in (1, 2, 4, 9)]
        tensors = dense_tensors(engine._prefill._weights)
    truth = forward(spec, tensors.__getitem__, PROMPT)[-1]
    assert (found[0] - truth).norm() / truth.norm() < 0.02
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_experts_of_four_and_six_bits_are_multiplied_as_stored() -> None:
    experts = ExpertsSpec(32, 2, 256)
    spec = mixture(experts=experts, hidden=256, vocab_size=72, tied=False)
    truth, given = in_file(spec, lambda name: "Q8_0" if name.endswith("mlp.gate.weight") else mixed(name))
    for name in given:
        if name.endswith("mlp.gate.weight"):  # files keep routers wide
            given[name] = truth[name].float()
    with engine_of(spec, MIXED, given) as engine:
        alone, together = last_logits(engine, PROMPT, 1), last_logits(engine, PROMPT, 9)
    wanted = forward(spec, truth.__getitem__, PROMPT, torch.float64)[-1]
    assert torch.equal(alone, together)
    assert (alone - wanted).norm() / wanted.norm() < 0.02


def test_weights_may_be_shares_of_all_experts() -> None:
    spec = mixture(experts=replace(EXPERTS, normalised=False))
    with tiny_engine(spec) as engine:
        found = last_logits(engine, PROMPT, 1)
        tensors = dense_tensors(engine._prefill._weights)
    truth = forward(spec, tensors.__getitem__, PROMPT)[-1]
    other = forward(replace(spec, experts=EXPERTS), tensors.__getitem__, PROMPT)[-1]
    assert (found - truth).norm() / truth.norm() < 0.02 < (found - other).norm() / other.norm()


def test_a_prompt_that_is_read_at_once_gives_what_its_steps_give() -> None:
    spec, prompt = mixture(), [(7 * i * i + 3) % 203 for i in range(70)]
    with tiny_engine(spec) as engine:
        assert len(prompt) > engine.tail
        found = last_logits(engine, prompt, 1)
        tensors = dense_tensors(engine._prefill._weights)
    truth = forward(spec, tensors.__getitem__, prompt)[-1]
    assert (found - truth).norm() / truth.norm() < 0.02


def test_drafts_and_other_sessions_change_no_token() -> None:
    with tiny_engine(mixture()) as engine:

        def plain(prompt: list[int]) -> list[int]:
            with engine.session() as session:
                session.extend(prompt)
                return [token for _ in range(6) for token in session.step().tokens]

        prompts = [[5, 6, 7], [8, 9, 10, 11], [12]]
        alone = [plain(prompt) for prompt in prompts]
        with engine.session() as session:
            session.extend(prompts[0])
            drafted = list(session.step([*alone[0][:3], 0]).tokens)
            while len(drafted) < 6:
                drafted += session.step([0, 1]).tokens
            fork = session.fork()
            session.rollback(len(prompts[0]))
            assert list(session.step(alone[0][:2]).tokens) == alone[0][:3]
            fork.close()
        assert drafted[:6] == alone[0]
        sessions = [engine.session() for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.extend(prompt)
        steps = [engine.step_many([StepRequest(session) for session in sessions]) for _ in range(6)]
        assert [[step[i].tokens[0] for step in steps] for i in range(3)] == alone


def test_a_gpu_without_bulk_copies_computes_the_same() -> None:
    spec = mixture()
    with tiny_engine(spec) as engine, tiny_engine(spec, target=TARGETS["sm_86"]) as older:
        assert torch.equal(last_logits(engine, PROMPT, 1), last_logits(older, PROMPT, 1))
        assert torch.equal(last_logits(engine, PROMPT, 9), last_logits(older, PROMPT, 9))


def test_a_step_reads_the_experts_it_uses_and_no_others() -> None:
    spec = mixture()
    plan = Plan(spec, "bf16", 2)
    used = plan.layer(0)["gate_up"].bytes + plan.layer(0)["down"].bytes
    routers = spec.layers * EXPERTS.count * spec.hidden * 4
    assert plan.packed_bytes + routers - plan.streamed_bytes == spec.layers * used * 28 // 32


@pytest.mark.parametrize("experts", [ExpertsSpec(24, 4, 64), ExpertsSpec(32, 4, 72)])
def test_experts_that_the_kernel_cannot_cut_are_refused(experts: ExpertsSpec) -> None:
    with pytest.raises(UnsupportedModel, match="cannot cut"):
        Plan(mixture(experts=experts), "bf16", 2)


def test_more_experts_used_than_there_are_is_a_damaged_model() -> None:
    with pytest.raises(ModelDamaged, match="5 of 4 experts"):
        ExpertsSpec(4, 5, 64)


# Files


def qwen3_moe(**changes: Any) -> Any:
    sizes = {
        **SIZES,
        "hidden_size": 128,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **changes,
    }
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((torch.randn_like(parameter) * 0.1).bfloat16())
    return model


def write_gguf(path: Path, model: Any, checkpoint: Checkpoint) -> None:
    """The same model as a GGUF file, its matrices taken from `checkpoint`, which has them stacked."""
    config, spec = model.config, checkpoint.spec
    assert spec.experts is not None
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_expert_count(spec.experts.count)
    writer.add_expert_used_count(spec.experts.top)
    writer.add_expert_feed_forward_length(spec.experts.width)
    writer.add_eos_token_id(2)
    writer.add_token_list([str(i) for i in range(spec.vocab_size)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, spec.layers)
    for name, shape in tensor_shapes(spec).items():
        values = checkpoint.tensor(name)
        if ".mlp.experts." in name:
            values = values.reshape(spec.experts.count, shape[0] // spec.experts.count, shape[1])
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None
        writer.add_tensor(stored, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def engine_for(checkpoint: Checkpoint) -> CudaEngine:
    plan = plan_of(checkpoint, "bf16", 2)
    return CudaEngine(load_weights(checkpoint, plan, CPU), EmulatedLauncher(plan), 1024)


def test_both_layouts_give_what_transformers_computes(tmp_path: Path) -> None:
    model = qwen3_moe()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "folder")
    wanted = model.to(torch.float32)(torch.tensor([PROMPT])).logits[0, -1].detach()
    with open_checkpoint(tmp_path / "folder") as folder:
        assert folder.spec.experts == EXPERTS
        write_gguf(tmp_path / "model.gguf", model, folder)
        with open_checkpoint(tmp_path / "model.gguf") as file:
            assert replace(file.spec, name="", bos=None) == replace(folder.spec, name="", bos=None)
            for name in tensor_shapes(folder.spec):
                assert np.array_equal(folder.tensor(name), file.tensor(name)), name
            with engine_for(folder) as first, engine_for(file) as second:
                found, again = last_logits(first, PROMPT, 1), last_logits(second, PROMPT, 1)
    assert torch.equal(found, again)
    assert (found - wanted).norm() / wanted.norm() < 0.02


def test_layers_without_experts_between_those_with_are_refused(tmp_path: Path) -> None:
    qwen3_moe(mlp_only_layers=[1]).save_pretrained(tmp_path)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(UnsupportedModel, match="layers without experts"),
    ):
        engine_for(checkpoint)


def test_the_portable_graph_says_that_it_does_not_run_mixtures(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path / "folder")
    with (
        open_checkpoint(tmp_path / "folder") as checkpoint,
        pytest.raises(UnsupportedModel, match="mixture of experts, which only the compiled operators run"),
    ):
        convert_model(checkpoint, precision="int8", cache=tmp_path / "cache")


def test_keys_and_values_of_a_mixture_may_have_8_bits() -> None:
    # A prompt for which no two experts have nearly equal scores, of which rounding might choose the other.
    spec, prompt = mixture(), [(7 * i * i + 3) % 203 for i in range(15)]
    with tiny_engine(spec, kv_precision="int8") as engine:
        alone, together = (last_logits(engine, prompt, rows) for rows in (1, 4))
        tensors, kept = dense_tensors(engine._prefill._weights), in_steps(steps_of(engine))
    truth = forward(spec, tensors.__getitem__, prompt, kv_transform=kept)[-1]
    assert torch.equal(alone, together)
    assert (alone - truth).norm() / truth.norm() < 0.03


@pytest.mark.parametrize("kv_precision", ["bf16", "int8"])
def test_a_mixture_that_attends_to_every_chunk_gives_the_logits_of_the_whole(
    kv_precision: KvPrecision,
) -> None:
    spec = replace(mixture(), context_length=3200)
    engine = tiny_engine(spec, kv_tokens=6400, sparse="always", kv_precision=kv_precision)
    engine.sparse_from, engine.sparse_budget = 512, 64
    chooses_all_and_equals_dense(engine)
