"""The layer that predicts the token after the next one: read from both layouts, equal to transformers' own
layers, and a drafter that never changes a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import TOKENS, distance, engine_on, reference, write_gguf
from gguf.constants import GGMLQuantizationType
from predictor_models import ReferencePredictor, save_with_predictor

from keystroke.engine.onnx.engine import OnnxEngine
from keystroke.engine.speculative import layer_draft

PROMPT, READ = 135, 150  # a prompt of more than one run


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(family: str) -> tuple[Any, ReferencePredictor]:
    model = reference(family)
    return model, ReferencePredictor(model)


@pytest.fixture(scope="module")
def folder(models: tuple[Any, ReferencePredictor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("predictor")
    model, predictor = models
    save_with_predictor(model, predictor, place / "model")
    return place


def predicted(engine: OnnxEngine, tokens: list[int]) -> np.ndarray[Any, Any]:
    """The predictor's logits after each token from PROMPT on, while the session reads one after the other."""
    predictor, rows = engine.predictor, []
    assert predictor is not None
    with engine.session() as session:
        session.extend(tokens[:PROMPT])
        for token in tokens[PROMPT:]:
            session.step()
            session.rollback(session.length - 1)
            session.append([token])
            position = session.length - 1
            stream = session.streams.before(position)
            assert stream is not None
            assert session.buffers is not None
            key, value = session.buffers.values[-2:]
            predictor.draft((key, value), token, position, stream, 1)
            rows.append(predictor._logits[0].copy())
    return np.array(rows)


def test_its_logits_are_those_of_transformers(models: tuple[Any, ReferencePredictor], folder: Path) -> None:
    model, predictor = models
    tokens = TOKENS[:READ]
    wanted = predictor.logits(model, tokens)[PROMPT:]
    for precision, most in (("fp32", 0.002), ("int8", 0.16)):
        with engine_on(folder / "model", precision, folder / "cache") as engine:
            assert distance(predicted(engine, tokens), wanted) < most


def test_a_gguf_file_gives_the_same_logits(
    family: str, models: tuple[Any, ReferencePredictor], folder: Path
) -> None:
    model, predictor = models
    tokens = TOKENS[:READ]
    write_gguf(
        folder / "f32.gguf", family, model, GGMLQuantizationType.F32, predictor=dict(predictor.state_dict())
    )
    with engine_on(folder / "f32.gguf", "stored", folder / "cache") as engine:
        assert distance(predicted(engine, tokens), predictor.logits(model, tokens)[PROMPT:]) < 0.002


def test_guesses_are_the_likeliest_tokens_and_change_no_text(
    models: tuple[Any, ReferencePredictor], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, predictor = models
    monkeypatch.setattr(layer_draft, "LEAST_CHANCE", 0.0)
    with engine_on(folder / "model", "fp32", folder / "cache") as engine:
        assert engine.drafts
        with engine.session("plain") as plain:
            plain.extend(TOKENS[:30])
            expected = [token for _ in range(24) for token in plain.step().tokens]
        with engine.session() as session:
            session.extend(TOKENS[:30])
            found, right = list(session.step().tokens), 0
            while len(found) < 24:
                guess = engine.guess(session.tokens)
                assert guess is not None
                right += list(guess.tokens) == predictor.draft(model, list(session.tokens), 3)
                assert list(guess.chances) == sorted(guess.chances, reverse=True)
                found += session.step(guess.tokens).tokens
            assert found[:24] == expected
            assert right >= 15, "keys and values are stored in 16 bits: a near tie may be decided otherwise"
        assert engine.guess([1, 2, 3]) is None  # of no session
