"""How many small projects with failing tests a small model repairs, in how many rounds and seconds.

Regime: six modules of 10 to 30 lines, each with 3 or 4 tests of which some fail, and the
instruction "make the tests in test_x.py pass". One greedy attempt per round; each round gets the failures of
the one before. The ceiling is the model; the benchmark measures how much later rounds add.

    python -m bench.agent_rounds --model coder.gguf --tries 3
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.record import record
from keystroke.agent.chat.local import LocalChatModel
from keystroke.agent.loop import (
    AgentTask,
    ApprovalLevel,
    Approvals,
    EndStatus,
    Event,
    TaskControl,
    TaskFiles,
    TaskModels,
    TaskOptions,
    TaskPermissions,
)
from keystroke.agent.loop.events import EndedEvent, NoteEvent, StepEvent
from keystroke.agent.sandbox import CommandLimits, find_sandbox
from keystroke.assist.edit import Journal, Workspace
from keystroke.config import load_settings
from keystroke.engine.load import load_model

SLUG = '''\
"""Names for addresses."""


def slugify(title):
    """A title as part of an address: "Hello, World!" is "hello-world"."""
    return title.replace(" ", "-")
'''
SLUG_TESTS = """\
from slug import slugify


def test_spaces_become_dashes():
    assert slugify("a b c") == "a-b-c"


def test_lower_case():
    assert slugify("Hello World") == "hello-world"


def test_punctuation_goes():
    assert slugify("Hello, World!") == "hello-world"


def test_one_dash_at_a_time():
    assert slugify("  a  --  b ") == "a-b"
"""
CART = '''\
"""A shopping cart."""


class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, price, count=1):
        self.items.append((name, price, count))

    def remove(self, name):
        self.items.remove(name)

    def total(self, discount=0):
        """The sum of all prices; `discount` is in percent."""
        return sum(price for name, price, count in self.items)
'''
CART_TESTS = """\
import pytest
from cart import Cart


def test_one_piece():
    cart = Cart()
    cart.add("tea", 4)
    assert cart.total() == 4


def test_every_piece_counts():
    cart = Cart()
    cart.add("tea", 4, count=3)
    assert cart.total() == 12


def test_a_discount_is_in_percent():
    cart = Cart()
    cart.add("tea", 50, count=2)
    assert cart.total(discount=10) == 90


def test_what_is_not_there_cannot_be_removed():
    cart = Cart()
    cart.add("tea", 4)
    cart.add("cup", 9)
    cart.remove("tea")
    assert cart.total() == 9
    with pytest.raises(KeyError):
        cart.remove("tea")
"""
DURATION = '''\
"""Durations as people write them."""


def parse(text):
    """Seconds in a text such as "1h30m" or "45s"."""
    units = {"h": 3600, "m": 60}
    return int(text[:-1]) * units[text[-1]]


def show(seconds):
    """The shortest text for a number of seconds: 5400 is "1h30m"."""
    return f"{seconds}s"
'''
DURATION_TESTS = """\
import pytest
from duration import parse, show


def test_one_unit():
    assert parse("2h") == 7200


def test_seconds():
    assert parse("45s") == 45


def test_units_add_up():
    assert parse("1h30m") == 5400


def test_nonsense_is_a_value_error():
    with pytest.raises(ValueError):
        parse("soon")


def test_shown_in_the_largest_units():
    assert show(5400) == "1h30m"
    assert show(45) == "45s"
"""
STATS = '''\
"""Numbers about numbers."""


def mean(values):
    return sum(values) / len(values)


def median(values):
    return sorted(values)[len(values) // 2]


def mode(values):
    """The most frequent value; of several the smallest."""
    return max(values, key=values.count)


def spread(values):
    """The standard deviation of all values."""
    return max(values) - min(values)
'''
STATS_TESTS = """\
import pytest
from stats import mean, median, mode, spread


def test_mean():
    assert mean([1, 2, 6]) == 3


def test_median_of_an_even_number():
    assert median([4, 1, 3, 2]) == 2.5


def test_mode_takes_the_smallest():
    assert mode([3, 3, 1, 1, 2]) == 1


