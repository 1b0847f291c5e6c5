"""What real weights write, token by token the likeliest: texts that must not change."""

from __future__ import annotations

import pytest

from keystroke.config import load_settings
from keystroke.engine.library import ModelLibrary
from keystroke.engine.load import load_model

pytestmark = [pytest.mark.coder, pytest.mark.timeout(600)]
FIBONACCI = """\
    if n <= 0:
        return "Invalid input"
    elif n == 1:
        return 0
    elif n == 2:
"""
TEXTS = [
    ("coder-small", "def fibonacci(n):\n", FIBONACCI),
    (
        "coder-small",
        "The capital of France is",
        " Paris. The capital of the United States is Washington D.C. The capital of the United Kingdom is "
        "London. The capital of the Netherlands is Amsterdam. The capital",
    ),
    ("coder", "def fibonacci(n):\n", FIBONACCI),
    (
        "coder",
        "The capital of France is",
        " Paris. Paris is the largest city in France and the second-largest city in Europe. Paris is the "
        "cultural and historical center of France and is home to many of",
    ),
    (
        "gemma-3-270m",
        "def fibonacci(n):\n",
        "    if n == 0:\n        return 0\n    elif n == 1:\n        return 1\n    elif n == 2",
    ),
    (
        "gemma-3-270m",
        "The capital of France is",
        " the capital of the country of France. It is the largest city in France and the second largest city "
        "in Europe. It is located in the middle of the country",
    ),
]


@pytest.mark.parametrize(("name", "prompt", "text"), TEXTS)
def test_a_text_is_the_one_it_was(name: str, prompt: str, text: str) -> None:
    settings = load_settings({"engine.kind": "onnx", "model.precision": "stored", "engine.context": 1024})
    library = ModelLibrary(settings.paths.models)
    if name not in library.names():
        pytest.skip(f"{name} is not here: run `keystroke models add {name}`, or give it the file")
    model = load_model(library.path(library.get(name)), settings)
    with model.engine, model.engine.session() as session:
        session.extend(model.prompt(prompt))
        tokens = [token for _ in range(32) for token in session.step().tokens]
    assert model.tokenizer.decode(tokens) == text
