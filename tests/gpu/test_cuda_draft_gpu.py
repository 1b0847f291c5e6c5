"""A draft head on the GPU: the kernel against the plain arithmetic, and texts that stay what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_models import DEVICE, WIDE, blocks, needs_hopper, tensors_of, text

from keystroke.engine.base import GREEDY, Sampling
from keystroke.engine.checkpoint.spec import EMBEDDING
from keystroke.engine.cuda.driver import GpuLauncher
from keystroke.engine.cuda.engine import CudaEngine
from keystroke.engine.cuda.plan import Plan
from keystroke.engine.cuda.weights import build_weights
from keystroke.engine.speculative.head_file import NORMS, HeadConfig, HeadWeights
from keystroke_lab.draft_heads.reference import ReferenceHead
from keystroke_lab.draft_heads.target import TargetModel

pytestmark = needs_hopper

LAYERS = (1, 2, 3)
PROMPT = text(150)


def random_head() -> HeadWeights:
    spec = WIDE
    sizes = (spec.vocab_size, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, 3072, 8192)
    config = HeadConfig(spec.name, *sizes, LAYERS, 1e-6)
    chance = np.random.default_rng(3)
    matrices = {}
    for name, (rows, columns) in config.matrices.items():
        values = chance.normal(0, 40, (rows, columns)).clip(-127, 127).astype(np.int8)
        values[:, 0] = 127
        matrices[name] = values, np.full(rows, 1 / 40 / columns**0.5, np.float32)
    norms = {name: chance.normal(1, 0.1, spec.hidden).astype(np.float32) for name in NORMS}
    vocabulary = np.sort(chance.permutation(spec.vocab_size)[:8192]).astype(np.int32)
    return HeadWeights(config, matrices, norms, vocabulary)


@pytest.fixture(scope="module")
def engine() -> CudaEngine:
    given = tensors_of(WIDE)
    weights = build_weights(Plan(WIDE, "bf16", blocks()), lambda name, _: given[name], DEVICE)
    return CudaEngine(weights, GpuLauncher(weights.plan, DEVICE), 65_536, draft_head=random_head())


def test_the_kernel_drafts_what_the_plain_arithmetic_does(engine: CudaEngine) -> None:
    given = tensors_of(WIDE)
    target = TargetModel(WIDE, given.__getitem__, 256)
    reference = ReferenceHead(random_head(), WIDE, given[EMBEDDING].float().cpu().numpy())
    with engine.session() as session:
        session.extend(PROMPT)
        engine.guess(session.tokens)
        session.step()
        guess = engine.guess(session.tokens)
        tokens = list(session.tokens)
    assert guess is not None
    features = (
        target.run_sequences(torch.tensor([tokens[:-1]], device=DEVICE), LAYERS)[1][0].float().cpu().numpy()
    )
    reference.observe(features, tokens[1:])
    seen: list[np.ndarray] = []

    def choose(row: np.ndarray, _: int) -> int:
        seen.append(row)
        return int(row.argmax())

    drafted = reference.draft(len(guess.tokens), choose)
    best, second = np.sort(seen[0])[:-3:-1]
    assert guess.tokens[0] == drafted[0] or best - second < 0.05 * abs(best)
    chance = np.exp(seen[0] - seen[0].max())
    assert guess.chances[0] == pytest.approx(chance.max() / chance.sum(), rel=0.2)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_and_without_guesses(engine: CudaEngine, sampling: Sampling) -> None:
    with engine.session() as session:
        session.extend(PROMPT)
        expected = [session.step(sampling=sampling).tokens[0] for _ in range(80)]
    with engine.session() as session:
        session.extend(PROMPT)
        ahead = 0
        while session.length < len(PROMPT) + 80:
            guess = engine.guess(session.tokens)
            ahead += guess is not None and guess.ahead
            session.step(() if guess is None else guess.tokens, sampling)
        assert list(session.tokens[len(PROMPT) : len(PROMPT) + 80]) == expected
    assert ahead > 10  # most steps were launched before the host knew what they verify
