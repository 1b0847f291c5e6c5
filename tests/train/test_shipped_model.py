"""The weights in the repository are the ones that were trained, and the program completes code with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from keystroke.assist.next_edit.prompt import Region, changes_between, detect
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.load import load_model
from keystroke.engine.locate import shipped
from keystroke.engine.tokenizer import load_tokenizer
from keystroke.train import tokenizer as code_tokenizer
from keystroke.train.edit_cases import EditCase, ModelJudge
from keystroke.train.evaluate import ModelSuggester

FOLDER = Path(__file__).parents[2] / "models" / "keystroke-80m"
FILE = FOLDER / "keystroke-80m.gguf"
SIZE = 86_392_544
SHA256 = "02bda6f8586b045241c4fd7d8afeb588f135221e841bd1f0ced38a9a9f4f4fa6"

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not FILE.exists(), reason="the weights are not in this checkout"),
]


def test_the_file_is_whole_and_small_enough_to_commit() -> None:
    assert FILE.stat().st_size == SIZE < 95_000_000
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == SHA256


def test_it_is_the_model_the_program_uses_by_default() -> None:
    assert shipped() == FILE


def test_its_shape_and_tokenizer_belong_together() -> None:
    with open_checkpoint(FILE) as checkpoint:
        spec = checkpoint.spec
    assert (spec.hidden, spec.layers, spec.heads, spec.kv_heads, spec.intermediate) == (768, 8, 12, 4, 2304)
    inside = load_tokenizer(FILE)
    assert inside.vocab_size == spec.vocab_size == 32_768
    text = Path(__file__).read_text(encoding="utf-8")
    outside = code_tokenizer.plain(code_tokenizer.load(FOLDER))
    assert inside.encode(text) == outside.encode(text).ids
    assert json.loads((FOLDER / "keystroke.json").read_text())["fim_order"] == "spm"


def test_it_completes_an_obvious_line() -> None:
    model = load_model(FILE)
    try:
        suggester = ModelSuggester(model)
        prefix = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self."
        suffix = "\n\n    def norm(self):\n        return (self.x ** 2 + self.y ** 2) ** 0.5\n"
        assert suggester.line(prefix, suffix).text == "y = y"
        suggester.close()
    finally:
        model.engine.close()


def test_it_follows_a_renamed_function_to_its_call() -> None:
    old = (
        "def load_config(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
        "def main():\n    config = load_config('app.ini')\n    print(config)\n"
    )
    new = old.replace("def load_config", "def read_config")
    model = load_model(FILE)
    try:
        form = detect(model.tokenizer, FILE)
        assert form is not None
        lines = tuple(new.split("\n"))
        history = tuple(changes_between(old, new, "app/config.py"))
        case = EditCase("app", "", "app/config.py", history, lines, 0, (Region(4, len(lines)),), 0, None)
        judge = ModelJudge(model, form)
        said = judge.rewrite(case, 0)
        judge.close()
        assert said is not None
        assert "    config = read_config('app.ini')" in said
    finally:
        model.engine.close()
