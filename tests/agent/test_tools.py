"""Each tool does what its call says, and says what is wrong with a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from workspaces import Project

from keystroke.agent.sandbox import Sandbox, SandboxKind, find_sandbox
from keystroke.agent.tools import (
    EditTool,
    ReadTool,
    RunTool,
    SearchTool,
    Toolbox,
    ToolInvocation,
    ToolResult,
    search,
)
from keystroke.agent.workspace import Overlay


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def call(name: str, **arguments: Any) -> ToolInvocation:
    return ToolInvocation(name, json.dumps(arguments))


def box(overlay: Overlay) -> Toolbox:
    return Toolbox([ReadTool(overlay), SearchTool(overlay), EditTool(overlay)])


def test_read_shows_lines_and_where_they_are(project: Project) -> None:
    tools = box(project.overlay())
    whole = tools.invoke(call("read", path="calc.py"))
    assert whole == ToolResult("calc.py, lines 1 to 2 of 2:\ndef add(a, b):\n    return a - b\n")
    part = tools.invoke(call("read", path="notes/plan.txt", start=2, end=2))
    assert part.text == "notes/plan.txt, lines 2 to 2 of 2:\nsecond\n"
    assert tools.invoke(call("read", path="calc.py", start=9)).failed


def test_read_names_a_file_that_was_meant(project: Project) -> None:
    told = box(project.overlay()).invoke(call("read", path="plan.txt"))
    assert told == ToolResult("plan.txt does not exist; there is notes/plan.txt", failed=True)


def test_search_finds_text_and_expressions_and_sees_changes(project: Project) -> None:
    overlay = project.overlay()
    overlay.write("new.py", "value = 41\n")
    tools = box(overlay)
    assert tools.invoke(call("search", query="a - b")).text == "calc.py:2: return a - b"
    assert tools.invoke(call("search", query=r"value = \d+")).text == "new.py:1: value = 41"
    assert tools.invoke(call("search", query="add", files="test_*")).text.startswith("test_calc.py:1:")
    assert tools.invoke(call("search", query="nowhere")).text == "nothing matches 'nowhere'"


def test_search_takes_no_expression_that_could_run_away(project: Project) -> None:
    overlay = project.overlay()
    overlay.write("a.txt", "a" * 5000 + "!\n" + "(a+)+$\n")
    assert box(overlay).invoke(call("search", query="(a+)+$")).text == "a.txt:2: (a+)+$"


def test_a_search_that_takes_too_long_ends_and_says_so(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is found, and without remembering what it read."""
    monkeypatch.setattr(search, "_SECONDS", 0.0)
    overlay = project.overlay()
    told = box(overlay).invoke(call("search", query="nowhere")).text
    assert told == "… not all files were searched in 0 s; name the files to search"
    monkeypatch.undo()
    assert box(overlay).invoke(call("search", query="a - b")).text == "calc.py:2: return a - b"
    project.write("calc.py", "changed = 1\n")
    assert overlay.read("calc.py") == "changed = 1\n"


def test_search_never_shows_a_secret(project: Project) -> None:
    assert "hush" not in box(project.overlay()).invoke(call("search", query="TOKEN")).text


def test_edit_changes_the_named_lines_only(project: Project) -> None:
    overlay = project.overlay()
    done = box(overlay).invoke(call("edit", path="calc.py", old="return a - b", new="return a + b"))
    assert not done.failed
    assert "-    return a - b\n+    return a + b\n" in done.text
    assert overlay.read("calc.py") == "def add(a, b):\n    return a + b\n"


def test_edit_makes_a_file(project: Project) -> None:
    overlay = project.overlay()
    assert not box(overlay).invoke(call("edit", path="new/one.py", old="", new="x = 1")).failed
    assert overlay.read("new/one.py") == "x = 1\n"


def test_edit_that_does_not_fit_changes_nothing_and_says_why(project: Project) -> None:
    overlay = project.overlay()
    told = box(overlay).invoke(call("edit", path="calc.py", old="print(total, sep=None)", new="x"))
    assert told.failed
    assert "not_found" in told.text
    assert not overlay.texts


def test_edit_that_breaks_the_syntax_is_not_made(project: Project) -> None:
    overlay = project.overlay()
    told = box(overlay).invoke(call("edit", path="calc.py", old="    return a - b", new="    return (a - b"))
    assert told.failed
    assert "does not parse" in told.text
    assert not overlay.texts


