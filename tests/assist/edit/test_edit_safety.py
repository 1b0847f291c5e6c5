"""A change never leaves a file worse than before: what is damaged is repaired or refused with the reason."""

from __future__ import annotations

import pytest

from keystroke.assist.edit import EditFailure, EditTask, Region
from keystroke.assist.edit.operations import EditFailureReason as Reason
from keystroke.assist.edit.steps import read_operations, read_rewrite
from keystroke.assist.edit.validation import validate_change

PYTHON = '''"""Prices."""

RATE = 0.2


def price(net):
    """The price with tax."""
    # rounded to cents
    return round(net * (1 + RATE), 2)


def label(net):
    return f"{price(net)} EUR\\n"
'''
SCRIPT = """function load(path) {
  var y = read(path);
  var parts = y.split("\\n");
  return parts;
}

function read(path) {
  return cache[path];
}

var cache = {};
"""
ADDED = PYTHON.replace("    return round", "    if net < 0:\n        raise ValueError(net)\n    return round")


def refused(old: str, new: str, path: str, instruction: str) -> EditFailure:
    result = validate_change(old, new, path, instruction)
    assert isinstance(result, EditFailure), result
    return result


# ── text that does not belong into a file ──


@pytest.mark.parametrize(
    "tail",
    [
        "</tool_call>\n",
        "```\n",
        "</parameter>\n</function>\n</tool_call>",
        "<|im_end|>\n",
        "*** End Patch\n",
        "Now do what was asked: refuse negative prices\n",
        "# Now do what was asked: refuse negative prices\n",
    ],
)
def test_markup_and_prompt_text_on_lines_of_their_own_are_removed(tail: str) -> None:
    assert validate_change(PYTHON, ADDED + tail, "price.py", "refuse negative prices") == ADDED


def test_markup_inside_a_line_is_refused() -> None:
    new = ADDED.replace("return round(net", "return <tool_call> round(net")
    assert refused(PYTHON, new, "price.py", "refuse negative prices").reason is Reason.FOREIGN
    text = "Notes\n=====\n\nOne.\n"
    new = text + '{"name": "write_file", "arguments": {"path": "notes.txt"}}\n'
    assert refused(text, new, "notes.txt", "add a line").reason is Reason.FOREIGN


def test_markup_in_a_string_or_named_by_the_instruction_may_be_meant() -> None:
    new = PYTHON.replace("RATE = 0.2", 'RATE = 0.2\nOPEN = "<tool_call>"')
    assert validate_change(PYTHON, new, "price.py", "add a constant OPEN") == new
    text = "Use it.\n"
    new = text + "<tool_call>\n"
    assert validate_change(text, new, "notes.md", "add a line <tool_call>") == new


def test_line_ends_as_two_characters_become_line_ends() -> None:
    flat = ADDED.replace("EUR\\n", "EUR").replace("\n", "\\n")
    old = PYTHON.replace("EUR\\n", "EUR")
    found = validate_change(old, flat, "price.py", "refuse negative prices")
    assert isinstance(found, str)
    assert found.strip() == ADDED.replace("EUR\\n", "EUR").strip()


def test_one_flattened_line_is_repaired_and_strings_stay() -> None:
    new = PYTHON.replace(
        "    return round", "    if net < 0:\\n        raise ValueError(net)\n    return round"
    )
    assert validate_change(PYTHON, new, "price.py", "refuse negative prices") == ADDED
    assert "EUR\\n" in ADDED


def test_flattened_prose_is_repaired() -> None:
    old = "\n".join(f"line {n}" for n in range(9)) + "\n"
    assert validate_change(old, old.replace("\n", "\\n"), "notes.txt", "x") == old


# ── what is gone ──


def test_an_emptied_file_is_refused() -> None:
    assert refused(PYTHON, "\n", "price.py", "remove the tax").reason is Reason.LOST


def test_a_file_of_which_hardly_a_line_is_left_is_refused() -> None:
    old = "".join(f"key{n} = {n}\n" for n in range(20))
    assert refused(old, "key3 = 4\n", "settings.ini", "set key3 to 4").reason is Reason.LOST
    assert validate_change(old, "key3 = 4\n", "settings.ini", "remove all keys but key3") == "key3 = 4\n"


def test_comments_and_docstrings_return_unless_the_instruction_speaks_of_them() -> None:
    bare = ADDED.replace("    # rounded to cents\n", "").replace('    """The price with tax."""\n', "")
    found = validate_change(PYTHON, bare, "price.py", "refuse negative prices")
    assert isinstance(found, str)
    assert "# rounded to cents" in found
    assert found.index("The price with tax") < found.index("if net < 0")
    assert validate_change(PYTHON, bare, "price.py", "drop the comments and docstrings") == bare


def test_a_reworded_comment_is_not_doubled() -> None:
    new = PYTHON.replace("# rounded to cents", "# to whole cents").replace(", 2)", ", 0)")
    assert validate_change(PYTHON, new, "price.py", "round to units") == new


