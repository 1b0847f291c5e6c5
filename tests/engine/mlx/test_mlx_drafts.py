"""Drafts by MTP layers and by draft heads on MLX: equal to their references, off where they do not pay, and
never a change of a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from keystroke.config import load_settings
from keystroke.engine.backends import LoadArguments, choose_backend
from keystroke.engine.base import GREEDY, Sampling
from keystroke.engine.checkpoint import open_checkpoint, tensor_shapes
from keystroke.engine.library import no_progress
from keystroke.engine.mlx import weights as weights_module
from keystroke.engine.mlx.engine import MlxEngine, MlxSession
from keystroke.engine.mlx.weights import scaled_rows
from keystroke.engine.speculative import engine_drafter, layer_draft
from keystroke.engine.speculative.cost import CHEAP, cost_table, drafts_can_pay
from keystroke.engine.speculative.head_file import CONFIG, WEIGHTS, HeadWeights
from keystroke.errors import UsageError
from keystroke_lab.draft_heads.reference import ReferenceHead
from keystroke_lab.draft_heads.target import TargetModel

sys.path.insert(0, str(Path(__file__).parents[1] / "families"))
sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))
sys.path.insert(0, str(Path(__file__).parents[1] / "speculative"))
import checkpoint_models
from family_models import TOKENS, distance, reference
from head_models import random_head
from mlx_models import drafting_engine
from predictor_models import ReferencePredictor, save_with_predictor

PROMPT, READ = 30, 42
HOT = Sampling(temperature=0.8, seed=7)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def hybrid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, ReferencePredictor, Path]:
    model, folder = reference(request.param), tmp_path_factory.mktemp("predictor")
    predictor = ReferencePredictor(model)
    save_with_predictor(model, predictor, folder)
    return model, predictor, folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    checkpoint_models.saved(folder, "qwen2", num_hidden_layers=3, max_position_embeddings=512)
    return folder


@pytest.fixture(scope="module")
def head(dense: Path) -> HeadWeights:
    with open_checkpoint(dense) as checkpoint:
        return random_head(checkpoint.spec, vocabulary=60)


@pytest.fixture(autouse=True)
def every_draft_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_draft, "LEAST_CHANCE", 0.0)


def plain(engine: MlxEngine, prompt: list[int], count: int, sampling: Sampling) -> list[int]:
    with engine.session("plain") as session:
        session.extend(prompt)
        return [session.step((), sampling).tokens[0] for _ in range(count)]


def drafted(engine: MlxEngine, session: MlxSession, count: int, sampling: Sampling) -> list[int]:
    """`count` tokens, each step with the engine's guess."""
    start = session.length
    while session.length < start + count:
        guess = engine.guess(session.tokens)
        session.step(guess.tokens if guess is not None else (), sampling)
    return list(session.tokens[start : start + count])


def wrong_after(expected: list[int], at: int) -> list[int]:
    return [(token + 1) % 96 for token in expected[at : at + 2]]


def test_the_predictors_logits_are_those_of_transformers(
    hybrid: tuple[Any, ReferencePredictor, Path],
) -> None:
    model, predictor, folder = hybrid
    wanted, rows = predictor.logits(model, TOKENS[:READ])[PROMPT:], []
    with drafting_engine(folder) as engine, engine.session() as session:
        assert engine.drafter is not None
        session.extend(TOKENS[:PROMPT])
        for token in TOKENS[PROMPT:READ]:
            session.step()
            session.rollback(session.length - 1)
            session.append([token])
            position = session.length - 1
            before = session.streams.before(position)
            assert before is not None
            assert session.memory is not None
            logits, _, _ = engine.drafter.next_logits(token, position, before, session.memory.kv[-1])
            rows.append(np.array(logits))
    assert distance(np.array(rows), wanted) < 1e-4


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_the_predictors_guesses_are_the_likeliest_tokens_and_change_no_text(
    hybrid: tuple[Any, ReferencePredictor, Path], sampling: Sampling
) -> None:
    model, predictor, folder = hybrid
    with drafting_engine(folder) as engine:
        assert engine.drafts
        expected = plain(engine, TOKENS[:PROMPT], 24, sampling)
        with engine.session() as session:
            session.extend(TOKENS[:PROMPT])
            session.step((), sampling)
            for right in (0, 2, 0, 1, 3):
                guess = engine.guess(session.tokens)
                assert guess is not None
                assert list(guess.tokens) == predictor.draft(model, list(session.tokens), 3)
                assert list(guess.chances) == sorted(guess.chances, reverse=True)
                session.step(guess.tokens, sampling)
                at = session.length - PROMPT
                draft = [*expected[at : at + right], *wrong_after(expected, at + right)]
                assert session.step(draft, sampling).accepted == right
            drafted(engine, session, PROMPT + 24 - session.length, sampling)
            assert session.tokens[PROMPT : PROMPT + 24] == expected
        assert engine.guess([1, 2, 3]) is None  # of no session


