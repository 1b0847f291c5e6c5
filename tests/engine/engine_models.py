"""Small engines of every backend that runs here, on random weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from keystroke.config import load_settings
from keystroke.engine.backends import LoadArguments, choose_backend
from keystroke.engine.base import GREEDY, Engine, Sampling
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.library import no_progress
from keystroke.engine.onnx import native
from keystroke.engine.onnx.convert import convert_model
from keystroke.engine.onnx.engine import OnnxEngine, OnnxGraph, OnnxOptions
from keystroke.engine.onnx.stored import NativeWeights

sys.path.insert(0, str(Path(__file__).parent / "checkpoint"))
sys.path.insert(0, str(Path(__file__).parent / "families"))
from checkpoint_models import saved
from family_models import MODELS as NEWER
from family_models import reference
from stored_models import opened, write_stored

VOCAB, CONTEXT = 96, 1024


def onnx_engine(folder: Path, family: str, precision: str, **options: object) -> OnnxEngine:
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


def mlx_engine(folder: Path, family: str, *kinds: str) -> Engine:
    """An engine on MLX: matrices of `kinds` in a GGUF file, or floats in a folder."""
    pytest.importorskip("mlx.core", reason="MLX is not installed")
    path = folder
    if kinds:
        path = folder / "model.gguf"
        write_stored(path, family, kinds, max_position_embeddings=CONTEXT)
    elif family in NEWER:
        reference(family, max_position_embeddings=CONTEXT).save_pretrained(folder)
    else:
        saved(folder, family, max_position_embeddings=CONTEXT)
    settings = load_settings()
    settings = replace(settings, engine=replace(settings.engine, kv_budget_mb=256))
    request = LoadArguments(path=path, precision="auto", settings=settings, progress=no_progress)
    return choose_backend("mlx").load(request)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB, length)]


def forget(engine: Engine) -> None:
    """Drop every kept prefix."""
    engine.cache.clear()  # type: ignore[attr-defined]


def cold(engine: Engine, tokens: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """The answer of a session that has never seen anything, with nothing to reuse."""
    forget(engine)
    with engine.session() as session:
        session.extend(tokens)
        answer = [session.step((), sampling).tokens[0] for _ in range(count)]
    forget(engine)
    return answer
