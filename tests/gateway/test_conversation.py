"""What a conversation says of the tools: lines that were read, and calls that led nowhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from keystroke.assist.tool_calls.grammar import usable_tools
from keystroke.assist.tool_calls.tools import Offered, short_toolset
from keystroke.gateway.api.conversation import asked, spent_tools, texts_read
from keystroke.protocol.items import Item

RUN = Offered("exec_command", parameters={"properties": {"cmd": {"type": "string"}}, "required": ["cmd"]})
PATCH = Offered("apply_patch", custom=True, grammar=("lark", 'start: "*** Begin Patch"'))
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
    assert asked(said).startswith("Fix a.py")


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
    ],
)
def test_what_led_nowhere_is_not_open_in_the_next_turn(turns: list[dict[str, Any]], spent: set[str]) -> None:
    assert spent_tools(items(user("fix"), *turns), SHOWN) == spent
    assert not spent_tools(items(user("fix"), *turns, user("try again")), SHOWN)


def test_some_tool_is_always_left() -> None:
    names = [s.name for s in usable_tools(SHOWN, seen=["x\n"], spent={"apply_patch"}).shown]
    assert names == ["exec_command"]
    assert usable_tools(SHOWN, seen=["x\n"], spent={"apply_patch", "exec_command"}).shown
    assert [s.name for s in usable_tools(SHOWN).shown] == ["exec_command", "create_file"]