def features(folder: Path, tokens: Sequence[int], layers: tuple[int, ...]) -> np.ndarray[Any, Any]:
    with open_checkpoint(folder) as checkpoint:
        named = {name: torch.tensor(checkpoint.tensor(name)) for name in tensor_shapes(checkpoint.spec)}
        target = TargetModel(checkpoint.spec, named.__getitem__, 256)
    found: np.ndarray[Any, Any] = target.run_sequences(torch.tensor([list(tokens)]), layers)[1][0].numpy()
    return found


class RowsChosen:
    """Chooses the likeliest, and keeps the logits."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray[Any, Any]] = []

    def __call__(self, row: np.ndarray[Any, Any], _place: int) -> int:
        self.rows.append(row)
        return int(row.argmax())


def test_a_heads_guess_is_that_of_the_plain_arithmetic(dense: Path, head: HeadWeights) -> None:
    with open_checkpoint(dense) as checkpoint:
        ours = ReferenceHead(head, checkpoint.spec, checkpoint.tensor("model.embed_tokens.weight"))
    with drafting_engine(dense, head) as engine, engine.session() as session:
        expected = plain(engine, TOKENS[:PROMPT], 24, GREEDY)
        session.extend(TOKENS[:PROMPT])
        session.step()
        for right in (3, 0, 2):  # after steps whose drafts were accepted in part
            guess = engine.guess(session.tokens)
            assert guess is not None
            tokens = list(session.tokens)
            ours.forget(0)
            ours.observe(features(dense, tokens[:-1], head.config.layers), tokens[1:])
            seen = RowsChosen()
            assert list(guess.tokens) == ours.draft(6, seen)
            chances = np.cumprod([1 / np.exp(row - row.max()).sum() for row in seen.rows])
            np.testing.assert_allclose(guess.chances, chances, rtol=1e-3)
            at = session.length - PROMPT
            assert (
                session.step([*expected[at : at + right], *wrong_after(expected, at + right)]).accepted
                == right
            )


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_heads_guesses_change_no_text(dense: Path, head: HeadWeights, sampling: Sampling) -> None:
    with drafting_engine(dense, head) as engine:
        expected = plain(engine, TOKENS[:PROMPT], 24, sampling)
        with engine.session() as session:
            session.extend(TOKENS[:PROMPT])
            assert drafted(engine, session, 24, sampling) == expected
            with session.fork() as other:  # what one drafts does not reach the other
                session.rollback(PROMPT)
                other.rollback(PROMPT)
                assert drafted(engine, other, 24, sampling) == expected
                assert drafted(engine, session, 24, sampling) == expected
        with engine.session() as again:  # a kept prefix
            assert again.extend([*TOKENS[:PROMPT], expected[0], 5]).reused > PROMPT - 2
            again.step()
            assert engine.guess(again.tokens) is not None


@pytest.fixture
def right_guesses(dense: Path, head: HeadWeights, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlxEngine]:
    monkeypatch.setattr(layer_draft, "LEAST_CHANCE", 0.3)
    with drafting_engine(dense, head) as engine:
        yield engine


def test_a_guess_that_becomes_unlikely_ends_there(right_guesses: MlxEngine) -> None:
    with right_guesses.session() as session:
        session.extend(TOKENS[:PROMPT])
        session.step()
        guess = right_guesses.guess(session.tokens)
        assert guess is not None
        assert all(chance >= 0.3 for chance in guess.chances)
        assert len(guess.tokens) < 6, "random weights are never so sure"


def test_the_keys_and_values_of_a_head_count_and_memory_that_is_short_costs_only_the_draft(
    dense: Path, head: HeadWeights
) -> None:
    with drafting_engine(dense) as without, drafting_engine(dense, head) as engine:
        assert engine.info.kv_bytes_per_token * 3 == without.info.kv_bytes_per_token * 4
        assert engine.info.weight_bytes > without.info.weight_bytes
        with engine.session() as session:
            session.extend(TOKENS[:PROMPT])
            session.step()
            filled = [1, *range(3, 90)] * 3
            session.extend(filled[:255])  # a page; the draft needs another
            session.step()
            engine.kv_budget = engine.bytes_for(256)
            assert engine.guess(session.tokens) is None
            assert session.step().accepted == 0


def test_on_a_cpu_no_guess_pays_and_the_layer_goes(hybrid: tuple[Any, ReferencePredictor, Path]) -> None:
    with drafting_engine(hybrid[2]) as engine:
        before, expected = engine.info, plain(engine, TOKENS[:PROMPT], 8, GREEDY)
        engine.measure_drafts()
        assert not engine.drafts
        assert engine_drafter(engine) is None
        assert engine.info.kv_bytes_per_token < before.kv_bytes_per_token
        assert engine.info.weight_bytes < before.weight_bytes
        with engine.session() as session:
            session.extend(TOKENS[:PROMPT])
            assert drafted(engine, session, 8, GREEDY) == expected
            assert session.memory is not None
            assert len(session.memory.kv) == engine.spec.layers - len(engine.spec.delta.layers)  # type: ignore[union-attr]


def test_what_a_guess_takes_is_measured_beside_a_step(dense: Path, head: HeadWeights) -> None:
    with drafting_engine(dense, head) as engine:
        assert engine._draft_cost() > 0
        engine.measure_drafts(gpu=True)  # whichever it finds
        assert engine.drafts == (engine.drafter is not None)
        assert engine.stats().cached_tokens == 0


def test_drafts_pay_if_all_of_them_together_cost_less_than_the_steps_they_save() -> None:
    by_rows = [float(rows) for rows in range(40)]
    assert not drafts_can_pay(by_rows, 0.0, 6)
    assert drafts_can_pay(CHEAP, 0.0, 1)
    assert drafts_can_pay(CHEAP, 0.5, 3)
    assert not drafts_can_pay(CHEAP, 1.0, 6)
    late = cost_table({1: 1.0, 2: 2.2, 4: 2.4})  # only longer drafts pay
    assert not drafts_can_pay(late, 0.1, 1)
    assert drafts_can_pay(late, 0.1, 3)


def test_eight_bits_with_a_scale_for_a_row_stay_as_they_are() -> None:
    chance = np.random.default_rng(0)
    values = chance.integers(-127, 128, (6, 64)).astype(np.int8)
    scales = chance.uniform(0.001, 0.01, 6).astype(np.float32)
    matrix = scaled_rows(values, scales, mx.float32)
    wanted = values * scales[:, None]
    assert np.abs(np.array(matrix.rows(mx.arange(6))) - wanted).max() < 1e-6
    assert sum(array.nbytes for array in matrix.arrays) < 2 * values.nbytes
    odd = scaled_rows(values[:, :20], scales, mx.float32)
    assert (np.array(odd.rows(mx.arange(6))) == wanted[:, :20]).all()


def save_head(folder: Path, head: HeadWeights) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(head.config.to_json())
    tensors: dict[str, Any] = {f"{name}.weight": norm for name, norm in head.norms.items()}
    for name, (values, scales) in head.matrices.items():
        tensors |= {f"{name}.weight": values, f"{name}.scale": scales}
    save_file({**tensors, "vocabulary": head.vocabulary}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("gpu", [True, False])
def test_the_backend_reads_what_drafts_only_on_a_gpu(
    hybrid: tuple[Any, ReferencePredictor, Path],
    dense: Path,
    head: HeadWeights,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: bool,
) -> None:
    """Without the measurement, which finds on a CPU that nothing pays."""
    monkeypatch.setattr(weights_module, "runs_on_gpu", lambda: gpu)
    monkeypatch.setattr(weights_module, "compute_type", lambda: mx.float32)  # the CPU build has experts in it
    monkeypatch.setattr(MlxEngine, "measure_drafts", lambda _engine: None)
    settings = load_settings({"speculation.draft_head": str(save_head(tmp_path / "head", head))}, environ={})
    off = replace(settings, speculation=replace(settings.speculation, enabled=False))
    for path in (dense, hybrid[2]):
        for chosen, expected in ((settings, gpu), (off, False)):
            request = LoadArguments(path=path, precision="auto", settings=chosen, progress=no_progress)
            with choose_backend("mlx").load(request) as engine:
                assert engine.drafts is expected
                if expected:
                    with engine.session() as session:
                        session.extend(TOKENS[:PROMPT])
                        session.step()
                        assert engine.guess(session.tokens) is not None


def test_a_head_of_another_model_is_refused(dense: Path, tmp_path: Path) -> None:
    checkpoint_models.saved(tmp_path, "qwen2", hidden_size=32)
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 32
    with open_checkpoint(tmp_path) as checkpoint:
        other = random_head(checkpoint.spec, vocabulary=60)
    with pytest.raises(UsageError, match="sizes differ"):
        drafting_engine(dense, other)