@pytest.mark.parametrize("tool", ["read", "edit"])
@pytest.mark.parametrize("path", ["../x", "/etc/passwd", ".env", ".git/config", "link/secret"])
def test_a_path_that_leads_out_or_to_a_secret_is_refused(project: Project, tool: str, path: str) -> None:
    (project.folder / "secret").write_text("hush")
    (project.root / "link").symlink_to(project.folder)
    overlay = project.overlay()
    arguments = {"old": "", "new": "x"} if tool == "edit" else {}
    told = box(overlay).invoke(call(tool, path=path, **arguments))
    assert told.failed
    assert told.refused
    assert "hush" not in told.text
    assert not overlay.texts


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (ToolInvocation("fly", "{}"), "there is no tool 'fly'; the tools are: read, search, edit"),
        (ToolInvocation("read", "{"), "not well formed"),
        (ToolInvocation("read", '{"path": 3}'), "Expected `str`"),
        (ToolInvocation("read", '{"path": "a", "mode": "x"}'), "unknown field `mode`"),
        (ToolInvocation("read", '{"path": "a", "start": 0}'), ">= 1"),
        (ToolInvocation("read", "__import__('os')"), "not well formed"),
        (ToolInvocation("read", '{"path": "\ud800"}'), "not well formed"),
    ],
)
def test_a_bad_call_becomes_a_result_that_says_so(project: Project, made: ToolInvocation, says: str) -> None:
    told = box(project.overlay()).invoke(made)
    assert told.failed
    assert says in told.text


def test_a_call_says_in_one_line_what_it_is_about_to_do(project: Project) -> None:
    tools = box(project.overlay())
    assert tools.describe(call("read", path="calc.py")) == "read calc.py"
    assert tools.describe(call("edit", path="calc.py", old="a", new="b")) == "change calc.py"
    assert tools.describe(call("edit", path="calc.py", old="", new="b")) == "write calc.py"
    assert tools.describe(call("search", query="x")) == "search for 'x'"


def test_tools_describe_themselves_as_chat_templates_want(project: Project) -> None:
    (read, *_) = box(project.overlay()).specifications()
    assert read["function"]["name"] == "read"
    parameters = read["function"]["parameters"]
    assert parameters["required"] == ["path"]
    assert parameters["properties"]["path"]["type"] == "string"
    assert parameters["additionalProperties"] is False


def test_run_shows_output_and_exit_code(project: Project) -> None:
    runner = project.runner(find_sandbox(), project.overlay())
    told = Toolbox([RunTool(runner)]).invoke(call("run", command="ls notes"))
    assert told == ToolResult("plan.txt\nThe command ended with exit code 0.")


def test_no_shell_reads_what_a_model_wrote(project: Project) -> None:
    runner = project.runner(find_sandbox(), project.overlay())
    told = Toolbox([RunTool(runner)]).invoke(call("run", command="echo $(id) `id` ; touch made > out"))
    assert told.text.startswith("$(id) `id` ; touch made > out\n")
    assert not runner.overlay.texts


@pytest.mark.parametrize("sandbox", [find_sandbox(), Sandbox(SandboxKind.NONE)], ids=str)
def test_a_command_of_a_model_runs_only_if_approved(project: Project, sandbox: Sandbox) -> None:
    runner = project.runner(sandbox, project.overlay(), says=False)
    told = Toolbox([RunTool(runner)]).invoke(call("run", command="touch made"))
    assert told.refused
    assert [command.line for command in project.asked] == ["touch made"]
    assert not (project.folder / "copies").exists()


def test_without_a_sandbox_even_a_named_check_is_asked_for_each_time(project: Project) -> None:
    runner = project.runner(Sandbox(SandboxKind.NONE), project.overlay())
    runner.run_check("true")
    runner.run_check("true")
    assert [(command.line, command.confined) for command in project.asked] == [("true", False)] * 2


def test_with_a_sandbox_naming_a_check_is_the_approval(project: Project) -> None:
    sandbox = find_sandbox()
    if not sandbox.confines:
        pytest.skip("no sandbox holds on this machine")
    runner = project.runner(sandbox, project.overlay(), says=False)
    assert runner.run_check("exit 3").code == 3
    assert not project.asked


def test_mass_removal_by_a_command_needs_a_yes(project: Project) -> None:
    for number in range(30):
        project.write(f"many/{number}.txt", "x")
    overlay = project.overlay()
    runner = project.runner(find_sandbox(), overlay)
    runner._approve = lambda command: not command.line.startswith("(remove")
    told = Toolbox([RunTool(runner)]).invoke(call("run", command="rm -r many"))
    assert told.refused
    assert "removed 30 files" in told.text
    assert not overlay.texts
