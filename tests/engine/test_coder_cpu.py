"""The real code model on a CPU, as its file stores it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coder_model import needed_coder
from keystroke.config import load_settings
from keystroke.engine.generation import Generation, GenerationParams
from keystroke.engine.load import load_model
from keystroke.engine.model import Model
from keystroke.engine.speculative import drafter_for

pytestmark = [pytest.mark.coder, pytest.mark.timeout(600)]
QUESTION = "Repeat this line of Python and nothing else: `total = sum(value * 2 for value in values)`"


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    path = needed_coder()
    settings = load_settings({"engine.kind": "onnx", "model.precision": "stored", "engine.context": 1024})
    loaded = load_model(path, settings)
    with loaded.engine:
        yield loaded


def answer(model: Model, *, drafts: bool) -> Generation:
    assert model.chat is not None
    prompt = model.chat.tokens(model.tokenizer, [{"role": "user", "content": QUESTION}])
    drafter = drafter_for(model.engine) if drafts else None
    with model.engine.session() as session:
        found = Generation(model, session, prompt, GenerationParams(max_tokens=32), drafter=drafter)
        for _ in found:
            pass
    return found


def test_a_line_is_repeated_and_drafts_change_nothing(model: Model) -> None:
    plain, drafted = answer(model, drafts=False), answer(model, drafts=True)
    assert "total = sum(value * 2 for value in values)" in plain.text
    assert drafted.tokens == plain.tokens
    assert drafted.stats.steps < plain.stats.steps
