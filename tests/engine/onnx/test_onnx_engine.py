"""The embedded engine keeps the contract, and every fast path gives the very tokens of the plain one."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from keystroke.config import load_settings
from keystroke.engine.base import GREEDY, Interrupt, Sampling
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.load import load_model
from keystroke.engine.locate import resolve
from keystroke.engine.model import Model
from keystroke.engine.onnx import native
from keystroke.engine.onnx.convert import convert_model
from keystroke.engine.onnx.engine import (
    BRIEF_SPIN_US,
    FEW_CORES,
    PREFILL_CHUNK,
    OnnxEngine,
    OnnxGraph,
    OnnxOptions,
)
from keystroke.engine.onnx.stored import NativeWeights
from keystroke.errors import ContextOverflow, Interrupted, ModelDamaged, NotEnoughMemory, SessionClosed

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
from checkpoint_models import saved
from stored_models import opened, write_stored

VOCAB, CONTEXT = 96, 1024
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)


def made(folder: Path, family: str, precision: str, **options: object) -> OnnxEngine:
    if precision in ("native", "portable"):
        path = folder / "model.gguf"
        write_stored(path, family, ("Q4_K", "Q6_K", "Q5_K"), max_position_embeddings=CONTEXT)
        return opened(path, folder / "cache", precision, **options)
    saved(
        folder, family, max_position_embeddings=CONTEXT, hidden_size=128, num_attention_heads=4, head_dim=32
    )
    precision, _, ours = precision.partition("+")  # attention by our own operator, where it can be had
    own = native.operators_library(load_settings().paths.cache) if ours else None
    if ours and own is None:
        pytest.skip("no C compiler here, or not the vectors")
    stored = None if own is None else NativeWeights(own, {})
    with open_checkpoint(folder) as checkpoint:
        model = convert_model(checkpoint, precision=precision, native=bool(ours), cache=folder / "cache")
        graph = OnnxGraph(model, checkpoint.spec, precision, stored)
        return OnnxEngine(graph, OnnxOptions(threads=2, **options))  # type: ignore[arg-type]


ENGINES = [
    ("llama", "int8"),
    ("qwen2", "int4"),
    ("qwen3", "int8"),
    ("llama", "int8+ours"),
    ("qwen3", "int4+ours"),
    ("qwen2", "native"),
    ("llama", "native"),
    ("qwen3", "portable"),
]


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxEngine]:
    family, precision = request.param
    with made(tmp_path_factory.mktemp(family), family, precision) as engine:
        yield engine


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxEngine]:
    with made(tmp_path_factory.mktemp("one"), "llama", "int8") as engine:
        yield engine


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


def cold(engine: OnnxEngine, tokens: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """The answer of a session that has never seen anything, with nothing to reuse."""
    engine.cache.clear()
    with engine.session() as session:
        session.extend(tokens)
        answer = [session.step((), sampling).tokens[0] for _ in range(count)]
    engine.cache.clear()
    return answer


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_of_rows_gives_what_one_by_one_gives(engine: OnnxEngine, sampling: Sampling) -> None:
    for length in (1, 2, 3, 17, 130, 301):
        tokens = prompt(length, length)
        expected = cold(engine, tokens, 40, sampling)
        for width in (1, 2, 3, 7, 16, 31):
            with engine.session() as session:
                session.extend(tokens)
                got: list[int] = []
                while len(got) < 40:
                    step = session.step(expected[len(got) : len(got) + width], sampling)
                    got += step.tokens
            assert got[:40] == expected
            engine.cache.clear()


def test_wrong_drafts_change_nothing(engine: OnnxEngine) -> None:
    tokens = prompt(50)
    expected = cold(engine, tokens, 30)
    dice = random.Random(3)
    with engine.session() as session:
        session.extend(tokens)
        got: list[int] = []
        while len(got) < 30:
            right = expected[len(got) : len(got) + dice.randrange(6)]
            got += session.step([*right, *prompt(dice.randrange(5), dice.randrange(99))]).tokens
    assert got[:30] == expected


def test_logits_do_not_depend_on_how_the_prompt_was_cut(engine: OnnxEngine) -> None:
    tokens = prompt(PREFILL_CHUNK * 2 + 9)
    exact = Sampling(logprobs=20)
    engine.cache.clear()
    with engine.session() as whole:
        whole.extend(tokens)
        expected = whole.step((), exact)
    engine.cache.clear()
    with engine.session() as pieces:
        for end in (1, 2, 5, 40, 41, 200, len(tokens)):
            pieces.extend(tokens[:end])
            if end < len(tokens):
                pieces.step()
        assert pieces.step((), exact) == expected
    engine.cache.clear()


def test_random_extend_rollback_and_fork_agree_with_recomputing(engine: OnnxEngine) -> None:
    dice = random.Random(5)
    sessions = [engine.session()]
    sessions[0].extend(prompt(20))
    for _ in range(40):
        session = dice.choice(sessions)
        match dice.randrange(4):
            case 0:
                session.step(prompt(dice.randrange(4), dice.randrange(99)))
            case 1:
                session.rollback(dice.randrange(1, session.length + 1))
            case 2:
                keep = dice.randrange(session.length)
                session.extend([*session.tokens[:keep], *prompt(dice.randrange(1, 30), dice.randrange(99))])
            case 3 if len(sessions) < 4:
                sessions.append(session.fork())
    for session in sessions:
        tokens = list(session.tokens)
        after = [session.step().tokens[0] for _ in range(5)]
        session.close()
        assert after == cold(engine, tokens, 5)
    assert engine.stats().sessions == 0


def test_a_prefix_is_reused_across_sessions_by_content(llama: OnnxEngine) -> None:
    tokens = prompt(200)
    expected = cold(llama, [*tokens, 5, 6, 7], 12)
    with llama.session() as first:
        first.extend(tokens)
        first.step()
    with llama.session() as second:
        assert second.extend([*tokens, 5, 6, 7]).reused >= 199
        assert [second.step().tokens[0] for _ in range(12)] == expected


def test_a_prefix_is_borrowed_from_a_living_session(llama: OnnxEngine) -> None:
    llama.cache.clear()
    tokens = prompt(150, 8)
    expected = cold(llama, [*tokens[:100], 1, 2, 3], 6)
    with llama.session() as first, llama.session() as second:
        first.extend(tokens)
        after = [first.step().tokens[0] for _ in range(3)]
        assert second.extend([*tokens[:100], 1, 2, 3]).reused == 100
        assert [second.step().tokens[0] for _ in range(6)] == expected
        first.rollback(150)
        assert [first.step().tokens[0] for _ in range(3)] == after


def test_memory_grows_with_the_text_and_not_with_the_context(llama: OnnxEngine) -> None:
    llama.cache.clear()
    with llama.session() as session:
        session.extend(prompt(10))
        session.step()
        small = llama.stats().kv_bytes
        assert small < llama.pool.bytes_for(CONTEXT) / 2
        session.extend(prompt(600))
        assert llama.stats().kv_bytes > small


def test_the_context_is_used_to_its_last_token(llama: OnnxEngine) -> None:
    with llama.session() as session:
        session.extend(prompt(CONTEXT - 3))
        for _ in range(3):
            session.step([1, 2, 3, 4])
            if session.length == CONTEXT:
                break
        while session.length < CONTEXT:
            session.step()
        with pytest.raises(ContextOverflow, match="is full"):
            session.step()
        with pytest.raises(ContextOverflow, match="1,025 tokens"):
            session.extend(prompt(CONTEXT + 1))


def test_the_budget_is_kept_by_forgetting_the_oldest_first(tmp_path: Path) -> None:
    with made(tmp_path, "llama", "int8", kv_budget=3 << 20) as engine:
        for seed in range(8):
            with engine.session() as session:
                session.extend(prompt(300, seed))
                session.step()
            assert engine.pool.used <= 3 << 20
        assert engine.stats().cached_tokens > 0
        living = engine.session()
        keep = [engine.session() for _ in range(99)]

        def fill() -> None:
            for seed, session in enumerate(keep):
                session.extend(prompt(900, seed))

        with pytest.raises(NotEnoughMemory, match=r"engine\.kv_budget_mb"):
            fill()
        for session in keep:
            session.close()
        living.extend(prompt(100))
        assert living.step().accepted == 0


def test_an_interrupt_ends_a_run_under_way_and_the_session_goes_on(llama: OnnxEngine) -> None:
    llama.cache.clear()
    tokens = prompt(1000, 4)
    expected = cold(llama, tokens, 5)
    with llama.session() as session:
        interrupt = Interrupt()
        threading.Timer(0.001, interrupt.set).start()

        def read_again_and_again() -> None:  # a fast machine may finish one prompt within the millisecond
            while True:
                session.extend(tokens, interrupt)
                session.rollback(0)
                session._held.clear()

        with pytest.raises(Interrupted):
            read_again_and_again()
        session.extend(tokens)
        assert [session.step().tokens[0] for _ in range(5)] == expected


@pytest.mark.parametrize("cores", [2, FEW_CORES + 1])
def test_threads_spin_briefly_where_cores_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: OnnxEngine, cores: int
) -> None:
    monkeypatch.setattr("keystroke.engine.onnx.engine.usable_cores", lambda: cores)
    with made(tmp_path, "llama", "int8") as engine:
        set_up = engine._runtime.get_session_options()
        try:
            limit = set_up.get_session_config_entry("session.intra_op.spin_duration_us")
        except RuntimeError:  # not set: the runtime's own
            limit = ""
        assert limit == (str(BRIEF_SPIN_US) if cores <= FEW_CORES else "")
        assert set_up.get_session_config_entry("session.force_spinning_stop") == "1"
        assert cold(engine, prompt(40), 8) == cold(llama, prompt(40), 8)


def test_a_closed_session_or_engine_says_so(tmp_path: Path) -> None:
    engine = made(tmp_path, "llama", "int8")
    session = engine.session()
    session.extend(prompt(4))
    engine.close()
    with pytest.raises(SessionClosed):
        session.step()


def test_a_damaged_graph_is_one_sentence(tmp_path: Path) -> None:
    with made(tmp_path, "llama", "int8") as engine:
        spec = engine.spec
    broken = tmp_path / "model.onnx"
    broken.write_bytes(b"\x08\x0anot a graph")
    with pytest.raises(ModelDamaged, match="could not open"):
        OnnxEngine(OnnxGraph(broken, spec, "int8"))


# On the real model


@pytest.fixture(scope="module")
def real() -> Iterator[Model]:
    model = load_model("smollm2")
    with model.engine:
        yield model


CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
"""


