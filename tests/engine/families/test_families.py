"""Every family computes what transformers computes, and a row's bits do not depend on how it was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_models import (
    MODELS,
    TOKENS,
    distance,
    engine_logits,
    engine_on,
    reference,
    reference_logits,
    write_gguf,
)
from gguf.constants import GGMLQuantizationType

from keystroke.engine.onnx.engine import OnnxEngine

# Keys and values have 16 bits, so that even plain numbers are not exact. Models as small as these amplify
# the rounding of their weights: the order of operations is checked by the first two.
MOST_DISTANCE = {"fp32": 0.002, "fp16": 0.006, "int8": 0.12, "int4": 0.8}


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> Any:
    return reference(family)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("family")
    model.save_pretrained(place / "model")
    return place


@pytest.fixture(scope="module")
def engine(folder: Path) -> OnnxEngine:
    return engine_on(folder / "model", "int8", folder / "cache")


@pytest.mark.parametrize("precision", MOST_DISTANCE)
def test_logits_are_those_of_transformers(model: Any, folder: Path, precision: str) -> None:
    wanted = reference_logits(model, TOKENS)[-100:]
    with engine_on(folder / "model", precision, folder / "cache") as engine:
        assert distance(engine_logits(engine, TOKENS, 100), wanted) < MOST_DISTANCE[precision]


def test_a_gguf_file_gives_the_same_logits(family: str, model: Any, folder: Path) -> None:
    if not MODELS[family][3]:
        pytest.skip("GGUF files cannot express this configuration")
    wanted = reference_logits(model, TOKENS)[-100:]
    for kind, most in (("F32", 0.002), ("Q8_0", 0.12)):
        write_gguf(folder / f"{kind}.gguf", family, model, GGMLQuantizationType[kind])
        with engine_on(folder / f"{kind}.gguf", "stored", folder / "cache") as engine:
            assert engine.info.architecture == open_family(family)
            assert distance(engine_logits(engine, TOKENS, 100), wanted) < most


def open_family(family: str) -> str:
    return family.removesuffix("_mixed").removesuffix("_direct")


def test_reading_a_prompt_gives_the_bits_of_single_steps(engine: OnnxEngine) -> None:
    together = engine_logits(engine, TOKENS[:60], 60)
    with engine.session() as session:
        for at, token in enumerate(TOKENS[:60]):
            alone = session._forward([token], at, 1, None)
            assert np.array_equal(alone[0], together[at]), at
        session._held.clear()


def test_rejected_drafts_and_rollbacks_leave_no_trace(engine: OnnxEngine) -> None:
    dice = np.random.default_rng(1)
    with engine.session() as plain, engine.session("drafts") as drafted:
        plain.extend(TOKENS[:20])
        drafted.extend(TOKENS[:20])
        expected = [token for _ in range(40) for token in plain.step().tokens]
        found: list[int] = []
        while len(found) < 40:
            draft = expected[len(found) : len(found) + int(dice.integers(0, 5))]
            wrong = [int(t) for t in dice.integers(3, 96, int(dice.integers(0, 4)))]
            found += drafted.step([*draft, *wrong]).tokens
            if dice.random() < 0.3:
                back = int(dice.integers(0, min(len(found), 12) + 1))
                found = found[: len(found) - back]
                drafted.rollback(20 + len(found))
        assert found[:40] == expected


def test_forks_continue_separately(engine: OnnxEngine) -> None:
    with engine.session() as session:
        session.extend(TOKENS[:30])
        session.step()
        fork = session.fork()
        first = [session.step().tokens for _ in range(5)]
        fork.append(TOKENS[:3])
        other = [fork.step().tokens for _ in range(5)]
        fork.close()
        again = [session.step().tokens for _ in range(3)]
    with engine.session("alone") as alone:
        alone.extend(TOKENS[:30])
        alone.step()
        assert [alone.step().tokens for _ in range(8)] == first + again
    with engine.session("fork alone") as alone:
        alone.extend(TOKENS[:30])
        alone.step()
        alone.append(TOKENS[:3])
        assert [alone.step().tokens for _ in range(5)] == other
