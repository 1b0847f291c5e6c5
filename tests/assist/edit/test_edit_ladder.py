"""The rungs from an instruction to a change: what is asked, what is mended without asking, what is asked
again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from keystroke.assist.edit.completeness import find_doubt
from keystroke.assist.edit.operations import EditFailure, EditFailureReason
from keystroke.assist.edit.renaming import apply_renaming
from keystroke.assist.edit.steps import edit_steps
from keystroke.assist.edit.task import EditProposal, EditTask, RewriteQuestion
from keystroke.assist.edit.validation import validate_change

CODE = """class Cart:
    def __init__(self):
        self.items = []

    def total(self):
        return sum(self.items)

    def clear(self):
        self.items = []


def area(r):
    return 3 * r * r
"""


def climbed(
    files: Mapping[str, str], instruction: str, answers: Sequence[str], retries: int = 1
) -> tuple[EditProposal, list[RewriteQuestion]]:
    """What comes of these answers, and what was asked; every answer must be used."""
    steps = edit_steps(EditTask(files, instruction), retries=retries)
    asked: list[RewriteQuestion] = []
    left = list(answers)
    try:
        question = next(steps)
        while True:
            asked.append(question)
            question = steps.send(left.pop(0))
    except StopIteration as stop:
        assert not left
        return stop.value, asked


def fence(text: str) -> str:
    return f"```python\n{text}```\n"


def last_words(question: RewriteQuestion) -> str:
    return question.messages[-1]["content"]


# ── regions ───────────────────────────────────────────────────────────────────────────────────


def test_only_the_region_is_asked_for_and_only_its_change_is_made() -> None:
    answer = fence("def area(r):\n    return 3.14 * r * r\n")
    proposal, asked = climbed({"a.py": CODE}, "area should use 3.14 for pi", [answer])
    assert proposal.texts == {"a.py": CODE.replace("3 * r", "3.14 * r")}
    assert len(asked) == 1
    assert asked[0].inside == "def area(r):\n    return 3 * r * r\n"


def test_a_fault_is_named_and_the_second_answer_taken() -> None:
    broken, good = fence("def area(r:\n    return 3\n"), fence("def area(r):\n    return 4 * r * r\n")
    proposal, asked = climbed({"a.py": CODE}, "area should use 4", [broken, good])
    assert proposal.texts["a.py"] == CODE.replace("3 * r", "4 * r")
    assert "does not parse" in last_words(asked[1])


def test_blank_lines_that_nobody_spoke_of_are_no_change() -> None:
    airy, good = (
        fence("def area(r):\n\n    return 3 * r * r\n"),
        fence("def area(r):\n    return 4 * r * r\n"),
    )
    proposal, asked = climbed({"a.py": CODE}, "area should use 4", [airy, good])
    assert proposal.texts["a.py"] == CODE.replace("3 * r", "4 * r")
    assert "You wrote the same code again" in last_words(asked[1])
    spoken, _ = climbed({"a.py": CODE}, "put a blank line at the start of area", [airy])
    assert spoken.texts["a.py"] == CODE.replace("(r):\n", "(r):\n\n")


def test_a_region_that_cannot_be_mended_gives_way_to_a_larger_one() -> None:
    same = fence("    def total(self):\n        return sum(self.items)\n")
    whole = CODE.split("\n\n\ndef area", maxsplit=1)[0] + "\n"
    answer = fence(whole.replace("sum(self.items)", "sum(self.items, 0.0)"))
    proposal, asked = climbed({"a.py": CODE}, "Cart.total should be a float", [same, same, answer])
    assert "You wrote the same code again" in last_words(asked[1])
    assert asked[2].inside == whole
    assert proposal.texts["a.py"] == CODE.replace("sum(self.items)", "sum(self.items, 0.0)")


def test_without_retries_one_question_is_asked() -> None:
    proposal, asked = climbed({"a.py": CODE}, "area should use 4", [fence("def area(r:\n")], retries=0)
    assert [failure.reason for failure in proposal.failures] == [EditFailureReason.SYNTAX]
    assert len(asked) == 1


def test_regions_of_several_files_come_out_together_or_not_at_all() -> None:
    files = {"a.py": "def first():\n    return 1\n", "b.py": "def second():\n    return 1\n"}
    one, two = fence("def first():\n    return 2\n"), fence("def second():\n    return 2\n")
    proposal, _ = climbed(files, "first() and second() return 2", [one, two])
    assert proposal.texts == {path: text.replace("1", "2") for path, text in files.items()}
    proposal, _ = climbed(files, "first() and second() return 2", [one, fence("def second(:\n")], retries=0)
    assert proposal.failures
    assert not proposal.texts


def test_a_short_file_nothing_is_said_about_is_written_whole_and_then_its_likeliest_part() -> None:
    text = (
        "class M:\n    def __add__(self, o):\n        return self.n + o.n\n\n"
        "    def __eq__(self, o):\n        return self.n == o.n\n"
    )
    head = "    def __add__(self, o):\n"
    better = f"{head}        if o is None:\n            raise ValueError\n        return self.n + o.n\n"
    answers = [fence(text), fence(text), fence(better)]
    proposal, asked = climbed({"a.py": text}, "Adding nothing must raise ValueError", answers)
    assert [question.inside for question in asked[:2]] == [text, text]
    assert str(asked[2].inside).startswith("    def __add__")
    assert "raise ValueError" in str(proposal.texts["a.py"])


def test_the_old_text_may_repeat_itself_and_so_may_the_new_one() -> None:
    rows = "ROWS = [\n" + '    ("alpha", 1),\n' * 40 + "]\n"
    pieces = [rows[at : at + 20] for at in range(0, len(rows), 20)]
    assert not any(map(RewriteQuestion([], inside=rows).end_detector(), pieces))
    assert any(map(RewriteQuestion([], inside="ROWS = []\n").end_detector(), pieces))


# ── doubts ────────────────────────────────────────────────────────────────────────────────────

GO = """package q