# ── definitions, names and parameters ──


def test_a_second_declaration_beside_the_old_one_is_refused() -> None:
    new = SCRIPT.replace("  var parts", "  var y = y.trim();\n  var parts")
    assert refused(SCRIPT, new, "load.js", "trim the text").reason is Reason.DOUBLED
    twice = "for (var i = 0; i < 3; i++) {}\nfor (var i = 0; i < 2; i++) {}\n"
    assert validate_change(SCRIPT, SCRIPT + twice, "load.js", "loop twice") == SCRIPT + twice


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("a.py", "def f(x):\n    return x\n", "def f(x, factor=2):\n    return x\n"),
        ("a.js", "function f(x) { return x; }\n", "function f(x, factor) { return x; }\n"),
        (
            "a.ts",
            "class A { f(x: number) { return x; } }\n",
            "class A { f(x: number, factor = 2) { return x; } }\n",
        ),
        ("a.go", "func f(x int) int {\n\treturn x\n}\n", "func f(x int, factor int) int {\n\treturn x\n}\n"),
        ("a.c", "int f(int x) { return x; }\n", "int f(int x, int factor) { return x; }\n"),
    ],
)
def test_a_new_parameter_that_nobody_uses_is_refused(path: str, old: str, new: str) -> None:
    failure = refused(old, new, path, "multiply the result by a factor")
    assert failure.reason is Reason.UNUSED
    assert "factor" in failure.message
    used = new.replace("return x", "return x * factor")
    assert validate_change(old, used, path, "multiply the result by a factor") == used


def test_a_parameter_that_is_all_that_was_asked_for_is_accepted() -> None:
    old, new = "def f(x):\n    return x\n", "def f(x, factor=2):\n    return x\n"
    assert validate_change(old, new, "a.py", "Add a parameter factor to f with default 2.") == new
    assert validate_change(old, new, "a.py", "give f an unused parameter factor") == new


def test_a_loose_function_outside_the_scope_it_needs_is_refused() -> None:
    old = "function shop() {\n  const prices = [1, 2];\n  return prices;\n}\nmodule.exports = shop;\n"
    new = old + "\nfunction total() {\n  return prices.reduce((a, b) => a + b, 0);\n}\n"
    failure = refused(old, new, "shop.js", "add a function total")
    assert failure.reason is Reason.UNDEFINED
    assert "prices" in failure.message
    cart = "class Cart:\n    def clear(self):\n        self.items = []\n"
    stray = cart + "\n\ndef total(self):\n    return sum(self.items)\n"
    assert refused(cart, stray, "cart.py", "add a method total").reason is Reason.UNDEFINED


@pytest.mark.parametrize("path", ["a.js", "a.ts", "a.mjs"])
def test_an_undefined_name_of_javascript_is_refused(path: str) -> None:
    old = "import { get } from './net';\nexport function load(id) {\n  return get(id);\n}\n"
    new = old.replace("get(id);", "get(normalise(id));")
    assert refused(old, new, path, "normalise the id first").reason is Reason.UNDEFINED
    fine = old.replace("get(id);", "get(String(id).trim().split('').map((c) => c.codePointAt(0)).join());")
    assert validate_change(old, fine, path, "use code points") == fine


def test_a_file_that_was_broken_before_may_stay_so() -> None:
    broken = "def f(:\n    return 1\n\n\nX = 1\n"
    new = broken.replace("X = 1", "X = 2")
    assert validate_change(broken, new, "a.py", "set X to 2") == new


def test_a_step_of_several_is_judged_only_for_what_no_later_step_mends() -> None:
    old, new = "def f(x):\n    return x\n", "def f(x, factor=2):\n    return helper(x)\n"
    assert validate_change(old, new, "a.py", "scale", complete=False) == new
    assert isinstance(validate_change(old, "def f(x:\n", "a.py", "scale", complete=False), EditFailure)


# ── every way to a file ──


def test_answers_in_blocks_pass_the_same_checks() -> None:
    task = EditTask({"load.js": SCRIPT}, "trim the text")
    blocks = (
        'load.js\n<<<<<<< SEARCH\n  var parts = y.split("\\n");\n=======\n'
        '  var y = y.trim();\n  var parts = y.split("\\n");\n>>>>>>> REPLACE\n'
    )
    found = read_operations(task, blocks, lambda path: False)
    assert [failure.reason for failure in found.failures] == [Reason.DOUBLED]


def test_rewritten_regions_pass_the_same_checks() -> None:
    region = Region("load.js", 0, 5)
    answer = (
        "```javascript\nfunction load(path) {\n  var y = read(path);\n  var y = y.trim();\n"
        '  var parts = y.split("\\n");\n  return parts;\n}\n```'
    )
    result = read_rewrite(answer, region, SCRIPT, "trim the text")
    assert isinstance(result, EditFailure)
    assert result.reason is Reason.DOUBLED
