"""The CUDA engine on a real GPU: numbers, buckets, speculation, long contexts, memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_models import (
    DEVICE,
    ENDLESS,
    FAMILIES,
    PROBE,
    QUANTISED,
    VOCABULARY,
    Tensors,
    engine_of,
    family,
    last_logits,
    needs_hopper,
    plain,
    tensors_of,
    text,
)

from keystroke.engine.base import Interrupt, Sampling, StepRequest
from keystroke.engine.checkpoint.spec import HEAD, ModelSpec
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.packing import unpack
from keystroke.engine.cuda.plan import Precision
from keystroke.engine.cuda.reference import forward
from keystroke.engine.sampler import choose, probabilities
from keystroke.errors import Interrupted, NotEnoughMemory

pytestmark = needs_hopper


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[ModelSpec, Tensors, CudaEngine]]:
    chosen = family(request.param)
    tensors = tensors_of(chosen)
    with engine_of(chosen, tensors) as engine:
        yield chosen, tensors, engine


@pytest.fixture(scope="module")
def qwen() -> Iterator[CudaEngine]:
    with engine_of(family("qwen2")) as engine:
        yield engine


@pytest.mark.parametrize("length", [1, 16, 17, 50, 64, 65, 300, 2500])
def test_logits_are_nearer_the_truth_than_plain_bf16(
    model: tuple[ModelSpec, Tensors, CudaEngine], length: int
) -> None:
    chosen, tensors, engine = model
    prompt = text(length)
    logits = last_logits(engine, prompt)
    truth = forward(chosen, tensors.__getitem__, prompt, torch.float64)[-1]
    rounded = forward(chosen, tensors.__getitem__, prompt, torch.bfloat16)[-1].double()
    assert (logits - truth).norm() <= (rounded - truth).norm()


def transformers_model(chosen: ModelSpec, tensors: Tensors) -> Any:
    transformers = pytest.importorskip("transformers")
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[chosen.architecture]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=chosen.vocab_size,
        hidden_size=chosen.hidden,
        intermediate_size=chosen.intermediate,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        num_key_value_heads=chosen.kv_heads,
        head_dim=chosen.head_dim,
        max_position_embeddings=chosen.context_length,
        rms_norm_eps=chosen.norm_eps,
        tie_word_embeddings=chosen.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    with torch.device(DEVICE):
        found = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    missing, unexpected = found.load_state_dict(
        {name: tensor.float() for name, tensor in tensors.items()}, strict=False
    )
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    found.tie_weights()
    return found


@torch.inference_mode()
def test_logits_are_nearer_transformers_in_fp32_than_its_own_bf16(
    model: tuple[ModelSpec, Tensors, CudaEngine],
) -> None:
    chosen, tensors, engine = model
    prompt = text(700, 9)
    peer = transformers_model(chosen, tensors)
    tokens = torch.tensor([prompt], device=DEVICE)
    truth = peer(tokens).logits[0, -1].double()
    rounded = peer.to(torch.bfloat16)(tokens).logits[0, -1].double()
    with engine.session() as session:
        session.extend(prompt)
        session.step(sampling=PROBE)
        logits = engine._stepper.logits[0].double()
    assert (logits - truth).norm() <= (rounded - truth).norm()


def test_greedy_tokens_are_the_same_in_every_bucket(model: tuple[ModelSpec, Tensors, CudaEngine]) -> None:
    _, _, engine = model
    greedy_in_every_bucket(engine, range(1, engine._stepper.plan.max_rows))


def greedy_in_every_bucket(engine: CudaEngine, sizes: Iterable[int]) -> None:
    prompt = text(321, 10)  # whole pages and one token: later sessions find the very KV of the first
    expected = plain(engine, prompt, 48)
    for size in sizes:
        with engine.session() as session:
            session.extend(prompt)
            seen: list[int] = []
            while len(seen) < 48:
                step = session.step(expected[len(seen) : len(seen) + size])
                assert step.accepted == min(size, 48 - len(seen))
                seen += step.tokens
            assert seen[:48] == expected, size


def test_rows_are_bit_equal_in_every_bucket(model: tuple[ModelSpec, Tensors, CudaEngine]) -> None:
    _, _, engine = model
    prompt = text(600, 1)
    with engine.session() as session:
        session.extend(prompt[:560])
        singles = []
        for token in prompt[560:]:
            session.step(sampling=PROBE)
            singles.append(engine._stepper.logits[0].clone())
            session.rollback(session.length - 1)
            session.extend([*session.tokens, token])
        for size in (2, 3, 5, 8, 11, 16):
            session.rollback(600 - size)
            session._resident = 599 - size
            session.step(prompt[600 - size :], sampling=PROBE)
            rows = engine._stepper.logits[: size + 1]
            for i in range(size):
                assert torch.equal(rows[i], singles[40 - size + i]), (size, i)
            session.rollback(600 - size)
            session.extend(prompt)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, seed=11)], ids=["greedy", "sampled"]
)
def test_speculation_never_changes_the_text(qwen: CudaEngine, sampling: Sampling) -> None:
    prompt = text(193, 2)  # as above
    expected = plain(qwen, prompt, 120, sampling)
    rng = np.random.default_rng(3)
    with qwen.session() as session:
        session.extend(prompt)
        seen: list[int] = []
        while len(seen) < 120:
            draft = expected[len(seen) : len(seen) + int(rng.integers(0, 16))]
            if draft and rng.random() < 0.5:
                draft[int(rng.integers(0, len(draft)))] = int(rng.integers(0, VOCABULARY))
            seen += session.step(draft, sampling).tokens
        assert seen[:120] == expected


def test_sixteen_sessions_together_say_what_each_says_alone(qwen: CudaEngine) -> None:
    # Prompts that the kernel itself reads: a library's matrix product may round differently in another shape.
    prompts = [text(1 + i, 100 + i) for i in range(16)]
    samplings = [Sampling(temperature=0.0 if i % 2 else 0.9, seed=i) for i in range(16)]
    alone = [plain(qwen, p, 24, s) for p, s in zip(prompts, samplings, strict=True)]
    sessions = [qwen.session() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.extend(prompt)
    together: list[list[int]] = [[] for _ in prompts]
    for _ in range(24):
        steps = qwen.step_many([StepRequest(s, (), p) for s, p in zip(sessions, samplings, strict=True)])
        for seen, step in zip(together, steps, strict=True):
            seen += step.tokens
    for session in sessions:
        session.close()
    assert together == alone


def test_the_device_draws_what_the_sampler_draws(qwen: CudaEngine) -> None:
    with qwen.session() as session:
        session.extend(text(50, 4))
        for seed in range(40):
            sampling = Sampling(temperature=1.0, seed=seed, min_p=0.01 * (seed % 3))
            token = session.step(sampling=sampling).tokens[0]
            logits = qwen._stepper.logits[0].cpu().numpy()
            assert token == choose(logits, sampling, session.length - 1)


def test_sampled_frequencies_follow_the_distribution(qwen: CudaEngine) -> None:
    counts: dict[int, int] = {}
    with qwen.session() as session:
        session.extend(text(30, 5))
        for seed in range(600):
            token = session.step(sampling=Sampling(temperature=0.35, seed=seed)).tokens[0]
            counts[token] = counts.get(token, 0) + 1
            session.rollback(30)
        session.step()
        expected = probabilities(qwen._stepper.logits[0].cpu().numpy(), Sampling(temperature=0.35))
    distance = sum(abs(counts.get(i, 0) / 600 - p) for i, p in enumerate(expected)) / 2
    draws = np.random.default_rng(0).choice(len(expected), (200, 600), p=expected / expected.sum())
    own = [np.abs(np.bincount(row, minlength=len(expected)) / 600 - expected).sum() / 2 for row in draws]
    assert distance <= max(own)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("length", [1, 16, 100, 700])
def test_quantised_kernels_are_nearer_the_truth_of_their_weights_than_plain_bf16(
    quantised: dict[str, tuple[Tensors, CudaEngine]], precision: Precision, length: int
) -> None:
    tensors, engine = quantised[precision]
    prompt = text(length, 6)
    logits = last_logits(engine, prompt)
    truth = forward(QUANTISED, tensors.__getitem__, prompt, torch.float64)[-1]
    rounded = forward(QUANTISED, tensors.__getitem__, prompt, torch.bfloat16)[-1].double()
    assert (logits - truth).norm() <= (rounded - truth).norm()


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_greedy_tokens_are_the_same_in_every_bucket(
    quantised: dict[str, tuple[Tensors, CudaEngine]], precision: Precision
) -> None:
    _, engine = quantised[precision]
    most = engine._stepper.plan.max_rows - 1  # beside the token that is pending
    greedy_in_every_bucket(engine, [size for size in (1, 3, 7, 8, 15, 16, 31) if size <= most])


@pytest.fixture(scope="module")
def quantised() -> Iterator[dict[str, tuple[Tensors, CudaEngine]]]:
    """By precision: an engine, and the tensors as its kernel multiplies with them."""
    given = tensors_of(QUANTISED)
    found = {}
    keys = QUANTISED.kv_heads * QUANTISED.head_dim
    for precision in ("int8", "int4"):
        engine = engine_of(QUANTISED, given, precision)
        weights, tensors = engine._prefill._weights, dict(given)
        for layer in range(QUANTISED.layers):
            dense, at = weights.dense(layer), f"model.layers.{layer}"
            q, k, v = torch.split(dense.qkv, [QUANTISED.heads * QUANTISED.head_dim, keys, keys])
            gate, up = dense.gate_up.chunk(2)
            attention = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": dense.output}
            tensors |= {f"{at}.self_attn.{name}.weight": tensor for name, tensor in attention.items()}
            mlp = {"gate_proj": gate, "up_proj": up, "down_proj": dense.down}
            tensors |= {f"{at}.mlp.{name}.weight": tensor for name, tensor in mlp.items()}
        tensors[HEAD] = unpack(weights.head, None, weights.plan.head, QUANTISED.vocab_size)
        found[precision] = tensors, engine
    yield found
    for _, engine in found.values():
        engine.close()


def test_an_interrupt_ends_a_long_prefill_and_keeps_what_was_computed(qwen: CudaEngine) -> None:
    interrupt = Interrupt()
    prompt = text(16_000, 7)
    with qwen.session() as session:
        timer = threading.Timer(0.02, interrupt.set)
        qwen.prefill_chunk, session._chunk = 256, 256
        timer.start()
        with pytest.raises(Interrupted):
            session.extend(prompt, interrupt)
        held = session.length
        assert 0 < held < 16_000
        assert session.extend(prompt).reused >= held - 64
        assert len(session.step().tokens) == 1


def test_an_interrupt_stops_generation_between_two_steps(qwen: CudaEngine) -> None:
    interrupt = Interrupt()
    with qwen.session() as session:
        session.extend(text(40, 12))

        def generate() -> None:
            while session.length < 10_000:
                session.step(interrupt=interrupt)

        threading.Timer(0.05, interrupt.set).start()
        with pytest.raises(Interrupted):
            generate()
        held = session.length
        assert held < 10_000
        session.step()
        assert session.length == held + 1


def test_context_of_128k_can_be_read_and_continued() -> None:
    with engine_of(ENDLESS, kv_tokens=132_000) as engine, engine.session() as session:
        prompt = text(131_000, 8)
        assert session.extend(prompt).computed == 131_000
        single = [session.step().tokens[0] for _ in range(4)]
        session.rollback(131_000)
        assert list(session.step(single[:3]).tokens) == single


def test_memory_that_cannot_be_had_is_a_sentence() -> None:
    with pytest.raises(NotEnoughMemory, match="ask for fewer tokens"):
        engine_of(family("qwen2"), kv_tokens=1 << 30)
    small = tensors_of(replace(family("qwen2"), layers=1))
    with pytest.raises(NotEnoughMemory, match="choose 8 or 4 bits"):
        engine_of(replace(family("qwen2"), layers=30_000), small)


def test_kv_memory_that_is_full_is_a_sentence_and_can_be_had_again() -> None:
    with engine_of(family("llama"), kv_tokens=1024) as engine:
        with engine.session() as session:
            session.extend(text(900))
            with engine.session() as other, pytest.raises(NotEnoughMemory, match="close a session"):
                other.extend(text(400, 1))
            assert len(session.step().tokens) == 1
        prompt = text(897, 2)  # whole pages and one token, as above
        expected = plain(engine, prompt, 4)  # evicts what was kept of the first
        assert plain(engine, prompt, 4) == expected


def test_a_closed_engine_gives_its_memory_back() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with engine_of(family("llama"), kv_tokens=100_000) as engine:
        plain(engine, text(100), 2)
        assert torch.cuda.memory_allocated() > before + 100_000_000
    del engine
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 50_000_000  # libraries keep their work space
