"""Examples as witnesses: what tests, documentation and a model say of a changed definition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keystroke.assist.edit.writer import Messages
from keystroke.assist.review import ChangedFile, ReviewFinding, review
from keystroke.assist.review.demonstrate import definitions, find_contradictions
from keystroke.assist.review.expect import claims_from_docstrings, claims_from_model, without_body
from keystroke.assist.review.invariants import matches_result
from keystroke.assist.review.scripts import parse_claims

OLD = '''def shorten(text, limit=8):
    """A text cut to so many characters.

    >>> shorten("abc", 2)
    'ab'
    """
    return text[:limit]


class Cart:
    """Prices that add up."""

    def __init__(self):
        self.prices = []

    def add(self, price):
        self.prices.append(price)

    def total(self):
        return sum(self.prices)
'''
CUT = OLD.replace("text[:limit]", "text[:limit + 1]")
FIRST = OLD.replace("sum(self.prices)", "sum(self.prices[1:])")


class Said:
    """A model that says one thing, and keeps what it was shown."""

    def __init__(self, answer: str) -> None:
        self.answer, self.shown = answer, ""

    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
        self.shown = messages[-1]["content"]
        yield self.answer if "examples" in self.shown else "neither"


def changed(after: str) -> ChangedFile:
    lines = frozenset(range(1, after.count("\n") + 1))
    return ChangedFile("tools.py", after, lines, False, OLD)


def findings(root: Path, after: str, writer: Said | None = None) -> list[str]:
    found = review([changed(after)], root, writer, remark=False)
    return [item.message for item in found if isinstance(item, ReviewFinding) and item.source == "example"]


def test_what_the_documentation_shows_and_no_longer_holds_is_a_finding(tmp_path: Path) -> None:
    assert findings(tmp_path, OLD) == []
    (message,) = findings(tmp_path, CUT)
    assert message == "its documentation says shorten('abc', 2) == 'ab'; now that is 'abc'"


def test_a_test_of_the_project_is_a_witness_and_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    ran = tmp_path / "ran"
    (tmp_path / "tests" / "test_tools.py").write_text(
        "from tools import Cart\n\n"
        f"open({str(ran)!r}, 'w')\n\n"
        "def test_total():\n    cart = Cart()\n    cart.add(2)\n    cart.add(price=3)\n"
        "    assert cart.total() == 5\n"
    )
    (message,) = findings(tmp_path, FIRST)
    assert message == "tests/test_tools.py:9 says cart.total() == 5; now that is 3"
    assert not ran.exists()


def test_a_test_that_went_along_with_the_change_says_that_it_was_meant(tmp_path: Path) -> None:
    (tmp_path / "test_tools.py").write_text(
        "from tools import Cart\n\ndef test_total():\n    cart = Cart()\n    cart.add(-2)\n    cart.add(3)\n"
        "    assert cart.total() == 3\n"
    )
    writer = Said("```python\ncart = Cart()\ncart.add(1)\nassert cart.total() == 1\n```")
    assert findings(tmp_path, FIRST, writer) == []
    assert "hidden" not in writer.shown


def test_a_model_that_does_not_see_the_code_is_believed_where_the_old_version_agrees(tmp_path: Path) -> None:
    writer = Said("```python\ncart = Cart()\ncart.add(4)\nassert cart.total() == 4\n```")
    (message,) = findings(tmp_path, FIRST, writer)
    assert message == "cart.total() == 4 held before this change; now it gives 0"
    assert "sum(" not in writer.shown


@pytest.mark.parametrize(
    "answer",
    [
        "assert Cart().total() == 7",  # wrong about both
        "cart = Cart()\ncart.add(4)\nassert cart.total() == 4\n"
        "cart.add(1)\nassert cart.total() == 1",  # once for the old version, once for the new one
        "I cannot say.",
    ],
)
def test_a_model_that_contradicts_itself_or_both_versions_says_nothing(tmp_path: Path, answer: str) -> None:
    assert findings(tmp_path, FIRST, Said(f"```python\n{answer}\n```")) == []


def test_claims_are_read_in_the_forms_that_tests_have() -> None:
    code = (
        "def test_a(self):\n    c = Cart()\n    c.add(1)\n    self.assertEqual(c.total(), 1)\n"
        "    assert not Cart().total()\n    assert shorten('ab', limit=1) == 'a'\n"
        "    with pytest.raises(TypeError):\n        shorten(None)\n"
    )
    found = parse_claims(code, {"Cart", "shorten"})
    assert [(claim.expected, claim.line) for claim in found] == [
        ("1", 4), ("False", 5), ("'a'", 6), ("TypeError", 7),
    ]  # fmt: skip
    assert found[2].plan[-1] == {"call": "shorten", "arguments": ["ab"], "named": {"limit": 1}}


@pytest.mark.parametrize(
    "code",
    [
        "assert os.system('x') == 0",
        "assert Cart().__class__ == 1",
        "assert Cart().total.__globals__ == 1",
        "assert shorten('x').format(1) == 1",
        "assert shorten(open('x')) == 1",
        "assert shorten(*values) == 1",
        "assert shorten(value) == other",
        "for n in range(3):\n    assert shorten('a') == 'a'",
        "def test(:",
    ],
)
def test_whatever_is_more_than_values_and_calls_is_left_out(code: str) -> None:
    assert parse_claims(code, {"Cart", "shorten"}) == []


def test_what_holds_only_now_is_told_apart_from_what_held_only_before() -> None:
    said = parse_claims(
        "assert shorten('abc', 2) == 'abc'\nassert shorten('abc', 2) == 'ab'", definitions(OLD)
    )
    assert [(found.holds, found.after) for found in find_contradictions(OLD, CUT, said)] == [
        (True, "'abc'"),
        (False, "'abc'"),
    ]


def test_the_code_of_the_definition_is_hidden_and_its_documentation_is_not() -> None:
    shown = without_body(OLD, "Cart.total")
    assert shown is not None
    assert "sum(" not in shown
    assert "Prices that add up" in shown
    assert without_body(OLD, "Cart.none") is None
    assert [claim.expected for claim in claims_from_docstrings(OLD, definitions(OLD))] == ["'ab'"]


def test_an_answer_with_one_line_that_does_not_parse_keeps_the_others() -> None:
    answer = "```python\nassert shorten('abc', 2) == 'ab'\nassert shorten(== 3\n```"
    assert len(claims_from_model(OLD, "shorten", definitions(OLD), Said(answer))) == 1


@pytest.mark.parametrize(
    ("expected", "result", "same"),
    [
        ("0.33", "0.333333333", False),
        ("0.3333", "0.333333333", True),
        ("[1, 2]", "list[1, 2]", True),
        ("(1, 2)", "tuple[1, 2]", True),
        ("True", "1", False),
        ("ValueError", "ValueError: no", True),
        ("None", "KeyError: 3", False),
        ("{'a': 1.0}", "{'a': 1}", True),
    ],
)
def test_a_value_agrees_up_to_its_last_digits(expected: str, result: str, same: bool) -> None:
    assert matches_result(expected, result) is same
