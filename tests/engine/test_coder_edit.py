"""The adapter that is shipped: whole, for the model it names, and choosing what it was seen to choose."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from coder_model import needed_coder
from keystroke.assist.next_edit.places import adapter_places_format
from keystroke.assist.next_edit.places_question import PLACE
from keystroke.config import load_settings
from keystroke.engine.adapter import read_adapter
from keystroke.engine.load import load_model
from keystroke.engine.locate import adapter_path
from keystroke_lab.evaluation.edit_cases import PlacesJudge, read_edit_cases

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "models" / "coder-edit"


def test_its_files_are_those_of_its_card() -> None:
    for line in (FOLDER / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest
    size = (FOLDER / "adapter.safetensors").stat().st_size
    assert size <= 60_000_000
    assert f"{size:,} bytes" in (FOLDER / "README.md").read_text()


def test_it_is_what_a_name_with_edit_means_and_fits_the_model_it_names() -> None:
    assert adapter_path("coder:edit", load_settings()) == FOLDER / "adapter.safetensors"
    adapter = read_adapter(FOLDER / "adapter.safetensors")
    assert adapter.facts["base"] == "coder"
    assert adapter.facts["next_edit"] == "3"
    assert (
        adapter.facts["fim_order"] == json.loads((FOLDER / "data.json").read_text())["learned"]["fim_order"]
    )
    assert len(adapter.pairs) == 28 * 4


# By number among the cases: the place that a GPU in bfloat16 found likeliest, and how likely. None: silence.
SEEN = {3: 1, 6: 5, 12: 6, 8: None}


@pytest.mark.coder
@pytest.mark.timeout(900)
def test_it_chooses_on_a_cpu_what_it_chose_on_a_gpu() -> None:
    needed_coder()
    cases = read_edit_cases(ROOT / "bench" / "data" / "edits.jsonl.xz")
    settings = load_settings({"engine.kind": "onnx", "model.precision": "stored", "engine.context": 4096})
    model = load_model("coder:edit", settings)
    with model.engine:
        form = adapter_places_format(model.tokenizer, model.adapter_facts)
        assert form is not None
        judge = PlacesJudge(model, form)
        for number, seen in SEEN.items():
            case = cases[number]
            order = form.build(case.history, case.path, case.lines, case.places, case.cursor).places
            chances = dict(zip(case.places, judge.chances(case), strict=True))
            sure = [1 + order.index(place) for place, how in chances.items() if how >= PLACE["balanced"]]
            assert sure == ([] if seen is None else [seen]), (number, chances)
        judge.close()
