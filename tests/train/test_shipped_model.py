"""The weights in the repository are the ones that were trained, and the program completes code with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from keystroke.assist.next_edit.prompt import changes_between, detect
from keystroke.engine.card import card_languages
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
SHA256 = "93f8b6f5a5daca5d81f3e1f7d0af3c8f2bab7d978b48da475cff2cdc3e41ed21"

# By language: the text before the cursor, the text below it, and the line that belongs between them.
OBVIOUS = {
    "python": (
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.",
        "\n\n    def norm(self):\n        return (self.x ** 2 + self.y ** 2) ** 0.5\n",
        "y = y",
    ),
}

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


def test_it_completes_an_obvious_line_of_every_language_that_its_card_names() -> None:
    model = load_model(FILE)
    try:
        assert frozenset(OBVIOUS) == model.languages == card_languages(FILE)
        suggester = ModelSuggester(model)
        for prefix, suffix, line in OBVIOUS.values():
            assert suggester.line(prefix, suffix).text == line
        suggester.close()
        assert not model.knows("go")  # so the assistant shows nothing there but what the project says, too
        assert "go" in model.follows
        assert not model.follows & frozenset(OBVIOUS)
    finally:
        model.engine.close()


def test_it_follows_a_renamed_attribute_to_its_use() -> None:
    old = (
        "class Store:\n    def __init__(self, path):\n        self.path = path\n\n"
        "    def load_items(self):\n        with open(self.path) as file:\n"
        "            return file.readlines()\n\n\n"
        "def main():\n    store = Store('items.txt')\n    items = store.load_items()\n"
        "    for item in items:\n        print(item)\n"
    )
    new = old.replace("self.path = path", "self.name = path")
    model = load_model(FILE)
    try:
        form = detect(model.tokenizer, FILE)
        assert form is not None
        lines = tuple(new.split("\n"))
        history = tuple(changes_between(old, new, "app/config.py"))
        place = form.region(lines, 6)
        case = EditCase("app", "", "app/config.py", history, lines, 2, (place,), 0, None)
        judge = ModelJudge(model, form)
        (chance,) = judge.chances(case)
        said = judge.rewrite(case, 0)
        judge.close()
        assert chance > 0.9
        changed = new.replace("open(self.path)", "open(self.name)").split("\n")
        assert said == changed[place.first : place.last]
    finally:
        model.engine.close()
