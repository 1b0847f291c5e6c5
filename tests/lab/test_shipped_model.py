"""The weights in the repository are the ones that were trained, and the program completes code with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from keystroke.assist.next_edit.prompt import changes_between, detect_edit_format
from keystroke.engine.card import card_languages
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.load import load_model
from keystroke.engine.locate import shipped_model
from keystroke.engine.tokenizer import load_tokenizer
from keystroke_lab.evaluation.completion import ModelSuggester
from keystroke_lab.evaluation.edit_cases import EditCase, ModelJudge
from keystroke_lab.tokenizer import code_tokenizer

FOLDER = Path(__file__).parents[2] / "models" / "keystroke-80m"
FILE = FOLDER / "keystroke-80m.gguf"
SIZE = 86_392_704
SHA256 = "5c48dc274e1524d6e9c1902c17c5bd0893417ce87a21c3e12c9522db1132d519"

# By language: the text before the cursor, the text below it, and the line that belongs between them.
OBVIOUS = {
    "python": (
        "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.",
        "\n\n    def norm(self):\n        return (self.x ** 2 + self.y ** 2) ** 0.5\n",
        "y = y",
    ),
    "javascript": (
        "function total(items) {\n  let sum = 0;\n  for (const item of items) {\n    sum += item.price;\n"
        "  }\n  return ",
        "\n}\n\nmodule.exports = { total };\n",
        "sum;",
    ),
    "typescript": (
        "export class Point {\n  private x: number;\n  private y: number;\n\n"
        "  constructor(x: number, y: number) {\n    this.x = x;\n    this.",
        "\n  }\n}\n",
        "y = y;",
    ),
    "tsx": (
        "import React from 'react';\n\ninterface Props {\n  title: string;\n}\n\n"
        "export function Header({ title }: Props) {\n  return (\n    <div>\n      <h1>{title}</h1>\n    ",
        "\n  );\n}\n",
        "</div>",
    ),
    "go": (
        "func Read(path string) ([]byte, error) {\n\tdata, err := os.ReadFile(path)\n\tif err != ",
        "\n\t\treturn nil, err\n\t}\n\treturn data, nil\n}\n",
        "nil {",
    ),
    "rust": (
        "pub fn get(&self, key: &str) -> Option<&String> {\n    self.map.get(",
        "\n}\n",
        "key)",
    ),
    "java": (
        "public class Point {\n    private final int x;\n    private final int y;\n\n"
        "    public Point(int x, int y) {\n        this.x = x;\n        this.",
        "\n    }\n}\n",
        "y = y;",
    ),
    "c": (
        "char *copy(const char *text)\n{\n    char *result = malloc(strlen(text) + 1);\n"
        "    if (result == NULL)\n        return ",
        "\n    strcpy(result, text);\n    return result;\n}\n",
        "NULL;",
    ),
    "cpp": (
        "class Point {\npublic:\n    Point(int x, int y) : x_(x), y_(",
        "\n\nprivate:\n    int x_;\n    int y_;\n};\n",
        "y) {}",
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
    assert shipped_model() == FILE


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
        assert not model.supports_language("ruby")  # so the assistant shows nothing there
        assert "c" in model.conservative_languages  # so only what it is very sure of is shown there
        assert model.conservative_languages < frozenset(OBVIOUS)
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
        form = detect_edit_format(model.tokenizer, FILE)
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
