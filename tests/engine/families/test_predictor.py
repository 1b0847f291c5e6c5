"""The layer that predicts the token after the next one: read from both layouts, equal to transformers' own
layers, and a drafter that never changes a text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import TOKENS, distance, engine_on, reference, write_gguf
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from keystroke.engine.onnx import predictor as predictor_module
from keystroke.engine.onnx.engine import OnnxEngine

PROMPT, READ = 135, 150  # a prompt of more than one run


class ReferencePredictor(torch.nn.Module):
    """A model's predictor of transformers' own layers. Row i has token i and the stream of token i - 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        body, config = model.model, copy.deepcopy(model.config)
        config.layer_types = ["full_attention"] * len(config.layer_types)
        norm = type(body.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([type(body.layers[0])(config, 0)])
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)

    @torch.no_grad()
    def streams(self, model: Any, tokens: list[int], before: torch.Tensor) -> torch.Tensor:
        body = model.model
        embedded = self.pre_fc_norm_embedding(body.embed_tokens(torch.tensor([tokens])))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(before)], dim=-1))
        angles = body.rotary_emb(x, torch.arange(len(tokens))[None])
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        out = self.layers[0](x, position_embeddings=angles, attention_mask=mask)
        found: torch.Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return found

    @torch.no_grad()
    def before(self, model: Any, tokens: list[int]) -> torch.Tensor:
        stream = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
        return torch.cat([torch.zeros_like(stream[:, :1]), stream[:, :-1]], dim=1)

    @torch.no_grad()
    def logits(self, model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
        found = model.lm_head(self.streams(model, tokens, self.before(model, tokens)))[0]
        return np.asarray(found)

    @torch.no_grad()
    def draft(self, model: Any, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after `tokens`, each with the predictor's own stream of the one before."""
        tokens, before = list(tokens), self.before(model, tokens)
        for _ in range(count):
            stream = self.streams(model, tokens, before)[:, -1:]
            tokens.append(int(model.lm_head(stream).argmax()))
            before = torch.cat([before, stream], dim=1)
        return tokens[-count:]


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
    model.save_pretrained(place / "model")
    stored = load_file(place / "model" / "model.safetensors")
    further = {f"mtp.{name}": value.contiguous() for name, value in predictor.state_dict().items()}
    save_file({**stored, **further}, place / "model" / "model.safetensors")
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
            stream = session._stream_before(position)
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
    monkeypatch.setattr(predictor_module, "_LEAST_CHANCE", 0.0)
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
