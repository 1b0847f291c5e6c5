"""The CUDA engine's contract, its kernel's own source running on the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_models import FAMILIES, dense_tensors, tiny_engine, tiny_spec, tiny_tensors, tiny_weights

from keystroke.engine.base import Interrupt, Sampling, StepRequest
from keystroke.engine.checkpoint.rope import extend_context, rope_tables
from keystroke.engine.checkpoint.spec import RopeSpec
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import Precision
from keystroke.engine.cuda.reference import forward
from keystroke.engine.sampler import choose
from keystroke.errors import ContextOverflow, Interrupted, NotEnoughMemory, SessionClosed, UsageError

PROMPT = [5, 17, 99, 3, 44, 120, 7, 8, 9, 11, 12, 64, 65, 66, 67, 2, 1, 40, 41, 42]


@pytest.fixture(scope="module")
def engine() -> CudaEngine:
    return tiny_engine(tiny_spec())


def plain(engine: CudaEngine, prompt: list[int], count: int, sampling: Sampling = Sampling()) -> list[int]:  # noqa: B008
    with engine.session() as session:
        session.extend(prompt)
        return [session.step(sampling=sampling).tokens[0] for _ in range(count)]


@pytest.mark.filterwarnings("ignore:mkldnn")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("length", "row"), [(16, 15), (20, 0)], ids=["as rows of a step", "through prefill"])
def test_logits_are_nearer_the_truth_than_plain_bf16(family: str, length: int, row: int) -> None:
    spec = tiny_spec(family, tied=family != "llama")
    tensors, prompt = tiny_tensors(spec), PROMPT[:length]
    with tiny_engine(spec) as engine, engine.session() as session:
        session.extend(prompt)
        session.step()
        logits = engine._stepper.logits[row].double()
    truth = forward(spec, tensors.__getitem__, prompt, torch.float64)[-1]
    rounded = forward(spec, tensors.__getitem__, prompt, torch.bfloat16)[-1].double()
    assert (logits - truth).norm() <= (rounded - truth).norm()


@pytest.mark.parametrize(
    ("length", "drafted"), [(130, 3), (2500, 3), (2500, 12)], ids=["near keys", "far keys", "many rows"]
)
def test_a_long_context_gives_the_same_row_alone_and_in_company(length: int, drafted: int) -> None:
    spec = tiny_spec(layers=2, context=2600)
    tensors = tiny_tensors(spec)
    prompt = [(11 * i * i + 3 * i) % 203 for i in range(length)]
    probe = Sampling(logprobs=0)  # chosen on the host: the logits stay as the step left them
    with tiny_engine(spec) as engine, engine.session() as session:
        session.extend(prompt[: length - drafted])
        session.step(prompt[length - drafted :], sampling=probe)
        together = engine._stepper.logits[drafted].clone()
        session.extend(prompt)  # the draft's KV is there: only the last token is pending
        session.step(sampling=probe)
        alone = engine._stepper.logits[0].clone()
        assert torch.equal(alone, together)
    truth = forward(spec, tensors.__getitem__, prompt)[-1]
    assert (alone - truth).norm() / truth.norm() < 0.02


def test_far_keys_meet_their_own_queries_whoever_asked_before() -> None:
    """Three blocks and two KV heads: a block's units of far keys have other queries each time; and two
    sessions take turns."""
    spec = tiny_spec(layers=1, context=3100)
    prompts = [
        [(11 * i * i + 3 * i + k) % 203 for i in range(length)] for k, length in enumerate((3050, 2400))
    ]
    probe = Sampling(logprobs=0)
    with tiny_engine(spec, blocks=3, kv_tokens=8192) as engine:
        sessions = [engine.session() for _ in prompts]
        alone = []
        for session, prompt in zip(sessions, prompts, strict=True):
            session.extend(prompt)
            session.step(sampling=probe)
            alone.append(engine._stepper.logits[0].clone())
            session.rollback(len(prompt))
        engine.step_many([StepRequest(session, (), probe) for session in sessions])
        assert torch.equal(engine._stepper.logits[:2], torch.stack(alone))
    for prompt, logits in zip(prompts, alone, strict=True):
        truth = forward(spec, tiny_tensors(spec).__getitem__, prompt)[-1]
        assert (logits - truth).norm() / truth.norm() < 0.02


@pytest.mark.parametrize("length", [64, 65, 66], ids=["end of a page", "both sides", "new page"])
def test_few_rows_that_write_at_the_edge_of_a_page_equal_those_of_many(length: int) -> None:
    """Attention of one or two rows takes the step's own keys and values from other blocks, not from pages."""
    prompt = [(11 * i * i + 3 * i) % 203 for i in range(length)]
    probe = Sampling(logprobs=0)
    with tiny_engine(tiny_spec()) as engine, engine.session() as session, engine.session() as other:
        session.extend(prompt[: length - 3])
        session.step(prompt[length - 3 :], sampling=probe)
        many = engine._stepper.logits[:4].clone()
        session.extend(prompt[: length - 1])
        session.step(prompt[length - 1 :], sampling=probe)
        assert torch.equal(engine._stepper.logits[:2], many[2:])
        session.extend(prompt)
        session.step(sampling=probe)
        assert torch.equal(engine._stepper.logits[0], many[3])
        other.extend(PROMPT[:5])
        other.step(sampling=probe)  # five rows: its whole prompt
        fifth = engine._stepper.logits[4].clone()
        session.extend(prompt)
        other.extend(PROMPT[:5])
        engine.step_many([StepRequest(other, (), probe), StepRequest(session, (), probe)])
        assert torch.equal(engine._stepper.logits[:2], torch.stack([fifth, many[3]]))


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_every_precision_computes_with_the_weights_it_stands_for(precision: Precision) -> None:
    # Wide enough that a unit of every format comes in several chunks, the last of them shorter.
    spec = replace(tiny_spec("llama", layers=1, tied=False), hidden=1792, vocab_size=72)
    with tiny_engine(spec, precision) as engine, engine.session() as session:
        session.extend([1, 2, 3])
        session.step()
        logits = engine._stepper.logits[2].clone()
        tensors = dense_tensors(engine._prefill._weights)
    truth = forward(spec, tensors.__getitem__, [1, 2, 3])[-1]
    assert (logits - truth).norm() / truth.norm() < 0.02


