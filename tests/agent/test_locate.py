"""Which files and lines a task is about, found from names and from what a failing check said."""

from __future__ import annotations

from pathlib import Path

import pytest

from keystroke.agent.loop.locate import find_files, find_regions
from keystroke.agent.workspace import Overlay
from keystroke.assist.edit import Workspace

CART = '''"""A shopping cart."""


class Cart:
    def __init__(self):
        self.items = {}

    def add(self, name, price, count=1):
        self.items[name] = (price, count)

    def names(self):
        return sorted(self.items)

    def total(self):
        return sum(price for price, count in self.items.values())
'''
TEST = """from shop.cart import Cart


def test_total_counts():
    cart = Cart()
    cart.add("apple", 2, 3)
    assert cart.total() == 6
"""
OUTPUT = """____ test_total_counts ____

    def test_total_counts():
        cart = Cart()
        cart.add("apple", 2, 3)
>       assert cart.total() == 6
E       assert 2 == 6

tests/test_cart.py:7: AssertionError
FAILED tests/test_cart.py::test_total_counts - assert 2 == 6
"""


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    for name, text in {
        "shop/__init__.py": "",
        "shop/cart.py": CART,
        "shop/prices.py": "def price(name):\n    return 1\n",
        "tests/test_cart.py": TEST,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return Overlay(Workspace(tmp_path))


@pytest.mark.parametrize(
    "instruction",
    [
        "make the tests in tests/test_cart.py pass",
        "test_cart.py fails",
        "Change the source so that tests/test_cart.py passes.",
    ],
)
@pytest.mark.parametrize("output", ["", OUTPUT])
def test_a_test_that_has_to_pass_leads_to_what_it_tries(
    overlay: Overlay, instruction: str, output: str
) -> None:
    found = find_files(overlay, instruction, output)
    assert found[0] == "shop/cart.py"
    assert "tests/test_cart.py" not in found


@pytest.mark.parametrize(
    "instruction",
    [
        "add a test to tests/test_cart.py that fails for a negative price",
        "in tests/test_cart.py use a pear instead of the apple",
    ],
)
def test_a_test_that_is_to_be_changed_is_changed(overlay: Overlay, instruction: str) -> None:
    assert find_files(overlay, instruction, OUTPUT)[0] == "tests/test_cart.py"


def test_functions_that_a_failure_speaks_of_are_where_it_is_mended(overlay: Overlay) -> None:
    choice = find_regions(overlay, ["shop/cart.py"], "make the tests in tests/test_cart.py pass", OUTPUT)
    assert choice.certain
    lines = CART.split("\n")
    written = "\n".join(line for region in choice.regions for line in lines[region.start : region.end])
    assert "def total" in written
    assert "def add" in written
    assert '"""A shopping cart."""' not in written
