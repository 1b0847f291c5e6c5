"""Which tools a small model may call next: it looks before it acts, and stops where all led nowhere."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from keystroke.assist.tool_calls.forms import HERMES
from keystroke.assist.tool_calls.grammar import calls_constraint
from keystroke.assist.tool_calls.tools import OfferedTool, short_toolset, whole_toolset
from keystroke.assist.tool_calls.usable import (
    LONGEST_COMMAND,
    SHORT_FILE,
    ToolConstraints,
    must_edit_next,
    must_read_first,
    named_files,
    strip_lead,
    usable_tools,
)
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.grammar.compiler import matcher_for
from keystroke.engine.grammar.constraint import Constraint
from keystroke.engine.tokenizer import ByteTokenizer

PLAIN = ByteTokenizer(SPECIAL, eos=EOS, vocab_size=320)
MARKED = ByteTokenizer({**SPECIAL, "<tool_call>": 270, "</tool_call>": 271}, eos=EOS, vocab_size=320)
TEXT = {"type": "string"}
RUN = OfferedTool("exec_command", parameters={"properties": {"cmd": TEXT}, "required": ["cmd"]})
READ = OfferedTool("read", parameters={"properties": {"filePath": TEXT}, "required": ["filePath"]})
WRITE = OfferedTool("write", parameters={"properties": {"filePath": TEXT}, "required": ["filePath"]})
PATCH = OfferedTool("apply_patch", custom=True, grammar=("lark", 'start: "*** Begin Patch"'))
CODEX, OPENCODE = short_toolset([RUN, PATCH]), short_toolset([RUN, READ, WRITE])


def accepts(constraint: Constraint, text: str, tokenizer: ByteTokenizer = PLAIN) -> bool:
    held = matcher_for(constraint, tokenizer, EchoEngine().info)
    tokens = tokenizer.encode(text, special=True)
    return held.advance(tokens) == len(tokens) and held.is_accepting


def command(cmd: str) -> str:
    call = {"name": "exec_command", "arguments": {"cmd": cmd}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def names(bounds: ToolConstraints) -> list[str]:
    return [shown.name for shown in usable_tools(CODEX, bounds).shown]


@pytest.mark.parametrize(
    ("asked", "files"),
    [
        ("In src/calc.py the function add subtracts.", ["src/calc.py"]),
        ("Fix a.py, then b.test.js.", ["a.py", "b.test.js"]),
        ("Run the tests with pytest.", []),
        ("Ask me@example.com about https://example.com/a.html", []),
        ("Call os.path.join(a, b) e.g. twice; version 1.5 of it.", []),
        ("In bank.py: Account.transfer counts self.hits with strings.Join", ["bank.py"]),
        ("Fix data/new.rules and self.c, this.h.", ["data/new.rules"]),
    ],
)
def test_files_are_known_by_their_endings(asked: str, files: list[str]) -> None:
    assert named_files(asked) == files


@pytest.mark.parametrize(
    ("asked", "look", "tools"),
    [
        ("In calc.py, add subtracts. Make it return a + b.", True, ["exec_command"]),
        ("Remove the function unused from calc.py.", True, ["exec_command"]),
        ("Add a docstring to the function area in area.py.", True, ["exec_command"]),
        ("Write a test for area in area.py.", True, ["exec_command"]),
        ("Create a file square.py with a function.", False, ["exec_command", "write_file"]),
        ("Make a script run.sh that prints 1.", False, ["exec_command", "write_file"]),
        ("Delete the file old.py.", False, ["exec_command", "delete_file"]),
        ("Delete all files in tmp/x.py and the file.", False, ["exec_command", "delete_file"]),
        ("Remove the file argument of load in io.py.", True, ["exec_command"]),
        ("Make main.py handle an empty list.", True, ["exec_command"]),
        ("Make main.py that handles an empty list.", False, ["exec_command", "write_file"]),
        ("Run the tests with pytest.", False, ["exec_command", "write_file"]),
    ],
)
def test_a_small_model_looks_before_it_changes_a_file(asked: str, look: bool, tools: list[str]) -> None:
    bounds = ToolConstraints(request=asked, has_acted=False)
    assert must_read_first(CODEX, bounds) is look
    assert names(bounds) == tools
    assert not must_read_first(whole_toolset([RUN, PATCH]), bounds)


def test_looking_is_a_call_that_shows_a_file_and_changes_nothing() -> None:
    look = ToolConstraints(request="What does a.py do?", has_acted=False)
    for cmd in ("cat a.py", "ls", "head -n 20 a.py"):
        assert accepts(calls_constraint(CODEX, HERMES, PLAIN, look), command(cmd))
    held = calls_constraint(CODEX, HERMES, PLAIN, replace(look, request="Fix a.py."))
    assert accepts(held, command("cat a.py"))
    for cmd in (
        "ls",
        "head -n 20 a.py",  # what is to be changed is read whole
        "rm a.py",
        "cat a.py > b.py",
        "cat a.py; rm a.py",
        "ls && rm a.py",
        "cat $(rm a.py)",
        "catx",
        "find . -delete",
        "cat",  # waits for what nobody types
        "head",
        "cat b.py",
        "cat ba.py",
        "grep -rl 'x' a.py",  # says which file, not what is in it
        "cat /w/b.txt}}} else: a.py",
        "cat /w/b.txt.1000000/a.py",
        "cat b.txt -n 100 a.py",
    ):
        assert not accepts(held, command(cmd))
    assert not accepts(held, "The file is fine.")
    readers = usable_tools(OPENCODE, ToolConstraints(request="Fix a.py.", has_acted=False)).shown
    assert [shown.name for shown in readers] == ["read"]


def test_files_are_edited_until_all_that_the_user_names_were() -> None:
    def open_after(*written: str) -> bool:
        bounds = ToolConstraints(
            seen_lines=["x\n"], request="Rename f in a.py and lib/b.py.", written=written
        )
        return "replace_lines" in names(bounds)

    assert [open_after(), open_after("/w/a.py"), open_after("/w/a.py", "lib/b.py")] == [True, True, False]
    assert "replace_lines" in names(
        ToolConstraints(seen_lines=["x\n"], request="Rename f everywhere.", written=["a.py"])
    )


def test_where_every_tool_led_nowhere_words_are_left() -> None:
    bounds = ToolConstraints(request="go", exhausted={"exec_command", "apply_patch"}, closed=True)
    assert names(bounds) == []
    held = calls_constraint(CODEX, HERMES, PLAIN, bounds)
    assert accepts(held, "It is done.")
    assert not accepts(held, 'Use replace_lines: {"name": "replace_lines", "arguments": {}}')
    assert not accepts(held, command("ls"))
    assert not accepts(held, "Then *** Begin Patch")
    assert not accepts(held, command("ls").splitlines()[1])
    assert accepts(calls_constraint(CODEX, HERMES, PLAIN, bounds, required=True), command("ls"))


def test_a_small_models_command_has_an_end() -> None:
    held = calls_constraint(CODEX, HERMES, PLAIN, ToolConstraints(request="go"))
    assert accepts(held, command("x" * LONGEST_COMMAND))
    assert not accepts(held, command("x" * (LONGEST_COMMAND + 1)))
    whole = calls_constraint(whole_toolset([RUN, PATCH]), HERMES, PLAIN)
    assert accepts(whole, command("x" * (LONGEST_COMMAND + 1)))
    shown = json.dumps(CODEX.specs)
    assert not re.search("maxLength|pattern", shown)  # the model is not bothered with it


def test_a_tool_that_writes_whole_files_is_held_to_those_that_were_read_or_named() -> None:
    write = OfferedTool(
        "write",
        parameters={"properties": {"content": TEXT, "filePath": TEXT}, "required": ["filePath", "content"]},
    )
    edit = OfferedTool(
        "edit",
        parameters={
            "properties": {"filePath": TEXT, "oldString": TEXT},
            "required": ["filePath", "oldString"],
        },
    )
    tools = short_toolset([RUN, READ, write, edit])

    def paths(asked: str, **known: Any) -> Any:
        (writer,) = (
            s for s in usable_tools(tools, ToolConstraints(request=asked, **known)).shown if s.name == "write"
        )
        return writer.parameters["properties"]["filePath"].get("enum")

    read: dict[str, Any] = {"seen_lines": ["x\n"], "short": ["/w/a.py"]}
    assert paths("Fix a.py.", **read) == ["/w/a.py"]
    assert paths("Move f from a.py to lib/b.py.", **read) == ["/w/a.py", "lib/b.py"]
    assert paths("Move f from a.py to lib/b.py.", **read, written=["/w/lib/b.py"]) == ["/w/a.py"]
    assert paths("Create a file c.py from a.py.", **read) is None
    assert paths("Fix a.py.", seen_lines=["x\n"]) == ["a.py"]  # not what a command happened to print
    assert paths("Fix the tests.", seen_lines=["x\n"]) is None
    open_to = [s.name for s in usable_tools(tools, ToolConstraints(request="Fix a.py.", **read)).shown]
    assert open_to == ["exec_command", "read", "write"]
    many: dict[str, Any] = {"seen_lines": ["x\n"] * (SHORT_FILE + 1), "short": ["/w/a.py"]}
    assert "edit" in [s.name for s in usable_tools(tools, ToolConstraints(request="Fix a.py.", **many)).shown]


def test_a_file_that_was_read_is_the_only_one_a_grammar_lets_be_written() -> None:
    bounds = ToolConstraints(request="Fix a.py.", seen_lines=["x = 1\n"], short=["a.py"], written=["b.py"])
    held = calls_constraint(CODEX, HERMES, PLAIN, bounds, required=True)

    def written(path: str) -> bool:
        call = {"name": "write_file", "arguments": {"path": path, "content": "x = 2\n"}}
        return accepts(held, f"<tool_call>\n{json.dumps(call)}\n</tool_call>")

    assert written("a.py")
    assert not written("b.py")
    assert not written("c.py")


def test_a_change_of_a_file_that_was_read_is_a_call_that_only_names_the_file() -> None:
    bounds = ToolConstraints(request="Fix a.py.", seen_lines=["x = 1\n"] * 80, made=["a.py"])
    held = calls_constraint(CODEX, HERMES, PLAIN, bounds)

    def edited(path: str, old: str = "", new: str = "") -> bool:
        call = {"name": "replace_lines", "arguments": {"path": path, "old": old, "new": new}}
        return accepts(held, f"<tool_call>\n{json.dumps(call)}\n</tool_call>")

    assert edited("a.py")
    assert not edited("b.py")
    assert not edited("a.py", "x = 1\n", "x = 2\n")
    assert not accepts(held, "Here is the change: x = 2")  # the file would stay as it is
    assert not accepts(held, command("cat a.py"))


@pytest.mark.parametrize(
    ("asked", "forced"),
    [
        ("In lru.py: put throws away the newest entry instead of the oldest", True),
        ("In router.py: find must ignore what follows a ? or a # in the path.", True),
        ("In lru.py: Cache.put should do nothing if self.size is 0", True),
        ("Make Router.find in router.py return router.Missing", True),
        ("What does lru.py do?", False),
        ("Explain lru.py, which should be simple.", False),
        ("Run lru.py", False),
        ("Make the tests in test_lru.py pass.", False),
        ("Move put from lru.py to cache.py.", False),  # one of them was not read
        ("Write a new file b.py like lru.py.", False),
        ("In lru.py: write a new file b.py like it.", False),
        ("In lru.py: drop old entries, and delete the file old.py.", False),
        ("In lru.py: save must create the file if it is not there, and delete the file on close.", True),
        ("In lru.py: add a method dump that writes all files anew.", True),
        ("Delete lru.py.", False),
    ],
)
def test_an_edit_is_the_next_call_where_a_change_was_asked_for(asked: str, forced: bool) -> None:
    made = ["/w/lru.py", "router.py", "test_lru.py"]
    bounds = ToolConstraints(request=asked, seen_lines=["x\n"], made=made)
    assert must_edit_next(CODEX, bounds) is forced
    assert not must_edit_next(CODEX, replace(bounds, written=["lru.py"]))
    assert not must_edit_next(CODEX, replace(bounds, exhausted=["apply_patch"]))
    assert not must_edit_next(whole_toolset([RUN, PATCH]), bounds)


def test_all_files_that_the_user_names_are_read_before_a_change() -> None:
    asked = "In a.py and lib/b.py: rename f to g, and log to out.txt."
    first = ToolConstraints(request=asked, has_acted=False)
    second = replace(first, has_acted=True, seen_lines=["x\n"], made=["a.py"], looked=["a.py"])
    third = replace(second, looked=["a.py", "out.txt"], absent=["out.txt"])
    last = replace(third, made=["a.py", "lib/b.py"])
    for bounds, read in ((first, True), (second, True), (third, True), (last, False)):
        assert must_read_first(CODEX, bounds) is read
        assert must_edit_next(CODEX, bounds) is not read
        held = calls_constraint(CODEX, HERMES, PLAIN, bounds)
        assert accepts(held, command("cat lib/b.py")) is read
        assert accepts(held, command("cat a.py")) is (bounds is first)
    assert not must_read_first(CODEX, replace(second, request="Explain a.py and lib/b.py."))
    assert not must_read_first(CODEX, replace(second, exhausted=["exec_command"]))
    changed = replace(last, written=["lib/b.py"], made=["a.py"], known=["a.py", "lib/b.py"], closed=True)
    assert names(changed) == []  # what is to be done in a.py was done with it
    assert names(replace(changed, known=["lib/b.py"]))


@pytest.mark.parametrize(
    ("asked", "rest"),
    [
        ("In a.py: f must add.", "f must add."),
        ("Edit the file a.py: f must add.", "f must add."),
        ("Change a.py, so that f adds.", "Change a.py, so that f adds."),
        ("in `a.py`, lib/b.go and c.js, f must add.", "f must add."),
        ("In Cart.total: f must add.", "In Cart.total: f must add."),
        ("In a.py f must add: one.", "In a.py f must add: one."),
    ],
)
def test_the_files_at_the_head_of_a_request_are_no_part_of_what_is_to_be_done(asked: str, rest: str) -> None:
    assert strip_lead(asked) == rest


def test_after_a_change_that_was_all_a_few_words_are_left() -> None:
    bounds = ToolConstraints(
        request="In a.py: f must add.", seen_lines=["x\n"], written=["a.py"], closed=True
    )
    held = calls_constraint(CODEX, HERMES, PLAIN, bounds)
    assert accepts(held, "The function adds now.")
    assert not accepts(held, command("cat a.py"))
    assert not accepts(held, '{"name": "write_file\', "arguments": {"path": "a.py"}}')
    assert not accepts(held, "and on " * 100)
    for asked in ("In a.py: f must check x, and raise an error then.", "In a.py: build must test x."):
        assert not accepts(
            calls_constraint(CODEX, HERMES, PLAIN, replace(bounds, request=asked)), command("pytest")
        )
    for asked in (
        "In a.py: f must add. Then run the tests.",
        "In a.py: f must add, and commit it",
        "In a.py: make the tests pass",
        "In a.py and b.py: f must add.",
    ):
        more = calls_constraint(CODEX, HERMES, PLAIN, replace(bounds, request=asked))
        assert accepts(more, command("pytest"))
    assert accepts(calls_constraint(CODEX, HERMES, PLAIN, bounds, required=True), command("ls"))


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["marks are text", "marks are tokens"])
def test_a_tool_that_is_closed_is_not_called_in_words_either(tokenizer: ByteTokenizer) -> None:
    bounds = ToolConstraints(request="Fix a.py.", seen_lines=["x = 1\n"], short=["a.py"])
    assert names(bounds) == ["exec_command", "write_file"]
    held = calls_constraint(CODEX, HERMES, tokenizer, bounds)
    for text in (
        'I replace it: {"name": "replace_lines", "arguments": {}}',
        'Like this:\n```json\n{"name" : "replace_lines"}\n```',
        '```json\n{"name": "delete_file", "arguments": {"path": "a.py"}}\n```',
        f'First {command("ls")} then {{"name": "replace_lines", "arguments": {{}}}}',
        f'{{"name": "replace_lines"}} and {command("ls")}',
    ):
        assert not accepts(held, text, tokenizer), text
    for text in (
        'Call replace_lines with "name": "replace_lines".',
        'x = {"name": "y", "arguments": 3}',
        f"I look. {command('ls')}",
        'I look. {"name": "exec_command", "arguments": {"cmd": "ls"}}',
    ):
        assert accepts(held, text, tokenizer), text
    spoken = calls_constraint(whole_toolset([RUN, PATCH]), HERMES, tokenizer)
    assert accepts(spoken, 'I replace it: {"name": "replace_lines", "arguments": {}}', tokenizer)
