"""`keystroke train adapter-examples` and `adapter` as a user runs them, on a model small enough for a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench.adapter
import httpx
import pytest
import torch

from installed import lend_operators
from keystroke.agent.sandbox import Sandbox, SandboxKind
from keystroke.clients.cli import main
from keystroke.config import load_settings
from keystroke.engine.adapter import read_adapter
from keystroke.engine.load import load_model
from keystroke.gateway.work.registry import local_entry
from keystroke_lab.adapters import pipeline as data
from keystroke_lab.adapters.dataset import forms_of, make_examples
from keystroke_lab.adapters.examples import LEARNED
from keystroke_lab.adapters.pipeline import Amounts, make_data, python_names
from keystroke_lab.corpus.hunks import EditHunk
from keystroke_lab.corpus.names import package_names, shuffled
from keystroke_lab.corpus.package_index import PackageIndex
from keystroke_lab.corpus.trajectories import FileEdit, read_edits, write_edits
from keystroke_lab.draft_heads.texts import read_texts
from keystroke_lab.evaluation.edit_cases import EditCase, read_edit_cases
from keystroke_lab.export.weights import export_huggingface
from keystroke_lab.tokenizer import code_tokenizer
from keystroke_lab.training.transformer import CodeModel, Shape

sys.path.insert(0, str(Path(__file__).parents[1]))
from package_index import Server, module

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
    for project, word in enumerate(("first", "second", "third", "fourth")):
        lines = [line.replace("compute", word) for line in LINES]
        hunks = [EditHunk(at, [lines[at]], [f"value_{at} = {word}_changed({at})"]) for at in (3, 20, 40)]
        write_edits(
            folder / f"p{project}.jsonl.gz",
            [FileEdit(f"p{project}", "MIT", "1", "2", f"f{project}.py", "\n".join(lines), hunks)],
        )
    return folder


def run(*arguments: str) -> int:
    try:
        main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_examples_and_an_adapter_are_made_and_the_adapter_is_asked_in_its_format(
    model: Path, edits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = tmp_path / "examples.npz"
    command = ["train", "adapter-examples", str(model), "--edits", str(edits), "--out", str(examples)]
    assert run(*command, "--tokens", "20000", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["texts"]["next"] > 0
    sizes = ["--rank", "2", "--batch", "2048", "--passes", "0.1", "--device", "cpu", "--json"]
    command = ["train", "adapter", str(model), "--examples", str(examples), "--run", str(tmp_path / "run")]
    assert run(*command, *sizes) == 0
    trained = json.loads(capsys.readouterr().out)
    command[-1] = str(tmp_path / "more")
    assert run(*command, *sizes, "--begin", trained["adapter"]) == 0
    first, trained = trained, json.loads(capsys.readouterr().out)
    steps = read_adapter(Path(trained["adapter"])).facts["steps"]
    assert int(steps) == first["steps"] + trained["steps"]
    lend_operators(tmp_path / "cache")
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


@pytest.mark.slow
def test_a_bare_machine_trains_goes_on_and_answers_and_the_answers_are_scored(
    model: Path, edits: Path, tmp_path: Path
) -> None:
    """As `runs/adapter.sh` does it: token files only, and without what a bare machine does not have."""
    made = make_examples(model, [edits], [], tmp_path / "examples.npz", tokens=8000, heldout=1)
    assert made["heldout"] > 0
    (tmp_path / "manifest.json").write_text(json.dumps({"learned": LEARNED}))
    forms = forms_of(model)
    with patch.object(bench.adapter, "PLACES", 2), patch.object(bench.adapter, "read_edit_cases", few_cases):
        bench.adapter.prepare(forms, [], tmp_path)

        def bare(*arguments: str) -> list[dict[str, object]]:
            ran = subprocess.run(
                [sys.executable, "-P", "-c", BARE, "--model", str(model), "--device", "cpu", *arguments],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr
            return [json.loads(line) for line in ran.stdout.splitlines()]

        train = ["train", "--examples", str(tmp_path / "examples.npz"), "--run", str(tmp_path / "run")]
        train += ["--facts", str(tmp_path / "manifest.json"), "--batch", "2048", "--rank", "2", "--plain"]
        (said,) = bare(*train, "--passes", "0.1")
        assert read_adapter(Path(str(said["adapter"]))).facts["next_edit"] == LEARNED["next_edit"]
        asked = ["answer", "--questions", str(tmp_path / "questions.npz"), "--adapter", str(said["adapter"])]
        asked += ["--heldout", str(tmp_path / "examples-heldout.npz"), "--out", str(tmp_path)]
        rows = bare(*asked, "--strength", "0", "--strength", "1", "--most", "6")
        assert [row["strength"] for row in rows] == [0.0, 1.0]
        heldout = read_texts(tmp_path / "examples-heldout.npz")
        found = bench.adapter.scored(forms, [], tmp_path, heldout, Sandbox(SandboxKind.NONE))
    assert set(found) == {"0", "1"}
    assert {"place", "text_em", "quiet", "fim_rest_em", "psm_line_em"} <= set(found["1"])
    assert found["1"]["place_of"] == 2


BARE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ast_grep_py", "msgspec", "typer", "httpx", "platformdirs", "rich"}:
            raise ImportError(f"a bare machine has no {name}")
sys.meta_path.insert(0, Missing())
from keystroke_lab.adapters.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def few_cases(path: Path) -> list[EditCase]:
    return read_edit_cases(path)[:3]


def a_server() -> Server:
    """Two projects to train on, one of another licence, one too young; a third release comes late."""
    server = Server()
    for name, licence, year in (
        ("one", "MIT", 2015),
        ("two", "MIT", 2015),
        ("gpl", "GPL-3.0", 2015),
        ("young", "MIT", 2026),
    ):
        first = module(name, 60)
        second = first.replace(f"compute_{name}(value, 3)", f"quick_{name}(value, 3)")
        second = second.replace(f"compute_{name}(value, 30)", f"quick_{name}(value, 30)")
        late = second.replace(f"compute_{name}(value, 50)", f"late_{name}(value, 50)")
        late = late.replace(f"compute_{name}(value, 12)", f"late_{name}(value, 12)")
        server.add(
            name,
            {"1.0": {"a.py": first}, "1.1": {"a.py": second}, "1.2": {"a.py": late}},
            licence=licence,
            year=year,
        )
    return server


def test_data_are_made_in_one_step_go_on_where_it_stopped_and_end_on_a_day(
    model: Path, tmp_path: Path
) -> None:
    server = a_server()
    index = PackageIndex("https://index.test", transport=httpx.MockTransport(server))

    def made(folder: Path, until: datetime = datetime(2015, 2, 15, tzinfo=UTC)) -> dict[str, Any]:
        names = ["one", "two", "gpl", "young", "nowhere"]
        amounts = Amounts(tokens=30_000, heldout=0)
        return make_data(folder, model, index, None, names, [], until=until, amounts=amounts, processes=0)

    first = made(tmp_path / "a")
    assert first["collected"] == {"python": {"collected": 2, "licence": 1, "held out": 1, "absent": 1}}
    assert first["licences"] == {"MIT": 2}
    assert first["learned"] == LEARNED
    assert json.loads((tmp_path / "a" / "manifest.json").read_text()) == first
    collected = read_edits(tmp_path / "a" / "collected" / "python" / "one.jsonl.gz")
    assert [edit.release_to for edit in collected] == ["1.1"]  # the third was not out yet
    asked = len(server.asked)
    again = made(tmp_path / "a")
    assert again["collected"] == {"python": {"there": 5}}
    assert len(server.asked) == asked
    assert made(tmp_path / "b")["sha256"] == again["sha256"] == first["sha256"]
    later = made(tmp_path / "c", datetime(2016, 1, 1, tzinfo=UTC))
    assert later["sha256"] != first["sha256"]


def test_names_come_from_debians_and_fewer_are_a_part_of_more() -> None:
    assert package_names(["node-left-pad", "node-left-pad-doc", "node-glob"]) == ["left-pad", "glob"]
    names = [f"n{i}" for i in range(50)]
    assert shuffled(names, "edits") == shuffled(reversed(names), "edits") != names


def test_debians_names_come_first_and_those_drawn_from_the_index_are_not_asked_for_twice() -> None:
    listed = [{"name": name} for name in ("Six", "Zope.Interface", *(f"drawn-{i}" for i in range(40)))]

    def index(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/simple/"
        return httpx.Response(
            200, json={"projects": listed}, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"}
        )

    held = PackageIndex("https://index.test", transport=httpx.MockTransport(index))
    with patch.object(data, "debian_packages", lambda: ["python3-six", "python3-zope-interface"]):
        assert sorted(python_names(9, held, 0)) == ["six", "zope-interface"]
        all_of_them = python_names(9, held, len(listed))
        assert set(all_of_them[:2]) == {"six", "zope-interface"}
        assert len(all_of_them) == len(set(all_of_them)) == len(listed)
        few = python_names(9, held, 10)
        assert few == all_of_them[: len(few)]
        assert len(few) <= 12
        rest = python_names(0, held, len(listed), after=10)  # of the draw what the first ten are not
        assert len(rest) == len(listed) - 10
        assert not {*rest} & {*python_names(0, held, 10)}


def test_a_folder_without_edits_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "x")
    command = ["train", "adapter-examples", str(model), "--edits", str(tmp_path), "--out", out]
    assert run(*command) != 0
    assert "keystroke train edits" in capsys.readouterr().err