import "strings"

func Join(s []string) string {
\tr := ""
\tfor _, x := range s {
\t\tr += x
\t}
\treturn r
}
"""


def test_a_name_of_the_task_that_is_missing_is_asked_for_once_more() -> None:
    half = CODE.replace("3 * r * r", "3 * r ** 2")
    full = CODE.replace("3 * r * r", "math.prod((3, r, r))")
    first = fence("def area(r):\n    return 3 * r ** 2\n")
    second = fence("def area(r):\n    return math.prod((3, r, r))\n")
    proposal, asked = climbed({"a.py": CODE}, "area should use math.prod", [first, second])
    assert "the task names math.prod" in last_words(asked[1])
    assert proposal.texts["a.py"] == "import math\n\n" + full
    # Where the second answer is no better, the first one stands.
    proposal, _ = climbed({"a.py": CODE}, "area should use math.prod", [first, first])
    assert proposal.texts["a.py"] == half
    proposal, _ = climbed({"a.py": CODE}, "area should use math.prod", [first, "I cannot."])
    assert proposal.texts["a.py"] == half


@pytest.mark.parametrize(
    ("old", "new", "path", "instruction", "said"),
    [
        (GO, GO.replace("r += x", "r += x + x"), "q.go", "use strings.Join in Join", "strings.Join"),
        (GO, GO.replace("r += x", "r += strings.Join(s, x)"), "q.go", "use strings.Join in Join", None),
        ("x = {}\n", "x = {}\ny.setdefault(1)\n", "a.py", "use dict.setdefault for y", None),
        ("x = 1\n", "x = 2\n", "a.py", "fail with the message 'too large'", "'too large'"),
        ("def f(a):\n    return a\n", "def f(a):\n    return f(a)\n", "a.py", "f is wrong", "calls itself"),
        (
            "def f(a):\n    return a\n",
            "def f(a):\n    return f(a - 1) if a else 0\n",
            "a.py",
            "f is wrong",
            None,
        ),
        ("x = 1\n", "x = 2\n", "a.py", "f fails with a KeyError, e.g. for 3", None),
        ("class A:\n    def f(self):\n        pass\n", "class A:\n    pass\n", "a.py", "remove A.f", None),
    ],
)
def test_what_speaks_against_a_change(
    old: str, new: str, path: str, instruction: str, said: str | None
) -> None:
    found = find_doubt(old, new, path, instruction)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


# ── what is put right, and what is refused ────────────────────────────────────────────────────


F = "def f():\n    return 1\n"


def test_definitions_that_a_rewrite_left_out_come_back() -> None:
    rest = "def area(r):\n    return 3 * r * r\n"
    new = f"class Cart:\n    def __init__(self):\n        self.items = [0]\n\n\n{rest}"
    assert validate_change(CODE, new, "a.py", "start with a zero") == CODE.replace("= []", "= [0]", 1)
    assert validate_change(CODE, new, "a.py", "start with a zero and remove the others") == new


@pytest.mark.parametrize(
    ("old", "new", "path", "instruction", "reason"),
    [
        ("x = 1\n", "x = (1\n", "a.py", "x", EditFailureReason.SYNTAX),
        ("let a = 1;\n", "let a = 1 + * 2;\n", "a.js", "x", EditFailureReason.SYNTAX),
        (F, f"{F}\n\ndef f():\n    return 2\n", "a.py", "f gives 2", EditFailureReason.DOUBLED),
        (F, "def f():\n    return missing\n", "a.py", "f gives another", EditFailureReason.UNDEFINED),
        (
            "int f(int n)\n{\n    int tail = n % 3;\n    return g(tail);\n}\n",
            "int f(int n)\n{\n    if (n) return 0;\n    return g(tail);\n}\n",
            "a.c",
            "f gives 0 for numbers",
            EditFailureReason.LOST,
        ),
        (
            "package q\n\nfunc Push() error {\n\treturn nil\n}\n",
            "package q\n\nfunc Push() error {\n\treturn ErrFull\n}\n",
            "q.go",
            "Define a new error variable ErrFull for Push",
            EditFailureReason.UNDEFINED,
        ),
    ],
)  # fmt: skip
def test_a_change_that_does_not_hold_together_has_a_name(
    old: str, new: str, path: str, instruction: str, reason: EditFailureReason
) -> None:
    found = validate_change(old, new, path, instruction)
    assert isinstance(found, EditFailure)
    assert found.reason is reason
    assert isinstance(validate_change(old, old, path, instruction), str)


def test_a_declaration_may_move_or_become_a_parameter() -> None:
    old = "func f() int {\n\tn := 3\n\treturn n\n}\n"
    for new in ("func f(n int) int {\n\treturn n\n}\n", "func f() int {\n\tvar n = 3\n\treturn n\n}\n"):
        assert validate_change(old, new, "a.go", "f") == new


def test_a_name_of_the_standard_library_is_imported() -> None:
    new = validate_change("x = 4\n", "x = math.sqrt(16)\n", "a.py", "use a root")
    assert isinstance(new, str)
    assert new.startswith("import math\n")


def test_text_that_no_parser_can_take_is_a_fault_and_no_crash() -> None:
    for text in ("(" * 100_000, "la " * 100_000, "x = '\0'"):
        found = validate_change("x = 1\n", text, "a.py", "x")
        assert isinstance(found, EditFailure)
        assert found.reason is EditFailureReason.SYNTAX


# ── renaming ──────────────────────────────────────────────────────────────────────────────────


def test_a_renaming_asks_no_model_and_touches_nothing_but_the_name() -> None:
    files = {
        "a.py": "def total(x):\n    return x  # the total\n",
        "b.py": "from a import total\n\nprint(total(1), 'total')\n",
    }
    proposal, asked = climbed(files, "Rename the function total to whole everywhere.", [])
    assert asked == []
    assert proposal.texts == {
        "a.py": "def whole(x):\n    return x  # the total\n",
        "b.py": "from a import whole\n\nprint(whole(1), 'total')\n",
    }


MEMBER = """class A:
    @property
    def run(self):
        run = self.run
        return run


