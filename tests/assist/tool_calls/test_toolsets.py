"""What a model is shown of its tools means what was offered; a small one is shown less of it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from keystroke.assist.tool_calls.patches import EDITS, calls_from_patch, patch_from_call
from keystroke.assist.tool_calls.seen import MOST_CHARACTERS, MOST_LINES, seen_lines, strip_line_numbers
from keystroke.assist.tool_calls.tools import MOST_SHOWN, OfferedTool, short_toolset, whole_toolset

GRAMMAR = 'start: "*** Begin Patch" LF\n%import common.LF'
PATCH = OfferedTool("apply_patch", custom=True, description="Edits files.", grammar=("lark", GRAMMAR))
EXEC = OfferedTool(
    "exec_command",
    description="Runs a command. Returns its output.\nMore words.",
    parameters={
        "type": "object",
        "properties": {
            "cmd": {"type": "string", "description": "The command. Any shell syntax."},
            "tty": {"type": "boolean"},
        },
        "required": ["cmd"],
    },
)


def test_every_tool_is_shown_as_it_was_offered() -> None:
    toolset = whole_toolset([EXEC, PATCH])
    first, second = toolset.specs
    assert first["function"]["parameters"] == EXEC.parameters
    assert GRAMMAR in second["function"]["description"]
    assert second["function"]["parameters"]["required"] == ["input"]
    assert not toolset.short
    assert toolset.left_out == ()


def test_a_small_model_is_shown_one_sentence_and_what_a_call_must_have() -> None:
    toolset = short_toolset([EXEC, PATCH])
    shown = toolset.find("exec_command")
    assert shown is not None
    assert shown.description == "Runs a command."
    assert shown.parameters["properties"] == {"cmd": {"type": "string", "description": "The command."}}
    assert [s.name for s in toolset.shown] == ["exec_command", *EDITS]
    assert toolset.short
    assert GRAMMAR not in json.dumps(toolset.specs)


def test_tools_that_do_no_work_are_left_out_and_named_unless_the_user_speaks_of_them() -> None:
    more = [
        OfferedTool(name) for name in ("view_image", "spawn_agent", "todowrite", "webfetch", "write_stdin")
    ]
    toolset = short_toolset([EXEC, *more, OfferedTool("glob"), OfferedTool("readFile")])
    assert [s.name for s in toolset.shown] == ["exec_command", "glob", "readFile"]
    assert toolset.left_out == tuple(tool.name for tool in more)
    assert short_toolset([EXEC, *more], "please use webfetch").find("webfetch") is not None
    many = short_toolset([OfferedTool(f"read_{i}") for i in range(20)])
    assert len(many.shown) == MOST_SHOWN
    assert len(many.left_out) == 20 - MOST_SHOWN


def test_few_tools_are_all_shown_and_none_are_never_left() -> None:
    assert [s.name for s in short_toolset([OfferedTool("paint")]).shown] == ["paint"]
    odd = [OfferedTool(f"paint_{i}") for i in range(5)]
    assert [s.tool for s in short_toolset(odd).shown] == odd


def test_text_to_be_replaced_is_grounded_whatever_its_name() -> None:
    properties = {name: {"type": "string"} for name in ("filePath", "oldString", "newString")}
    edit = OfferedTool(
        "edit", parameters={"type": "object", "properties": properties, "required": [*properties]}
    )
    assert short_toolset([edit]).shown[0].grounded == {"oldString"}


# Patches

lines = st.lists(st.text(alphabet="ab +-@*", max_size=6), min_size=1, max_size=5)


@given(lines, lines)
def test_a_replacement_as_a_patch_removes_the_old_lines_and_adds_the_new(
    old: list[str], new: list[str]
) -> None:
    text = "".join(line + "\n" for line in old)
    then = "".join(line + "\n" for line in new)
    patch = patch_from_call("replace_lines", {"path": "a.py", "old": text, "new": then})
    assert patch is not None
    body = patch.split("@@\n", 1)[1].removesuffix("*** End Patch\n").splitlines()
    assert [line[1:] for line in body if line[0] in " -"] == old
    assert [line[1:] for line in body if line[0] in " +"] == new
    assert calls_from_patch(patch) == [("replace_lines", {"path": "a.py", "old": text, "new": then})]


def test_files_are_created_and_deleted_by_patches() -> None:
    created = patch_from_call("write_file", {"path": "n.txt", "content": "a\nb\n"})
    assert created == "*** Begin Patch\n*** Add File: n.txt\n+a\n+b\n*** End Patch\n"
    assert calls_from_patch(created) == [("write_file", {"path": "n.txt", "content": "a\nb\n"})]
    deleted = patch_from_call("delete_file", {"path": "n.txt"})
    assert deleted == "*** Begin Patch\n*** Delete File: n.txt\n*** End Patch\n"
    assert calls_from_patch(deleted) == [("delete_file", {"path": "n.txt"})]
    assert calls_from_patch("*** Begin Patch\n*** End Patch") is None
    assert calls_from_patch("no patch") is None


def test_arguments_that_are_none_of_the_functions_make_no_patch() -> None:
    assert patch_from_call("delete_file", {}) is None
    assert patch_from_call("delete_file", {"path": ""}) is None
    assert patch_from_call("delete_file", {"path": "a\nb"}) is None
    assert patch_from_call("write_file", {"path": "a", "content": 3}) is None
    assert patch_from_call("replace_lines", ["x"]) is None


# What was read


def test_lines_are_taken_without_the_numbers_tools_put_before_them() -> None:
    texts = ["00001| def f():\n00002|     pass", "  12\tx = 1", "7: y\n", "3 + 4"]
    assert seen_lines(texts) == ("def f():\n", "    pass\n", "x = 1\n", "y\n", "\n", "3 + 4\n")


@given(
    st.lists(st.text(st.characters(blacklist_characters="\n(", blacklist_categories=["Cs"])), min_size=1),
    st.sampled_from(["{}: {}", "{:05}| {}", "{:6}\t{}", "{}→{}"]),
)
def test_a_file_that_was_shown_with_numbers_is_what_it_was(lines: list[str], form: str) -> None:
    shown = "\n".join(form.format(number, line) for number, line in enumerate(lines, 1))
    assert strip_line_numbers(f"<content>\n{shown}\n</content>") == "\n".join(
        ["<content>", *lines, "</content>"]
    )


def test_a_note_that_the_file_ends_is_no_line_of_it() -> None:
    assert strip_line_numbers("1: x\n2: y\n\n(End of file - total 2 lines)\n") == "x\ny\n\n"
    assert strip_line_numbers("(End of file - total 2 lines)") == "(End of file - total 2 lines)"


def test_numbers_that_do_not_count_are_kept() -> None:
    for text in ("404: not found\n500: broken", "3 + 4 = 7", "12: x\n", "a: 1\nb: 2", ""):
        assert strip_line_numbers(text) == text


def test_what_is_remembered_of_long_texts_is_their_end() -> None:
    kept = seen_lines(["\n".join(map(str, range(10_000)))])
    assert len(kept) == MOST_LINES
    assert kept[-1] == "9999\n"
    assert sum(map(len, seen_lines(["x" * 1000 + "\n"] * 500))) <= MOST_CHARACTERS
