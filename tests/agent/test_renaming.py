"""A task that is nothing but a renaming needs no model."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_task import CHECK, FIXED, Desk, scripted

from keystroke.agent.loop import EndStatus
from keystroke.agent.loop.events import StepEvent
from keystroke.errors import InputError


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.project.write(
        "pkg/sums.py",
        "import calc\nfrom calc import add\n\n\ndef three(a):\n    return add(calc.add(a, a), a)\n",
    )
    made.project.write("other.py", "def f(add):\n    return add\n")
    return made


def test_every_use_in_the_project_follows_and_nothing_else(desk: Desk) -> None:
    before = desk.project.tree()
    asked: list[str] = []

    def script(prompt: str) -> str:
        asked.append(prompt)
        return ""

    chat = scripted(script, small=True)
    ended = desk.task(chat).run("rename add to plus")
    assert ended.status is EndStatus.DONE
    assert not asked
    after = desk.project.tree()
    assert after["calc.py"] == "def plus(a, b):\n    return a - b\n"
    assert after["pkg/sums.py"] == before["pkg/sums.py"].replace("add", "plus")
    assert after["test_calc.py"] == before["test_calc.py"].replace("import add", "import plus").replace(
        "add(1", "plus(1"
    )
    assert after["other.py"] == before["other.py"]
    assert desk.lines(StepEvent) == [
        "rename add to plus, without a model, in calc.py, pkg/sums.py, test_calc.py"
    ]
    desk.project.journal.undo()
    assert desk.project.tree() == before


@pytest.mark.parametrize(
    "instruction", ["rename add to plus and make it add", "rename nothing_here to plus", "rename add to f g"]
)
def test_what_says_more_or_means_nothing_is_the_model_s(desk: Desk, instruction: str) -> None:
    chat = scripted(lambda prompt: f"{FIXED}```\n", small=True)
    desk.task(chat).run(f"{instruction} in calc.py")
    assert not any("without a model" in line for line in desk.lines(StepEvent))


def test_a_name_with_two_definitions_is_asked_about_and_not_sent_to_a_model(desk: Desk) -> None:
    desk.project.write("more.py", "def add(a):\n    return a\n")
    before = desk.project.tree()
    asked: list[str] = []

    def script(prompt: str) -> str:
        asked.append(prompt)
        return ""

    chat = scripted(script, small=True)
    with pytest.raises(InputError, match=r"add is defined 2 times: calc.py line 1 .*more.py line 1"):
        desk.task(chat).run("rename `add` to plus")
    assert not asked
    assert desk.project.tree() == before
    ended = desk.task(chat, files=("more.py",)).run("rename `add` to plus")
    assert ended.status is EndStatus.DONE
    assert {name for name, text in desk.project.tree().items() if text != before[name]} == {"more.py"}


def test_overrides_of_a_method_are_renamed_with_it(desk: Desk) -> None:
    desk.project.write(
        "shapes.py",
        "class Shape:\n    def size(self):\n        return 0\n\n\n"
        "class Square(Shape):\n    def size(self):\n        return 1\n",
    )
    ended = desk.task(scripted(lambda prompt: "", small=True)).run("rename the method size to extent")
    assert ended.status is EndStatus.DONE
    assert "size" not in desk.project.tree()["shapes.py"]


def test_a_renaming_that_its_check_refuses_is_taken_back(desk: Desk) -> None:
    """The check uses the old name, from where it cannot be seen."""
    ended = desk.task(scripted(lambda prompt: f"{FIXED}```\n", small=True), check=CHECK).run(
        "rename `add` to plus"
    )
    assert ended.status is EndStatus.DONE  # by the model, which was asked then
    assert (desk.project.root / "calc.py").read_text() == FIXED


def test_a_member_of_a_class(desk: Desk) -> None:
    desk.project.write("box.py", "class Box:\n    def put(self, a):\n        return a\n\n\nBox().put(1)\n")
    ended = desk.task(scripted(lambda prompt: "", small=True)).run(
        "Rename the method Box.put to store everywhere."
    )
    assert ended.status is EndStatus.DONE
    text = (desk.project.root / "box.py").read_text()
    assert text == "class Box:\n    def store(self, a):\n        return a\n\n\nBox().store(1)\n"
