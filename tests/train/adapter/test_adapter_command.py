"""`keystroke train adapter-lessons` and `adapter` as a user runs them, on a model small enough for a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keystroke.clients.cli import main
from keystroke.config import load_settings
from keystroke.engine.load import load_model
from keystroke.gateway.work.registry import local_entry
from keystroke.train import tokenizer as code_tokenizer
from keystroke.train.corpus.hunks import Hunk
from keystroke.train.corpus.trajectories import FileEdit, write_edits
from keystroke.train.export import export_huggingface
from keystroke.train.transformer import CodeModel, Shape

SHAPE = Shape(vocab=320, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=96, context=2048)
LINES = [f"value_{i} = compute({i})" for i in range(50)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer knows ChatML and all that places are marked with."""
    folder = tmp_path_factory.mktemp("model")
    code_tokenizer.save(code_tokenizer.train([Path(__file__).read_text()], SHAPE.vocab), folder / "tok")
    weights = {name: p.bfloat16() for name, p in CodeModel(SHAPE, seed=1).named_parameters()}
    torch.save({"shape": SHAPE.to_json(), "step": 1, "tokens": 1, "weights": weights}, folder / "final.pt")
    export_huggingface(folder / "final.pt", folder / "tok", folder / "hf")
    for path in (folder / "hf").glob("*.json"):
        path.write_text(path.read_text().replace("<|reserved_13|>", "<|fim_pad|>"))
    return folder / "hf"


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edits")
    for project in range(4):
        hunks = [Hunk(at, [LINES[at]], [f"value_{at} = changed({at})"]) for at in (3, 20, 40)]
        write_edits(
            folder / f"p{project}.jsonl.gz",
            [FileEdit(f"p{project}", "MIT", "1", "2", f"f{project}.py", "\n".join(LINES), hunks)],
        )
    return folder


def run(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_lessons_and_an_adapter_are_made_and_the_adapter_is_asked_in_its_format(
    model: Path, edits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lessons = tmp_path / "lessons.npz"
    command = ["train", "adapter-lessons", str(model), "--edits", str(edits), "--out", str(lessons), "--json"]
    assert run(*command, "--tokens", "20000") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["texts"]["next"] > 0
    sizes = ["--rank", "2", "--batch", "2048", "--passes", "0.1", "--device", "cpu", "--json"]
    command = ["train", "adapter", str(model), "--lessons", str(lessons), "--run", str(tmp_path / "run")]
    assert run(*command, *sizes) == 0
    trained = json.loads(capsys.readouterr().out)
    settings = load_settings({
        "paths.cache": str(tmp_path / "cache"),
        "models.both.path": str(model),
        "models.both.adapter": trained["adapter"],
    })  # fmt: skip
    loaded = load_model("both", settings)
    try:
        assert type(local_entry("both", loaded).edits).__name__ == "PlacesFormat"
    finally:
        loaded.engine.close()


def test_a_folder_without_edits_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "adapter-lessons", str(model), "--edits", str(tmp_path), "--out", str(tmp_path / "x")]
    assert run(*command) != 0
    assert "keystroke train edits" in capsys.readouterr().err