def test_spread_is_the_standard_deviation():
    assert spread([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx(2.0)
"""
ROMAN = '''\
"""Roman numerals."""

VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}


def to_int(text):
    return sum(VALUES[letter] for letter in text)


def to_roman(number):
    text = ""
    for letter, value in VALUES.items():
        while number >= value:
            text += letter
            number -= value
    return text
'''
ROMAN_TESTS = """\
import pytest
from roman import to_int, to_roman


def test_letters_add_up():
    assert to_int("VIII") == 8


def test_a_smaller_one_before_is_taken_off():
    assert to_int("XIV") == 14
    assert to_int("MCMXCIV") == 1994


def test_lower_case_is_read_too():
    assert to_int("xiv") == 14


def test_written():
    assert to_roman(1994) == "MCMXCIV"


def test_zero_cannot_be_written():
    with pytest.raises(ValueError):
        to_roman(0)
"""
QUOTED = '''\
"""One line of comma-separated values."""


def split(line):
    return line.split(",")


def join(values):
    return ",".join(values)
'''
QUOTED_TESTS = '''\
from quoted import join, split


def test_plain():
    assert split("a,b,c") == ["a", "b", "c"]


def test_a_comma_in_quotes():
    assert split('a,"b,c",d') == ["a", "b,c", "d"]


def test_a_quote_in_quotes_is_doubled():
    assert split('"say ""hi""",x') == ['say "hi"', "x"]


def test_join_quotes_where_it_must():
    assert join(["a", "b,c"]) == 'a,"b,c"'
'''
PROJECTS = {
    "slug": (SLUG, SLUG_TESTS),
    "cart": (CART, CART_TESTS),
    "duration": (DURATION, DURATION_TESTS),
    "stats": (STATS, STATS_TESTS),
    "roman": (ROMAN, ROMAN_TESTS),
    "quoted": (QUOTED, QUOTED_TESTS),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file or a model's folder")
    parser.add_argument("--tries", type=int, default=2)
    parser.add_argument("--attempts", type=int, default=0, help="0: as many as cost about as much as one")
    parser.add_argument("--only", nargs="*", default=list(PROJECTS), choices=list(PROJECTS))
    parser.add_argument("--verbose", action="store_true", help="show what each task says")
    given = parser.parse_args()
    model = load_model(given.model, load_settings({"engine.context": 4096}))
    chat = LocalChatModel(model)
    solved, began = [], time.perf_counter()
    overheads: list[float] = []
    for name in given.only:
        since = time.perf_counter()
        told: list[Event] = []
        with tempfile.TemporaryDirectory(prefix="keystroke-rounds-") as folder:
            done, line = _done(name, chat, given, Path(folder), told)
        solved += [name] if done else []
        overheads += [event.overhead_s for event in told if isinstance(event, EndedEvent)]
        rewritten = sum(isinstance(event, StepEvent) and event.line.startswith("rewrite") for event in told)
        seconds = time.perf_counter() - since
        print(
            f"{name:10} {'solved' if done else 'failed':7} {rewritten:2} edits {seconds:6.1f} s  {line:.90}"
        )
        for event in told if given.verbose else ():
            if isinstance(event, (StepEvent, NoteEvent)):
                print(f"    {event.line}")
        sys.stdout.flush()
    chat.close()
    model.engine.close()
    figures: dict[str, Any] = {"bench": "rounds", "tries": given.tries, "attempts": given.attempts}
    figures |= {"solved": solved, "of": len(given.only), "seconds": round(time.perf_counter() - began, 1)}
    record("agent_rounds", {**figures, "overhead_s": round(statistics.median(overheads), 3)})


def _done(
    name: str, chat: LocalChatModel, given: argparse.Namespace, folder: Path, told: list[Event]
) -> tuple[bool, str]:
    root = folder / "project"
    root.mkdir()
    source, tests = PROJECTS[name]
    (root / f"{name}.py").write_text(source)
    (root / f"test_{name}.py").write_text(tests)
    workspace = Workspace(root)
    check = f"{sys.executable} -m pytest -q -p no:cacheprovider test_{name}.py"
    ended = AgentTask(
        files=TaskFiles(workspace=workspace, journal=Journal(folder / "state", workspace), scratch=folder),
        models=TaskModels(model=chat),
        permissions=TaskPermissions(
            sandbox=find_sandbox(),
            approvals=Approvals(ApprovalLevel.NEVER, None),
            limits=CommandLimits(seconds=20),
        ),
        options=TaskOptions(check=check, tries=given.tries, attempts=given.attempts, max_tokens=700),
        control=TaskControl(on_event=told.append),
    ).run(f"make the tests in test_{name}.py pass")
    return ended.status is EndStatus.DONE, ended.line


if __name__ == "__main__":
    main()
