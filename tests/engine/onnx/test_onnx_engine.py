"""The embedded engine keeps the contract, and every fast path gives the very tokens of the plain one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from keystroke.config import load_settings
from keystroke.engine.base import GREEDY, Sampling
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.load import load_model
from keystroke.engine.locate import resolve
from keystroke.engine.model import Model
from keystroke.engine.onnx.convert import convert_model
from keystroke.engine.onnx.engine import (
    BRIEF_SPIN_US,
    FEW_CORES,
    OnnxEngine,
    OnnxGraph,
)
from keystroke.errors import ModelDamaged, NotEnoughMemory, SessionClosed

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import CONTEXT, cold, prompt
from engine_models import onnx_engine as made

SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnnxEngine]:
    with made(tmp_path_factory.mktemp("one"), "llama", "int8") as engine:
        yield engine


def test_memory_grows_with_the_text_and_not_with_the_context(llama: OnnxEngine) -> None:
    llama.cache.clear()
    with llama.session() as session:
        session.extend(prompt(10))
        session.step()
        small = llama.stats().kv_bytes
        assert small < llama.pool.bytes_for(CONTEXT) / 2
        session.extend(prompt(600))
        assert llama.stats().kv_bytes > small


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


@pytest.mark.parametrize("cores", [2, FEW_CORES + 1])
def test_threads_spin_briefly_where_cores_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: OnnxEngine, cores: int
) -> None:
    monkeypatch.setattr("keystroke.engine.onnx.engine.usable_cores", lambda: cores)
    with made(tmp_path, "llama", "int8") as engine:
        assert engine._runtime is not None
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
