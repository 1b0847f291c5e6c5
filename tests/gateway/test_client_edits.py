"""Calls with which a client's agent changes files: no file is worse afterwards, and a small model's calls are
made as `keystroke edit` makes a change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest
from gateway_support import scripted_model, serving
from test_tool_history import PATCH, RUN, items, patch, run, user

from keystroke.assist.edit import EditFailure
from keystroke.assist.edit.resolve import parse_answer, resolve
from keystroke.assist.tool_calls.file_edits import (
    ClientFileEdit,
    check_edit,
    check_segment,
    edit_call,
    edits_files,
    read_edit,
)
from keystroke.assist.tool_calls.segments import TextSegment, ToolCallSegment
from keystroke.assist.tool_calls.tools import OfferedTool, short_toolset
from keystroke.config import AssistSettings, ServerSettings
from keystroke.gateway.api import client_edits
from keystroke.gateway.api.tool_history import exhausted_tools, files_read, written_edits

CODE = "def area(r):\n    return 3 * r * r\n\n\ndef edge(r):\n    return 6 * r\n"
RIGHT = CODE.replace("3 * r * r", "r ** 3")
TEXT = {"type": "string"}
WRITE = OfferedTool(
    "write",
    parameters={"properties": {"filePath": TEXT, "content": TEXT}, "required": ["filePath", "content"]},
)
EDIT = OfferedTool(
    "Edit",
    parameters={
        "properties": {"file_path": TEXT, "old_string": TEXT, "new_string": TEXT},
        "required": ["file_path", "old_string", "new_string"],
    },
)
FILES = {"area.py": CODE}
# ruff: noqa: E501 - a patch and a tool are one line each
UPDATE = "*** Begin Patch\n*** Update File: area.py\n@@\n-    return 3 * r * r\n+    return r ** 3\n*** End Patch\n"
ASKED = "area in area.py should cube r"


def write(content: str) -> ToolCallSegment:
    return ToolCallSegment(WRITE, json.dumps({"filePath": "/home/me/area.py", "content": content}))


# ── what a call does ──


def test_calls_of_every_kind_are_understood() -> None:
    replaced = {"file_path": "./area.py", "old_string": "3 * r * r", "new_string": "r ** 3"}
    for tool, payload in (
        (PATCH, UPDATE),
        (EDIT, json.dumps(replaced)),
        (WRITE, json.dumps({"filePath": "area.py", "content": RIGHT})),
    ):
        edit = read_edit(tool, payload, FILES)
        assert edit is not None
        assert (edit.old, edit.new) == (CODE, RIGHT)
    assert read_edit(PATCH, "*** Begin Patch\n*** Delete File: area.py\n*** End Patch\n", FILES) is None
    assert not edits_files(RUN)


@pytest.mark.parametrize("tool", [PATCH, EDIT, WRITE])
def test_a_call_is_written_for_another_result(tool: OfferedTool) -> None:
    first = {
        "filePath": "area.py",
        "content": "x",
        "file_path": "area.py",
        "old_string": "3",
        "new_string": "4",
    }
    wanted = tool.parameters.get("properties", first)
    payload = json.dumps({key: first[key] for key in wanted if key in first})
    made = edit_call(tool, payload, ClientFileEdit("area.py", CODE, "x", "x"), RIGHT)
    assert made is not None
    edit = read_edit(tool, made, FILES)
    assert edit is not None
    assert edit.new == RIGHT


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (RIGHT.replace("\n", "\\n"), None),  # line ends as two characters
        (f"{RIGHT}</tool_call>\n", None),
        (f"{RIGHT}\nNow do what was asked: {ASKED}\n", None),
        (RIGHT.split("def edge")[0], None),  # a definition is lost
        (RIGHT.replace("return r", "return (r"), "does not parse"),
        ("", "empties the file"),
        (RIGHT.replace("area(r)", "area(r, unit)"), "never uses"),
        (RIGHT + "\n\ndef area(r):\n    return 1\n", "twice"),
    ],
)
def test_a_damaging_call_is_repaired_or_answered_as_text(content: str, says: str | None) -> None:
    segment = check_segment(write(content), FILES, ASKED)
    if says is None:
        assert isinstance(segment, ToolCallSegment)
        assert msgspec.json.decode(segment.payload)["content"].strip() == RIGHT.strip()
    else:
        assert isinstance(segment, TextSegment)
        assert says in segment.text


def test_a_file_that_was_not_read_is_judged_by_what_is_written() -> None:
    new = {"file_path": "other.py", "old_string": "a", "new_string": "b\n</tool_call> c"}
    edit = read_edit(EDIT, json.dumps(new), FILES)
    assert edit is not None
    assert isinstance(check_edit(edit, ASKED), EditFailure)
    fresh = json.dumps({"filePath": "new.py", "content": "def broken(:\n"})
    assert isinstance(check_segment(ToolCallSegment(WRITE, fresh), FILES, ASKED), TextSegment)


# ── what was read ──


def test_files_are_known_as_the_client_showed_them() -> None:
    shown = short_toolset(
        [RUN, PATCH, WRITE, OfferedTool("Read", parameters={"properties": {"file_path": TEXT}})]
    )
    report = f"Exit code: 0\nWall time: 0.1 seconds\nOutput:\n{CODE}"
    assert files_read(items(user("x"), *run("cat area.py", report)), shown) == FILES
    numbered = "".join(f"{n:6}→{line}\n" for n, line in enumerate(CODE.splitlines(), 1))
    read = {"type": "function_call", "name": "Read", "call_id": "q", "arguments": '{"file_path": "area.py"}'}
    out = f"{numbered}\n<system-reminder>\nbe careful\n</system-reminder>\n"
    said = [read, {"type": "function_call_output", "call_id": "q", "output": out}]
    assert {k: v.strip() for k, v in files_read(items(*said), shown).items()} == {"area.py": CODE.strip()}
    done = items(*run("cat area.py", report), *patch(UPDATE, "Success. Updated area.py"))
    assert files_read(done, shown) == {"area.py": RIGHT}
    assert files_read(items(*run("cat area.py", "cat: area.py: No such file")), shown) == {}


def test_a_file_may_speak_of_what_clients_write() -> None:
    shown = short_toolset([RUN, PATCH])
    code = 'F = Callable[..., int]\n\n\ndef cut(text):\n    """Truncated: exit code 1."""\n    return text\n'
    report = f"Chunk ID: 1\nProcess exited with code 0\nOutput:\n{code}"
    assert files_read(items(*run("cat cut.py", report)), shown) == {"cut.py": code}
    for cut in (
        "x\n…120 tokens truncated…y\n",
        "x\n[... omitted 3 of 9 lines ...]\n",
        "x\n(File has more lines.)\n",
    ):
        assert files_read(items(*run("cat cut.py", f"Output:\n{cut}")), shown) == {}
    failed = report.replace("code 0", "code 1")
    assert files_read(items(*run("cat cut.py", failed)), shown) == {}


def test_the_frame_around_a_file_is_no_part_of_it() -> None:
    read = OfferedTool("read", parameters={"properties": {"filePath": TEXT}, "required": ["filePath"]})
    call = {
        "type": "function_call",
        "name": "read",
        "call_id": "q",
        "arguments": '{"filePath": "/w/area.py"}',
    }

    def known(output: str) -> dict[str, str]:
        result = {"type": "function_call_output", "call_id": "q", "output": output}
        return files_read(items(call, result), short_toolset([read, WRITE]))

    numbered = "\n".join(f"{n}: {line}" for n, line in enumerate(CODE.splitlines(), 1))
    head = "<path>/w/area.py</path>\n<type>file</type>\n<content>\n"
    framed = f"{head}{numbered}\n\n(End of file - total 6 lines)\n</content>"
    assert known(framed) == {"/w/area.py": CODE}
    assert known(f"{framed}\n\n<system-reminder>\nbe careful\n</system-reminder>") == {"/w/area.py": CODE}
    assert (
        known(f"{head}{numbered}\n\n(Showing lines 1-6 of 90. Use offset=7 to continue.)\n</content>") == {}
    )
    assert known("<content>\n<p>own</p>\n</content>\n") == {
        "/w/area.py": "<content>\n<p>own</p>\n</content>\n"
    }


def test_what_a_tool_that_writes_files_wrote_is_written() -> None:
    wrote = {"type": "function_call", "name": "write", "call_id": "w", "arguments": write(RIGHT).payload}
    done = {"type": "function_call_output", "call_id": "w", "output": "Wrote file successfully."}
    said = items(user("x"), *run("cat area.py", f"Output:\n{CODE}"), wrote, done)
    own = written_edits(said, short_toolset([RUN, WRITE]))
    assert (own.paths, own.known) == ({"/home/me/area.py"}, {"area.py"})
    copied = {**wrote, "arguments": write(CODE).payload}
    said = items(user("x"), *run("cat area.py", f"Output:\n{CODE}"), copied, done)
    assert written_edits(said, short_toolset([RUN, WRITE])).copied == {"/home/me/area.py"}


def test_a_report_that_names_a_file_such_as_errors_py_is_a_success() -> None:
    shown = short_toolset([RUN, PATCH])
    update = UPDATE.replace("area.py", "errors.py")
    done = "Exit code: 0\nOutput:\nSuccess. Updated the following files:\nM errors.py\n"
    said = items(user("x"), *run("cat errors.py", f"Output:\n{CODE}"), *patch(update, done))
    assert files_read(said, shown) == {"errors.py": RIGHT}
    assert written_edits(said, shown).paths == {"errors.py"}
    assert exhausted_tools(said, shown) == frozenset()
    for refused in ("Exit code: 1\nOutput:\nno", "apply_patch verification failed: Failed to find lines"):
        again = items(user("x"), *run("cat errors.py", f"Output:\n{CODE}"), *patch(update, refused))
        assert files_read(again, shown) == {"errors.py": CODE}
        assert exhausted_tools(again, shown) == {"apply_patch"}


# ── over the wire ──


def response(url: str, tools: list[dict[str, Any]], code: str = CODE) -> list[dict[str, Any]]:
    return answered(url, tools, user(ASKED), *run("cat area.py", f"Output:\n{code}"))


def answered(url: str, tools: list[dict[str, Any]], *said: dict[str, Any]) -> list[dict[str, Any]]:
    body = {"model": "echo", "input": said, "tools": tools, "store": False}
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    output: list[dict[str, Any]] = answer.json()["output"]
    return output


TOOLS = [
    {"type": "function", "name": RUN.name, "parameters": {**RUN.parameters, "type": "object"}},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH.grammar[1] if PATCH.grammar else ""}},
]  # fmt: skip


def bad_call(content: str = f"{RIGHT}Now do what was asked: {ASKED}") -> str:
    arguments = {"path": "area.py", "content": content}
    return f"<tool_call>\n{json.dumps({'name': 'write_file', 'arguments': arguments})}\n</tool_call>"


def test_a_small_model_s_call_is_made_as_edit_makes_a_change() -> None:
    asked: list[str] = []

    def script(prompt: str) -> str:
        asked.append(prompt)
        if "You edit source files" in prompt:
            return "```python\ndef area(r):\n    return r ** 3\n```\n"
        return bad_call()

    with serving(scripted_model(script), assist=AssistSettings(tool_declarations="short")) as server:
        output = response(server.url, TOOLS)
        assert server.settled()
    calls = [item for item in output if item["type"] == "custom_tool_call"]
    assert len(calls) == 1
    edit = read_edit(PATCH, calls[0]["input"], FILES)
    assert edit is not None
    assert edit.new == RIGHT
    assert any("You edit source files" in prompt for prompt in asked)


@pytest.mark.parametrize("content", ["def area(:\n", ""], ids=["a broken text", "only the file"])
def test_where_nothing_usable_comes_the_client_reads_why(content: str) -> None:
    def script(prompt: str) -> str:
        return "no code" if "You edit source files" in prompt else bad_call(content)

    with serving(scripted_model(script), assist=AssistSettings(tool_declarations="short")) as server:
        output = response(server.url, TOOLS)
        assert server.settled()
    assert [item["type"] for item in output] == ["message"]
    assert "I did not change area.py" in output[0]["content"][0]["text"]


@pytest.mark.parametrize(("name", "texts"), [("write_file", ("content",)), ("replace_lines", ("old", "new"))])
def test_a_call_that_only_names_the_file_is_made(name: str, texts: tuple[str, ...]) -> None:
    arguments = {"path": "area.py", **dict.fromkeys(texts, "")}
    call = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    def script(prompt: str) -> str:
        if "You edit source files" in prompt:
            return "```python\ndef area(r):\n    return r ** 3\n```\n"
        return call

    with serving(scripted_model(script), assist=AssistSettings(tool_declarations="short")) as server:
        output = response(server.url, TOOLS, CODE if name == "write_file" else CODE + "# more\n" * 80)
        assert server.settled()
    (made,) = [item for item in output if item["type"] == "custom_tool_call"]
    edit = read_edit(
        PATCH, made["input"], FILES if name == "write_file" else {"area.py": CODE + "# more\n" * 80}
    )
    assert edit is not None
    assert edit.new is not None
    assert edit.new.startswith(RIGHT)


def test_a_full_queue_leaves_fewer_candidates() -> None:
    def script(prompt: str) -> str:
        if "You edit source files" in prompt:
            return "```python\ndef area(r):\n    return r ** 3\n```\n"
        return bad_call("")

    with serving(
        scripted_model(script, max_batch=8),
        assist=AssistSettings(tool_declarations="short"),
        server=ServerSettings(max_queue=1),
        concurrent=1,
    ) as server:
        output = response(server.url, TOOLS)
        assert server.settled()
    (call,) = [item for item in output if item["type"] == "custom_tool_call"]
    edit = read_edit(PATCH, call["input"], FILES)
    assert edit is not None
    assert edit.new == RIGHT


def test_examples_of_a_request_run_for_the_machine_s_own_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are code that came with the request; a key lets its holder ask, not run programs."""
    ran: list[str] = []

    def record(path: str, old: str, texts: Sequence[str]) -> list[float]:
        ran.append(path)
        return []

    def script(prompt: str) -> str:
        if "You edit source files" in prompt:
            return "```python\ndef area(r):\n    return r ** 3\n```\n"
        return bad_call("")

    monkeypatch.setattr(client_edits, "_CHECKS", record)
    monkeypatch.setenv("A_VARIABLE", "secret")
    for server, headers in (
        (ServerSettings(), {}),
        (ServerSettings(api_key_env="A_VARIABLE"), {"authorization": "Bearer secret"}),
    ):
        ran.clear()
        with serving(
            scripted_model(script, max_batch=8),
            assist=AssistSettings(tool_declarations="short"),
            server=server,
        ) as running:
            said = [user(ASKED), *run("cat area.py", f"Output:\n{CODE}")]
            body = {"model": "echo", "input": said, "tools": TOOLS, "store": False}
            answer = httpx.post(f"{running.url}/v1/responses", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            assert running.settled()
        assert bool(ran) == (not headers)


def test_two_calls_for_one_file_make_one_change() -> None:
    def script(prompt: str) -> str:
        if "You edit source files" in prompt:
            return "```python\ndef area(r):\n    return r ** 3\n```\n"
        return f"{bad_call('')}\n{bad_call('')}"

    with serving(scripted_model(script), assist=AssistSettings(tool_declarations="short")) as server:
        output = response(server.url, TOOLS)
        assert server.settled()
    assert [item["type"] for item in output if item["type"] != "message"] == ["custom_tool_call"]


@pytest.mark.parametrize("kind", ["patch", "function"])
def test_all_files_that_were_named_and_read_are_changed_together(kind: str) -> None:
    user_py = "from area import edge\n\n\ndef twice(r):\n    return 2 * edge(r)\n"
    wanted = {"area.py": CODE.replace("edge", "rim"), "lib/use.py": user_py.replace("edge", "rim")}
    asked: list[str] = []
    write = {"type": "function", "name": "write", "parameters": {**WRITE.parameters, "type": "object"}}

    def script(prompt: str) -> str:
        asked.append(prompt)
        name, path = ("write_file", "path") if kind == "patch" else ("write", "filePath")
        arguments = {path: "lib/use.py", "content": ""}
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    with serving(scripted_model(script), assist=AssistSettings(tool_declarations="short")) as server:
        output = answered(
            server.url,
            TOOLS if kind == "patch" else [TOOLS[0], write],
            user("In area.py, lib/use.py: rename edge to rim"),
            *run("cat area.py", f"Output:\n{CODE}", 1),
            *run("cat lib/use.py", f"Output:\n{user_py}", 2),
        )
        assert server.settled()
    assert len(asked) == 1  # a renaming needs no model
    if kind == "patch":
        (call,) = [item for item in output if item["type"] == "custom_tool_call"]
        found = parse_answer(call["input"], ("area.py", "lib/use.py"))
        assert not isinstance(found, EditFailure)
        texts = {"area.py": CODE, "lib/use.py": user_py}
        assert resolve(found, texts.get).texts == wanted
    else:
        calls = [json.loads(item["arguments"]) for item in output if item["type"] == "function_call"]
        assert {call["filePath"]: call["content"] for call in calls} == wanted


def test_a_larger_model_s_good_call_is_sent_as_it_is() -> None:
    arguments = {"filePath": "area.py", "content": RIGHT}
    call = f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': arguments})}\n</tool_call>"
    tools = [{"type": "function", "name": "write", "parameters": {**WRITE.parameters, "type": "object"}}]
    with serving(
        scripted_model(lambda prompt: call), assist=AssistSettings(tool_declarations="whole")
    ) as server:
        output = response(server.url, [*tools, TOOLS[0]])
    (made,) = [item for item in output if item["type"] == "function_call"]
    assert json.loads(made["arguments"]) == arguments
