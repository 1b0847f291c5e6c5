"""What a conversation says of the tools: lines that were read, and calls that led nowhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keystroke.assist.tool_calls.tools import OfferedTool, short_toolset
from keystroke.assist.tool_calls.usable import SHORT_FILE, ToolConstraints, usable_tools
from keystroke.gateway.api.answer_form import AnswerForm
from keystroke.gateway.api.tool_history import (
    WrittenEdits,
    exhausted_tools,
    last_user_text,
    short_files,
    texts_read,
    written_edits,
)
from keystroke.protocol.items import Item

RUN = OfferedTool("exec_command", parameters={"properties": {"cmd": {"type": "string"}}, "required": ["cmd"]})
PATCH = OfferedTool("apply_patch", custom=True, grammar=("lark", 'start: "*** Begin Patch"'))
SHOWN = short_toolset([RUN, PATCH])


def items(*said: dict[str, Any]) -> list[Item]:
    return msgspec.convert(list(said), list[Item])


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def run(cmd: str, output: str, number: int = 1) -> list[dict[str, Any]]:
    call = {
        "type": "function_call",
        "name": "exec_command",
        "call_id": f"r{number}",
        "arguments": f'{{"cmd": "{cmd}"}}',
    }
    return [call, {"type": "function_call_output", "call_id": f"r{number}", "output": output}]


def patch(text: str, output: str, number: int = 1) -> list[dict[str, Any]]:
    call = {"type": "custom_tool_call", "name": "apply_patch", "call_id": f"p{number}", "input": text}
    return [call, {"type": "custom_tool_call_output", "call_id": f"p{number}", "output": output}]


def test_an_instruction_is_no_line_of_a_file_and_a_fenced_block_is() -> None:
    said = items(user("Fix a.py:\n```python\nx = 1\n```\nplease"))
    assert texts_read(said, SHOWN) == ["x = 1\n"]
    assert last_user_text(said).startswith("Fix a.py")


def test_what_tools_print_is_read_and_what_reports_their_running_is_not() -> None:
    report = "Exit code: 0\nWall time: 0.1 seconds\nOutput:\nprint('hi')\n"
    said = items(user("fix"), *run("cat a.py", report), *patch("*** Begin Patch", "Success. Updated a.py"))
    assert texts_read(said, SHOWN) == ["print('hi')\n"]


@pytest.mark.parametrize(
    ("turns", "spent"),
    [
        ([], set()),
        (run("ls", "a.py"), set()),
        (run("ls", "a.py") + run("ls", "a.py", 2), {"exec_command"}),
        (run("ls", "a.py") + run("cat a.py", "x", 2), set()),
        (run("cat x", "cat: x: No such file"), set()),  # a command may be tried another way at once
        (patch("p", "Success. Updated the following files:\nM a.py"), set()),
        (patch("p", "apply_patch verification failed: Failed to find expected lines"), {"apply_patch"}),
        (patch("p", "failed") + run("cat a.py", "x = 1"), set()),
        (run("ls", "a") + run("cat a", "x", 2) + run("ls", "a", 3), {"exec_command"}),
        (run("ls", "a") + patch("p", "Success") + run("ls", "a", 2), set()),
        (
            patch("p", "failed") + run("ls", "a") + patch("p", "failed", 2) + run("cat b", "", 2),
            {"apply_patch"},
        ),
    ],
)
def test_what_led_nowhere_is_not_open_in_the_next_turn(turns: list[dict[str, Any]], spent: set[str]) -> None:
    assert exhausted_tools(items(user("fix"), *turns), SHOWN) == spent
    assert not exhausted_tools(items(user("fix"), *turns, user("try again")), SHOWN)


def test_some_tool_is_always_left() -> None:
    names = [
        s.name
        for s in usable_tools(SHOWN, ToolConstraints(seen_lines=["x\n"], exhausted={"apply_patch"})).shown
    ]
    assert names == ["exec_command"]
    assert usable_tools(
        SHOWN, ToolConstraints(seen_lines=["x\n"], exhausted={"apply_patch", "exec_command"})
    ).shown
    assert [s.name for s in usable_tools(SHOWN, ToolConstraints()).shown] == ["exec_command", "write_file"]


CREATED = "*** Begin Patch\n*** Add File: /w/a.py\n+print('hello')\n*** End Patch\n"
CHANGED = "*** Begin Patch\n*** Update File: b.py\n@@\n keep\n-old\n+new\n*** End Patch\n"


def test_what_was_written_this_turn_is_known_by_its_lines_and_files() -> None:
    work = written_edits(items(user("fix"), *patch(CREATED, "Success"), *patch(CHANGED, "Success", 2)), SHOWN)
    assert work == WrittenEdits({"print('hello')", "new"}, {"/w/a.py", "b.py"})


@pytest.mark.parametrize(
    "turns",
    [
        patch(CREATED, "apply_patch verification failed"),
        patch(CREATED, "Success") + run("pytest", "1 failed"),
        patch(CREATED, "Success") + run("python a.py", "Exit code: 1\nOutput:\n"),
        [*patch(CREATED, "Success"), user("now change it back")],
    ],
)
def test_work_that_failed_or_is_asked_about_again_may_be_changed(turns: list[dict[str, Any]]) -> None:
    assert written_edits(items(user("fix"), *turns), SHOWN) == WrittenEdits()


def test_a_small_model_is_not_let_undo_its_own_edit() -> None:
    form = AnswerForm(SHOWN)
    turns = [*patch(CREATED, "Success"), *run("cat /w/a.py", "Output:\nprint('hello')\n", 2)]
    usable = form.with_usable_tools(items(user("In a.py and b.py, say hello."), *turns)).usable
    names = [s.name for s in usable.shown]  # type: ignore[union-attr]
    assert names == ["exec_command"]
    more = items(
        user("In a.py and b.py, say hello."), *turns, *run("cat b.py", "Output:\nprint('other')\n", 3)
    )
    usable = form.with_usable_tools(more).usable
    assert usable is not None
    assert [s.name for s in usable.shown] == ["exec_command", "write_file"]
    assert usable.shown[1].parameters["properties"]["path"]["enum"] == ["b.py"]  # and not a.py again


def test_no_file_is_written_over_by_one_who_has_not_looked() -> None:
    def usable(text: str, *turns: dict[str, Any]) -> list[str]:
        form = AnswerForm(SHOWN).with_usable_tools(items(user(text), *turns))
        return [s.name for s in form.usable.shown]  # type: ignore[union-attr]

    assert usable("In a.py, say hello.") == ["exec_command"]
    assert usable("Create a.py that says hello.") == ["exec_command", "write_file"]
    assert "write_file" in usable("In a.py, say hello.", *run("cat a.py", "print('hi')"))


def test_a_file_that_was_only_copied_is_changed_by_its_lines() -> None:
    copied = "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+y = 2\n*** End Patch\n"
    turns = [*run("cat a.py", "Exit code: 0\nOutput:\nx = 1\ny = 2\n"), *patch(copied, "Success")]
    assert written_edits(items(user("Fix a.py."), *turns), SHOWN) == WrittenEdits(copied={"a.py"})
    form = AnswerForm(SHOWN).with_usable_tools(items(user("Fix a.py."), *turns))
    names = [s.name for s in form.usable.shown]  # type: ignore[union-attr]
    assert "replace_lines" in names
    assert "write_file" not in names
    assert written_edits(items(user("Fix a.py."), *turns, user("Again.")), SHOWN) == WrittenEdits()


LONG = "".join(f"x{n} = {n}\n" for n in range(SHORT_FILE + 1))


@pytest.mark.parametrize(
    ("turns", "files"),
    [
        (run("cat a.py", "x = 1\n"), ("a.py",)),
        (run("cat 'src/a.py'", "Exit code: 0\nWall time: 0.1 seconds\nOutput:\nx = 1\n"), ("src/a.py",)),
        (run("cat a.py", "from errors import Failure\nx = 1\n"), ("a.py",)),
        (run("cat a.py", LONG), ()),
        (run("cat a.py b.py", "x = 1\ny = 2\n"), ()),
        (run("head -2 a.py", "x = 1\n"), ()),
        (run("cat a.py", "cat: a.py: No such file or directory"), ()),
        (run("cat a.py", "Exit code: 1\nOutput:\n"), ()),
        ([*run("cat a.py", "x = 1\n"), user("and now?")], ()),
    ],
)
def test_a_short_file_that_was_read_whole_is_known(
    turns: list[dict[str, Any]], files: tuple[str, ...]
) -> None:
    assert short_files(items(user("fix"), *turns), SHOWN) == files


def test_a_reading_tool_reads_a_file_whole_unless_it_was_told_which_part() -> None:
    text = {"type": "string"}
    read = OfferedTool("read", parameters={"properties": {"filePath": text}, "required": ["filePath"]})
    shown = short_toolset([RUN, read])

    def called(arguments: str) -> tuple[str, ...]:
        call = {"type": "function_call", "name": "read", "call_id": "1", "arguments": arguments}
        said = items(user("fix"), call, {"type": "function_call_output", "call_id": "1", "output": "1\tx"})
        return short_files(said, shown)

    assert called('{"filePath": "/w/a.py"}') == ("/w/a.py",)
    assert called('{"filePath": "/w/a.py", "offset": 3}') == ()
    assert called("no JSON") == ()


def test_a_short_file_is_written_whole_and_a_long_one_by_lines() -> None:
    def usable(*turns: dict[str, Any]) -> dict[str, Any]:
        narrowed = AnswerForm(SHOWN).with_usable_tools(items(user("In a.py, say hello."), *turns)).usable
        assert narrowed is not None
        return {s.name: s.parameters["properties"].get("path", {}).get("enum") for s in narrowed.shown}

    assert usable(*run("cat a.py", "print('hi')")) == {"write_file": ["a.py"]}
    assert usable(*run("cat a.py", LONG)) == {"replace_lines": ["a.py"]}
    assert "replace_lines" in usable(*run("head -5 a.py", "print('hi')"))