@pytest.mark.model
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_real_model_writes_the_same_with_and_without_drafts(real: Model, sampling: Sampling) -> None:
    engine = real.engine
    assert isinstance(engine, OnnxEngine)
    tokens = real.prompt(CODE)
    expected = cold(engine, tokens, 48, sampling)
    dice = random.Random(1)
    with engine.session() as session:
        session.extend(tokens)
        got: list[int] = []
        while len(got) < 48:
            draft = expected[len(got) : len(got) + dice.randrange(9)]
            if draft and dice.random() < 0.3:
                draft[-1] = (draft[-1] + 1) % real.tokenizer.vocab_size
            got += session.step(draft, sampling).tokens
    assert got[:48] == expected


@pytest.mark.model
def test_the_real_model_continues_a_reused_prefix_as_from_cold(real: Model) -> None:
    engine = real.engine
    assert isinstance(engine, OnnxEngine)
    tokens = real.prompt(CODE)
    with engine.session() as session:
        session.extend(tokens)
        grown = list(tokens)
        for _ in range(20):
            grown += session.step().tokens
    with engine.session() as session:
        assert session.extend(grown).reused > len(tokens)
        warm = [session.step().tokens[0] for _ in range(12)]
    assert warm == cold(engine, grown, 12)


@pytest.mark.model
@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.02), ("int4", 0.5)])
def test_fewer_bits_stay_near_floats_on_real_text(real: Model, precision: str, bound: float) -> None:
    """Mean KL divergence from 32-bit floats over this file. The weights come from a 4-bit file, so 4 bits are
    rounded twice: hence the wide bound."""
    tokens = real.tokenizer.encode(Path(__file__).read_text())[:256]
    path = resolve("smollm2", load_settings())
    rows = []
    for name in ("fp32", precision):
        with open_checkpoint(path) as checkpoint:
            model = convert_model(checkpoint, precision=name, cache=load_settings().paths.cache)
            spec = checkpoint.spec
        with OnnxEngine(OnnxGraph(model, spec, name)) as engine, engine.session() as session:
            logits = session._forward(tokens, 0, len(tokens), None).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        rows.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    reference, candidate = rows
    divergence = (np.exp(reference) * (reference - candidate)).sum(axis=1).mean()
    assert 0 <= divergence < bound
