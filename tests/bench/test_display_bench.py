"""The benchmark of what is shown counts as it says, and the cases it asks are places, not copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from bench.display import judge, row, whole_from, write_completions
from bench.language_cases import new_places

from keystroke.assist.completion.beginning import WHOLE
from keystroke.engine.load import load_model
from keystroke.engine.model import Model
from keystroke.text.cases import CompletionCase
from keystroke_lab.pretraining.fim import FimCut

KNOWN = "".join(
    f"def test_{n}(client):\n    answer = client.get('/{n}')\n    assert answer.ok\n\n\n" for n in "abc"
)
CASE = CompletionCase(
    FimCut.REST_OF_LINE,
    "project",
    "1.0",
    "MIT",
    "test_pages.py",
    f"{KNOWN}def test_d(client):\n    answer = client.get('/d')\n    assert ans",
    "wer.ok",
    "\n",
)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    model = load_model("embedded")
    yield model
    model.engine.close()


def test_what_is_right_and_what_is_not_is_counted_by_the_file(model: Model) -> None:
    other = replace(CASE, middle="wered_late")
    places = list(write_completions(model, [CASE, other]))
    assert [len(one.steps) > 0 for one in places] == [True, True]
    counted = row(model, places, "balanced")
    assert (counted["places"], counted["shown"], counted["right"]) == (2, 2, 1)
    assert counted["saved_chars"] == len("wer.ok")
    assert counted["wrong_chars"] == len(".ok")


def test_a_stricter_threshold_holds_for_as_long_as_it_lasts(model: Model) -> None:
    (one,) = write_completions(model, [CASE])
    shipped = WHOLE["balanced"]
    offer, _ = judge(model, one, "balanced")
    assert offer is not None
    assert not offer.partial
    with whole_from("balanced", 1.0):
        held, _ = judge(model, one, "balanced")
    assert held is None or held.partial
    assert WHOLE["balanced"] == shipped


def test_a_place_that_another_project_copied_is_asked_once() -> None:
    here = replace(CASE, prefix="a = 1\nb = 2\nc", middle=" = 3")
    copied = replace(here, project="other", prefix="# more\na = 1\nb = 2\nc")
    different = replace(here, prefix="a = 1\nb = 0\nc")
    assert new_places([here, copied, different], []) == [here, different]
    assert new_places([copied, different], [here]) == [different]