FILTERS = [
    {},
    {"min_p": 0.02},
    {"top_k": 5},
    {"top_k": 500},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 3, "top_p": 0.99, "min_p": 0.01},
    {"temperature": 0.1, "top_k": 150},
    {"temperature": 4.0, "top_p": 0.5},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_kernel_draws_what_the_sampler_draws(engine: CudaEngine, filters: dict[str, float]) -> None:
    with engine.session() as session:
        session.extend(PROMPT)
        for seed in range(5):
            sampling = Sampling(**{"temperature": 1.0, "seed": seed, **filters})  # type: ignore[arg-type]
            token = session.step(sampling=sampling).tokens[0]
            logits = engine._stepper.logits[0].numpy()
            assert token == choose(logits, sampling, session.length - 1)


def test_equal_logits_leave_the_lowest_ids_at_the_edge_of_a_filter() -> None:
    spec = replace(tiny_spec(layers=1, tied=False), vocab_size=64)
    with tiny_engine(spec) as engine, engine.session() as session:
        engine._prefill._weights.head.zero_()  # every logit is 0: only the noise and the filters decide
        session.extend([1, 2, 3])
        chosen = set()
        for seed in range(12):
            for filters in ({"top_k": 7}, {"top_p": 0.105}, {"top_k": 20, "top_p": 0.34}):
                sampling = Sampling(temperature=1.0, seed=seed, **filters)
                token = session.step(sampling=sampling).tokens[0]
                assert token == choose(engine._stepper.logits[0].numpy(), sampling, session.length - 1)
                chosen.add(token)
        assert max(chosen) <= 6