run = 1
print(A().run, run)
"""


def test_a_member_is_renamed_where_only_one_class_has_it_and_variables_are_not() -> None:
    wanted = MEMBER.replace("def run", "def start").replace("self.run", "self.start")
    wanted = wanted.replace("A().run", "A().start")
    assert apply_renaming({"a.py": MEMBER}, "rename the method run to start") == {"a.py": wanted}
    two = MEMBER + "\n\nclass B:\n    def run(self):\n        return 2\n"
    assert apply_renaming({"a.py": two}, "rename the method run to start") is None


@pytest.mark.parametrize(
    ("text", "instruction"),
    [
        ("def join(x):\n    return ','.join(x)\n", "rename the function join to glue"),
        ("def f(x):\n    return g(f=1)\n", "rename f to h"),
        ("class P:\n    x: int = 0\n\n\nprint(P(x=1).x)\n", "rename the attribute x to left"),
    ],
)
def test_a_use_that_may_mean_something_else_leaves_the_renaming_to_a_model(
    text: str, instruction: str
) -> None:
    assert apply_renaming({"a.py": text}, instruction) is None


def test_a_function_is_renamed_where_its_module_is_named() -> None:
    files = {"a.py": "def f(x):\n    return x\n", "b.py": "import a\n\nprint(a.f(1))\n"}
    assert apply_renaming(files, "rename f to g") == {
        "a.py": "def g(x):\n    return x\n",
        "b.py": "import a\n\nprint(a.g(1))\n",
    }


@pytest.mark.parametrize(
    "instruction",
    [
        "Rename total to whole and make it faster",
        "Rename nothing to whole",
        "Rename total to other",
        "Add total",
    ],
)
def test_what_is_not_a_renaming_for_certain_is_left_to_a_model(instruction: str) -> None:
    assert apply_renaming({"a.py": "def total():\n    return other\n"}, instruction) is None


def test_a_shorthand_property_is_left_to_a_model() -> None:
    text = "function name() {}\nconst o = { name };\n"
    assert apply_renaming({"a.js": text}, "rename the function name to title") is None
