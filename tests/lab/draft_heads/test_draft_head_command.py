"""`keystroke train draft-head` as a user runs it, on a model small enough for a CPU; and its asks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from keystroke.clients.cli import main
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.speculative.head_file import open_head
from keystroke.engine.templates import ChatTemplate, detect_fim
from keystroke.engine.tokenizer import load_tokenizer
from keystroke_lab.draft_heads.definitions import definitions
from keystroke_lab.draft_heads.prompts import SHARES, PromptFormats, make_prompts
from keystroke_lab.draft_heads.sources import source_texts
from keystroke_lab.export.weights import export_huggingface
from keystroke_lab.tokenizer import code_tokenizer
from keystroke_lab.training.transformer import CodeModel, Shape

SHAPE = Shape(vocab=320, hidden=64, layers=3, heads=2, kv_heads=1, head_dim=32, intermediate=96, context=256)
CODE = {
    "cart.py": '''"""A cart."""


class Cart:
    """Holds what a customer wants to buy, and what it costs."""

    def __init__(self):
        self.lines = []

    def add(self, name, price, count=1):
        """Put some of a thing into the cart, at its price of today."""
        if count < 1:
            raise ValueError("nothing to add")
        self.lines.append((name, price, count))

    def total(self):
        return sum(price * count for _, price, count in self.lines)
''',
    "list.go": """package list

// Reverse puts the numbers of a list into the opposite order, in place.
func Reverse(numbers []int) {
	for i, j := 0, len(numbers)-1; i < j; i, j = i+1, j-1 {
		numbers[i], numbers[j] = numbers[j], numbers[i]
	}
}

func Sum(numbers []int) int {
	total := 0
	for _, number := range numbers {
		total += number
	}
	return total
}
""",
}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    for name, text in CODE.items():
        (folder / name).write_text(text)
    (folder / "notes.txt").write_text("no code at all " * 40)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    code_tokenizer.save(code_tokenizer.train(list(CODE.values()), SHAPE.vocab), folder / "tok")
    made = CodeModel(SHAPE, seed=1)
    weights = {
        name: (p + 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0))).bfloat16()
        for name, p in made.named_parameters()
    }
    torch.save({"shape": SHAPE.to_json(), "step": 1, "tokens": 1, "weights": weights}, folder / "final.pt")
    export_huggingface(folder / "final.pt", folder / "tok", folder / "hf")
    return folder / "hf"


def run(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_one_command_makes_a_head_and_run_again_makes_nothing_twice(
    model: Path, code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--asks 14 --heldout 4 --answer 12 --slots 5 --batch 512 --vocabulary 64 --width 64 --passes 2"
    command = ["train", "draft-head", str(model), "--code", str(code), "--run", str(tmp_path), *sizes.split()]
    assert run(*command, "--device", "cpu", "--json") == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["bytes"] == (tmp_path / "head" / "head.safetensors").stat().st_size
    for name in ("greedy", "drawn"):
        steps = measured[name]["tokens_a_step"]
        assert steps == sorted(steps)
        assert 1.0 <= steps[0] <= 2.0
    with open_checkpoint(model) as checkpoint:
        open_head(tmp_path / "head").config.check_target(checkpoint.spec)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npz")}
    files[tmp_path / "final.pt"] = (tmp_path / "final.pt").stat().st_mtime_ns
    assert run(*command, "--device", "cpu") == 0
    assert "tokens a step, greedy" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_what_cannot_work_is_one_sentence(
    model: Path, code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["train", "draft-head", str(model), "--run", str(tmp_path / "run"), "--device", "cpu"]
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, said in (
        (["--code", str(tmp_path / "none"), "--answer", "12"], "there is no folder"),
        (["--code", str(empty), "--answer", "12"], "there is no code"),
        (["--code", str(code), "--answer", "250"], "allow shorter answers"),
        (["--code", str(code), "--asks", "5", "--heldout", "5"], "beyond the held-out ones"),
    ):
        assert run(*base, *arguments) != 0
        complaint = capsys.readouterr().err
        assert said in complaint
        assert "Traceback" not in complaint


def test_definitions_are_found_with_what_is_said_of_them() -> None:
    found = {d.name: d for name, text in CODE.items() for d in definitions(name, text)}
    assert {"Cart", "add", "Reverse", "Sum"} <= set(found)
    assert found["Cart"].is_class
    assert found["add"].said.startswith("Put some of a thing into the cart")
    assert found["Reverse"].said.startswith("Reverse puts the numbers")
    assert found["Reverse"].head == "func Reverse(numbers []int)"
    assert found["Sum"].said == ""


def test_asks_are_of_every_kind_and_the_same_for_the_same_seed(model: Path, code: Path) -> None:
    tokenizer = load_tokenizer(model)
    chat = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:")
    formats = PromptFormats(tokenizer, chat, detect_fim(tokenizer, model))
    sources = source_texts([code])
    assert sorted(source.path for source in sources) == sorted(CODE)
    made = list(make_prompts(sources, formats, 400, seed=3, longest=2000))
    assert set(Counter(ask.kind for ask in made)) == set(SHARES)
    assert made == list(make_prompts(sources, formats, 400, seed=3, longest=2000))
    assert {ask.temperature > 0 for ask in made} == {True, False}
    without = PromptFormats(tokenizer, None, formats.fim)
    assert {ask.kind for ask in make_prompts(sources, without, 40, seed=3)} <= {"fim", "plain"}