def test_drafts_never_change_the_text(engine: CudaEngine) -> None:
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3), Sampling(0.8, 20, 0.9, seed=4)):
        text = plain(engine, PROMPT, 10, sampling)
        with engine.session() as session:
            session.extend(PROMPT)
            seen: list[int] = []
            drafts = [text[:4], [text[5], 0, 0], [], [1, 2, 3, 4], text[8:]]
            accepted = []
            for draft in drafts:
                step = session.step(draft, sampling)
                seen += step.tokens
                accepted.append(step.accepted)
            assert seen[:10] == text[: len(seen)]
            assert accepted[0] == 4


def test_results_do_not_depend_on_the_company(engine: CudaEngine) -> None:
    prompts = [PROMPT, PROMPT[:3], [*PROMPT[5:], 9]]
    samplings = [
        Sampling(),
        Sampling(temperature=0.7, seed=1),
        Sampling(temperature=1.3, top_k=5, top_p=0.9, seed=2),
    ]
    alone = [plain(engine, p, 4, s) for p, s in zip(prompts, samplings, strict=True)]
    sessions = [engine.session() for _ in prompts]
    for session, prompt in zip(sessions, prompts, strict=True):
        session.extend(prompt)
    together: list[list[int]] = [[] for _ in prompts]
    for _ in range(4):
        requests = [StepRequest(s, (), sampling) for s, sampling in zip(sessions, samplings, strict=True)]
        for seen, step in zip(together, engine.step_many(requests), strict=True):
            seen += step.tokens
    for session in sessions:
        session.close()
    assert together == alone


