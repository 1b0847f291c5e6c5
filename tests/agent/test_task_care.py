"""Tasks that do not waste what the user has: files, time, and work that was interrupted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_task import BROKEN, CHECK, FIXED, Desk, call, in_turn, scripted

from keystroke.agent.attempts import attempt_samplings
from keystroke.agent.chat.model import AnswerOptions
from keystroke.agent.loop import EndStatus
from keystroke.agent.loop.events import NoteEvent, StepEvent
from keystroke.agent.loop.focused_check import affected_tests, focused_command
from keystroke.agent.sandbox import CompletedCommand
from keystroke.agent.sandbox.busy_clock import BusyClock
from keystroke.agent.tools import ReadTool, SearchTool, Toolbox, ToolInvocation
from keystroke.agent.workspace import Overlay
from keystroke.assist.edit import plan_edit
from keystroke.engine.base import GREEDY, Interrupt
from keystroke.errors import Forbidden


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# ── read-only files ──


def test_a_read_only_file_is_refused_before_the_work(desk: Desk) -> None:
    target = desk.project.root / "calc.py"
    target.chmod(0o444)
    asked: list[str] = []

    def script(prompt: str) -> str:
        asked.append(prompt)
        return f"{FIXED}```\n"

    with pytest.raises(Forbidden, match=r"calc\.py is read-only"):
        desk.task(scripted(script, small=True)).run("make add in calc.py add")
    assert not asked

    class Writer:
        def write(self, messages: object, prediction: object) -> list[str]:
            raise AssertionError("the model must not be asked")

    with pytest.raises(Forbidden, match=r"calc\.py is read-only"):
        plan_edit(desk.project.workspace, ["calc.py"], "make add add", Writer())  # type: ignore[arg-type]
    target.chmod(0o644)


# ── continuing ──


def test_an_interrupted_task_keeps_its_instruction_and_its_file(desk: Desk) -> None:
    def stopped(prompt: str) -> str:
        desk.interrupt.set()
        return "x" * 1000

    ended = desk.task(scripted(stopped, small=True)).run("make add in calc.py add")
    assert ended.status is EndStatus.INTERRUPTED
    record = desk.records.latest()
    assert record.found == ("calc.py",)
    desk.interrupt = Interrupt()
    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return f"{FIXED}```\n"

    ended = desk.task(scripted(script, small=True)).run("and be quick about it", record)
    assert ended.status is EndStatus.DONE
    assert desk.project.tree()["calc.py"] == FIXED
    assert "make add in calc.py add" in prompts[0]
    assert "and be quick about it" in prompts[0]


def test_what_is_said_of_a_finished_task_is_about_the_same_file(desk: Desk) -> None:
    desk.task(scripted(lambda prompt: f"{FIXED}```\n", small=True)).run("make add in calc.py add")
    record = desk.records.latest()
    negative = "def add(a, b):\n    return -(a + b)\n"
    ended = desk.task(scripted(lambda prompt: f"{negative}```\n", small=True)).run("now negate it", record)
    assert ended.status is EndStatus.DONE
    assert desk.project.tree()["calc.py"] == negative


# ── attempts ──


def batched(model_width: int, *answers: str) -> object:
    chat = scripted(in_turn(*answers), small=True)
    chat.model.engine.max_batch = model_width
    chat.parallel_attempts = model_width
    return chat


@pytest.mark.parametrize(
    ("width", "joint", "check", "most"),
    [(16, 16, CHECK, 8), (1, 8, CHECK, 8), (1, 2, CHECK, 3), (1, 1, CHECK, 3), (1, 8, "", 1)],
)
def test_attempts_are_as_many_as_are_nearly_free_or_run_together_where_one_may_be_refused(
    desk: Desk, width: int, joint: int, check: str, most: int
) -> None:
    chat = batched(width, f"{BROKEN}```\n")
    chat.joint_attempts = joint  # type: ignore[attr-defined]
    desk.task(chat, check=check, attempts=0, tries=1).run("make add in calc.py add")  # type: ignore[arg-type]
    receipts = [e.receipt for e in desk.events if hasattr(e, "receipt") and e.receipt.attempts]
    assert [receipt.attempts for receipt in receipts] == [most]


def test_on_a_slow_engine_the_second_attempt_starts_only_when_the_first_fails(desk: Desk) -> None:
    ended = desk.task(batched(1, f"{FIXED}```\n"), check=CHECK, attempts=0).run(  # type: ignore[arg-type]
        "make add in calc.py add"
    )
    assert ended.status is EndStatus.DONE
    assert [r.attempts for r in ended.receipts] == [1]


def test_a_question_that_was_asked_before_is_not_asked_the_same_way() -> None:
    assert attempt_samplings(3)[0] == GREEDY
    again = attempt_samplings(3, greedy=False, seed=1000)
    assert len(again) == 3
    assert all(sampling.temperature > 0 for sampling in again)


# ── time ──


def test_the_time_that_is_neither_the_model_s_nor_a_command_s_is_reported(desk: Desk) -> None:
    ended = desk.task(scripted(lambda prompt: f"{FIXED}```\n", small=True), check=CHECK).run("mend calc.py")
    assert ended.status is EndStatus.DONE
    assert ended.overhead_s > 0


def test_time_in_which_two_things_are_under_way_counts_once() -> None:
    clock = BusyClock()
    with clock:
        with clock:
            pass
        assert not clock.seconds  # one is still under way
    assert clock.seconds > 0


# ── damage ──


def test_a_command_of_the_model_that_breaks_a_file_is_not_applied(desk: Desk) -> None:
    spoil = call("run", command="sh -c 'echo \"def broken(:\" > calc.py'")
    before = desk.project.tree()
    chat = scripted(in_turn(spoil, "Done.", "Done."), small=False, held=False)
    ended = desk.task(chat, may_run=True).run("tidy calc.py")
    assert ended.status is EndStatus.FAILED
    assert "does not parse" in ended.line
    assert desk.project.tree() == before


def test_a_command_may_rewrite_files_as_it_likes(desk: Desk) -> None:
    """A formatter or a generator leaves hardly a line as it was, and nothing is asked of the model for it."""
    long = "".join(f"def f{i}(a, b):\n    return a+b\n\n\n" for i in range(20))
    for i in range(3):
        desk.project.write(f"m{i}.py", long)
    rewriting = call("run", command="sh -c 'for f in m?.py; do echo \"x = 1\" > $f; done'")
    chat = scripted(in_turn(rewriting, "Done."), small=False, held=False)
    ended = desk.task(chat, may_run=True).run("bring the files into shape")
    assert ended.status is EndStatus.DONE
    assert desk.project.tree()["m2.py"] == "x = 1\n"
    assert not [event for event in desk.events if isinstance(event, NoteEvent) and event.failed]


def test_what_a_model_edits_after_a_command_is_judged_against_the_command_s_text(desk: Desk) -> None:
    overlay = desk.project.overlay()
    overlay.write_by_command("calc.py", "def add(a, b):\n    return a + b\n")
    assert overlay.text_after_command("calc.py") == FIXED
    overlay.write("calc.py", "x = 1\n")  # now it is the model's
    overlay.write_by_command("calc.py", "x = 2\n")
    assert overlay.text_after_command("calc.py") == FIXED
    again = Overlay.restore(desk.project.workspace, overlay.snapshot())
    assert again.text_after_command("calc.py", "nothing") == "nothing"
    overlay.write("calc.py", FIXED)
    again = Overlay.restore(desk.project.workspace, overlay.snapshot())
    assert again.text_after_command("calc.py", "nothing") == FIXED


def test_a_model_with_tools_is_told_what_its_change_broke(desk: Desk) -> None:
    half = call("edit", path="calc.py", old="def add(a, b):", new="def add(a, b, scale=1):")
    rest = call("edit", path="calc.py", old="    return a - b", new="    return (a + b) * scale")
    chat = scripted(in_turn(half, "Done.", rest, "Done."), small=False)
    ended = desk.task(chat).run("let add multiply its result by a scale")
    assert ended.status is EndStatus.DONE
    assert desk.project.tree()["calc.py"] == "def add(a, b, scale=1):\n    return (a + b) * scale\n"
    assert any("the parameter scale and never uses it" in line for line in desk.lines(NoteEvent))


def test_markup_never_reaches_a_file_by_a_tool(desk: Desk) -> None:
    bad = call("edit", path="calc.py", old="    return a - b", new="    return a + b\n*** End Patch x")
    chat = scripted(in_turn(bad, "Done."), small=False)
    desk.task(chat).run("mend add")
    assert desk.lines(StepEvent) == ["change calc.py"]
    assert any("markup of a tool call" in line for line in desk.lines(NoteEvent))
    assert "Patch" not in desk.project.tree()["calc.py"]


# ── rules of the project ──


def test_a_broken_rule_is_asked_about_once_and_then_reported(desk: Desk) -> None:
    desk.project.write("AGENTS.md", "Never call `print`.\nRun the tests with `pytest -q`.\n")
    loud = "def add(a, b):\n    print(a)\n    return a + b\n"
    ended = desk.task(scripted(in_turn(f"{loud}```\n", f"{FIXED}```\n"), small=True)).run(
        "mend add in calc.py"
    )
    assert ended.status is EndStatus.DONE
    assert desk.project.tree()["calc.py"] == FIXED
    assert any("--check runs them" in line for line in desk.lines(NoteEvent))
    desk.project.write("calc.py", BROKEN)
    ended = desk.task(scripted(lambda prompt: f"{loud}```\n", small=True)).run("mend add in calc.py")
    assert ended.status is EndStatus.DONE
    assert any("and the change uses print" in line for line in desk.lines(NoteEvent))


# ── models with tools ──


def test_a_model_that_calls_tools_gets_them_and_one_that_does_not_rewrites(desk: Desk) -> None:
    def able(prompt: str) -> str:
        if "Read the file area.py." in prompt:
            return call("read", path="area.py")
        if "area must multiply" in prompt:
            return call("edit", path="area.py", old="return width + height", new="return width * height")
        if "return a + b" in prompt:
            return "Done."
        return call("edit", path="calc.py", old="    return a - b", new="    return a + b")

    chat = scripted(able, small=False, name="able")
    chat.probe_tools = True
    ended = desk.task(chat).run("make add in calc.py add")
    assert ended.status is EndStatus.DONE
    assert desk.lines(StepEvent) == ["change calc.py"]
    desk.project.write("calc.py", "def add(a, b):\n    return a - b\n")
    chat = scripted(lambda prompt: f"{FIXED}```\n", small=False, name="unable", held=False)
    chat.probe_tools = True
    ended = desk.task(chat).run("make add in calc.py add")
    assert ended.status is EndStatus.DONE
    assert any("does not call tools reliably" in line for line in desk.lines(NoteEvent))
    assert desk.project.tree()["calc.py"] == FIXED


def test_several_calls_of_one_answer_are_all_made(desk: Desk) -> None:
    first = call("edit", path="calc.py", old="    return a - b", new="    return a + b")
    second = call("edit", path="notes/plan.txt", old="second", new="third")
    chat = scripted(in_turn(f"{first}\n{second}", "Done."), small=False, held=False)
    ended = desk.task(chat).run("mend add and the plan")
    assert ended.status is EndStatus.DONE
    assert desk.project.tree()["calc.py"] == FIXED
    assert desk.project.tree()["notes/plan.txt"] == "first\nthird\n"


def test_a_conversation_that_is_too_long_loses_old_results_and_goes_on(desk: Desk) -> None:
    for number in range(6):
        desk.project.write(f"long{number}.txt", f"{number} " * 1200)
    reads = [call("read", path=f"long{number}.txt") for number in range(6)]
    edit = call("edit", path="calc.py", old="    return a - b", new="    return a + b")
    chat = scripted(in_turn(*reads, edit, "Done."), small=False)
    chat.model.engine.info = dataclasses.replace(chat.model.engine.info, context_length=9000)
    ended = desk.task(chat, max_tokens=300).run("read all and mend add")
    assert ended.status is EndStatus.DONE
    assert desk.project.tree()["calc.py"] == FIXED
    assert any("characters of results are left out" in line for line in desk.lines(NoteEvent))


# ── the tests that fail, first ──


def test_the_tests_that_fail_are_run_first_where_all_of_them_are_slow() -> None:
    output = (
        "..F.\nFAILED tests/test_a.py::test_one - assert 1 == 2\nFAILED tests/test_a.py::test_[x]\n1 failed\n"
    )
    slow = CompletedCommand(1, output, seconds=9.0)
    wanted = "python -m pytest -q tests/test_a.py::test_one 'tests/test_a.py::test_[x]'"
    assert focused_command("python -m pytest -q", slow) == wanted
    assert focused_command("python -m pytest -q", dataclasses.replace(slow, seconds=1.0)) is None
    assert focused_command("make test && pytest", slow) is None
    assert focused_command("pytest", None) is None
    named = "pytest -k one -q tests/test_a.py"
    assert focused_command(named, slow) == wanted.replace("python -m pytest -q", "pytest -k one -q")
    assert focused_command("pytest --maxfail 2", slow) is None  # the value of an option, or a folder


def test_the_tests_of_what_is_changed_come_first_where_all_pass(desk: Desk) -> None:
    desk.project.write("test_other.py", "def test_other():\n    pass\n")
    desk.project.write("tests/__init__.py", "")
    assert affected_tests(desk.project.overlay(), "calc.py") == ["test_calc.py"]
    slow = CompletedCommand(0, "9 passed", seconds=9.0)
    first = focused_command("pytest -q", slow, lambda: ["test_calc.py"])
    assert first == "pytest -q test_calc.py"
    assert focused_command("pytest -q", slow) is None
    assert focused_command("pytest -q test_calc.py", slow, lambda: ["test_calc.py"]) is None


# ── reading ahead ──


def test_a_call_is_known_as_soon_as_its_arguments_are_complete(desk: Desk) -> None:
    answer = f"{call('read', path='calc.py')}\n{call('search', query='add')}"
    model = scripted(lambda prompt: answer, small=False)
    box = Toolbox([ReadTool(desk.project.overlay()), SearchTool(desk.project.overlay())])
    written: list[str] = []
    known: list[tuple[ToolInvocation, str]] = []
    reply = model.reply(
        [{"role": "user", "content": "go"}],
        AnswerOptions(tools=box.specifications()),
        on_text=written.append,
        on_call=lambda made: known.append((made, "".join(written))),
    )
    assert tuple(made for made, _ in known) == reply.calls
    assert [made.name for made in reply.calls] == ["read", "search"]
    assert "search" not in known[0][1]


def test_what_is_read_behind_a_change_of_the_same_answer_has_the_change(desk: Desk) -> None:
    change = call("edit", path="calc.py", old="    return a - b\n", new="    return a + b\n")
    first = "\n".join([call("read", path="calc.py"), change, call("read", path="calc.py")])
    prompts: list[str] = []
    answers = in_turn(first, "Done.")

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return answers(prompt)

    ended = desk.task(scripted(script, small=False)).run("make add add")
    assert ended.status is EndStatus.DONE
    assert prompts[1].count("calc.py, lines 1 to 2 of 2:") == 2
    before, after = prompts[1].split("calc.py, lines 1 to 2 of 2:")[1:]
    assert "return a - b" in before.partition("<end>")[0]
    assert "return a + b" in after.partition("<end>")[0]