def test_sixteen_sessions_of_which_one_joins_late_say_what_each_says_alone() -> None:
    prompts = [[i + 1] for i in range(16)]  # one row each: the emulator pays for every row
    samplings = [Sampling(temperature=0.9 if i % 3 == 0 else 0.0, seed=i) for i in range(16)]
    with tiny_engine(tiny_spec(layers=1, context=128)) as engine:
        alone = [plain(engine, p, 2, s) for p, s in zip(prompts, samplings, strict=True)]
        sessions = [engine.session() for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.extend(prompt)
        seen: list[list[int]] = [[] for _ in prompts]
        # The last one is urgent: it comes when the others are under way; the very next step takes it along.
        for members in (range(15), range(16), range(15, 16)):
            requests = [StepRequest(sessions[i], (), samplings[i]) for i in members]
            assert len(requests) <= engine.max_batch
            for i, taken in zip(members, engine.step_many(requests), strict=True):
                seen[i] += taken.tokens
        assert seen == alone


def test_rollback_extend_and_fork_equal_a_fresh_computation(engine: CudaEngine) -> None:
    with engine.session() as session:
        session.extend(PROMPT)
        for _ in range(3):
            session.step()
        with session.fork() as other:
            other.rollback(12)
            other.extend([*PROMPT[:12], 77, 78])
            branch = [other.step().tokens[0] for _ in range(3)]
        main = list(session.tokens) + [session.step().tokens[0] for _ in range(2)]
    assert branch == plain(engine, [*PROMPT[:12], 77, 78], 3)
    assert main == PROMPT + plain(engine, PROMPT, 5)


def test_content_seen_before_is_reused_by_other_sessions(engine: CudaEngine) -> None:
    long = [(7 * i) % 200 for i in range(150)]
    with engine.session() as session:
        assert session.extend(long).computed >= 150 - 128
        first = session.step().tokens
    with engine.session() as session:
        extended = session.extend([*long, 4, 5])
        assert extended.reused == 128
        session.rollback(150)
        assert session.step().tokens == first


def test_a_follower_that_nobody_asked_for_leaves_no_trace(engine: CudaEngine) -> None:
    text = plain(engine, PROMPT, 6)
    with engine.session() as session:
        session.extend(PROMPT)
        for _ in range(3):
            session.step()  # from the second plain step on the device runs ahead
        session.rollback(len(PROMPT) + 1)
        assert [session.step().tokens[0] for _ in range(5)] == text[1:]


def test_an_interrupt_leaves_a_session_that_can_go_on(engine: CudaEngine) -> None:
    interrupt = Interrupt()
    with engine.session() as session:
        session.extend(PROMPT)
        interrupt.set()
        with pytest.raises(Interrupted):
            session.step(interrupt=interrupt)
        assert list(session.tokens) == PROMPT
        assert [session.step().tokens[0] for _ in range(2)] == plain(engine, PROMPT, 2)


def test_an_interrupt_ends_prefill_between_chunks_and_keeps_what_was_computed() -> None:
    class After(Interrupt):
        """Thrown when it has been looked at so many times."""

        looks = 3

        def check(self) -> None:
            self.looks -= 1
            if self.looks == 0:
                self.set()
            super().check()

    prompt = [(5 * i * i + i) % 203 for i in range(600)]
    with tiny_engine(tiny_spec(context=1024)) as engine:
        engine.prefill_chunk = 128
        with engine.session() as session:
            with pytest.raises(Interrupted):
                session.extend(prompt, After())
            assert session.length == 2 * 128 + 1  # two chunks, and the token a step would begin with
            extended = session.extend(prompt)
            assert extended.reused == 256
            token = session.step().tokens
        with engine.session() as session:
            session.extend(prompt)
            assert session.step().tokens == token


def test_an_interrupt_that_comes_while_the_device_reads_ends_the_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host is done with a portion long before the device is."""
    interrupt, prompt = Interrupt(), [(5 * i * i + i) % 203 for i in range(600)]
    with tiny_engine(tiny_spec(context=1024)) as engine:
        engine.prefill_chunk = 128
        with engine.session() as session:

            def caught_up() -> None:
                if session.resident:
                    interrupt.set()

            monkeypatch.setattr(engine, "synchronize", caught_up)
            with pytest.raises(Interrupted):
                session.extend(prompt, interrupt)
            assert session.resident == 128


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(
            500_000.0,
            scaling="llama3",
            factor=8.0,
            original_context=8192,
        ),
        extend_context(replace(tiny_spec(), context_length=32_768), 131_072).rope,
    ],
    ids=["llama3", "yarn"],
)
def test_stretched_positions_at_128k_are_those_of_the_reference(rope: RopeSpec) -> None:
    # Where in a context of 131,072 a token stands changes only its angles, and those come from one table.
    spec = replace(tiny_spec(layers=1, context=131_072), rope=rope)
    tensors = tiny_tensors(spec)
    weights_rope = tiny_weights(spec).rope
    cosines, sines = rope_tables(spec, 131_072)
    assert weights_rope.shape == (131_072, 32, 2)
    assert torch.equal(weights_rope[-1, :, 0], torch.from_numpy(cosines[-1]))
    assert torch.equal(weights_rope[-1, :, 1], torch.from_numpy(sines[-1]))
    with tiny_engine(replace(spec, context_length=512)) as engine, engine.session() as session:
        session.extend(PROMPT)
        session.step(sampling=Sampling(logprobs=0))
        logits = engine._stepper.logits[0].clone()
    truth = forward(replace(spec, context_length=512), tensors.__getitem__, PROMPT)[-1]
    assert (logits - truth).norm() / truth.norm() < 0.02


def test_logprobs_come_with_the_tokens(engine: CudaEngine) -> None:
    with engine.session() as session:
        session.extend(PROMPT)
        step = session.step(sampling=Sampling(logprobs=3))
        assert step.logprobs[0].token == step.tokens[0] == step.logprobs[0].top[0][0]
        assert step.logprobs[0].logprob <= 0


def test_a_full_context_and_a_full_memory_are_clear_errors() -> None:
    with tiny_engine(tiny_spec(context=128), kv_tokens=128) as engine:
        first = engine.session()
        with pytest.raises(ContextOverflow):
            first.extend([1] * 129)
        first.extend([1] * 120)
        with engine.session() as second, pytest.raises(NotEnoughMemory):
            second.extend([2] * 100)
        assert len(first.step().tokens) == 1
        first.close()
        with engine.session() as third:
            third.extend([2] * 100)
            assert len(third.step().tokens) == 1


def test_misuse_is_answered_in_a_sentence(engine: CudaEngine) -> None:
    session = engine.session()
    with pytest.raises(UsageError):
        session.step()
    with pytest.raises(UsageError):
        session.extend([203])
    session.close()
    session.close()
    with pytest.raises(SessionClosed):
        session.step()
    assert engine.stats().sessions == 0
