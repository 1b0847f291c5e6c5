"""A change demonstrated by running it: what is found, what is left alone, and what cannot get out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from keystroke.assist.review import demonstrate, example_runner
from keystroke.assist.review.demonstrate import Difference, find_differences
from keystroke.assist.review.examples import format_plan
from keystroke.assist.review.purity import pure_part


def one(before: str, after: str) -> Difference | None:
    found = find_differences(before, after)
    assert len(found) <= 1
    return found[0] if found else None


# ── what is found ─────────────────────────────────────────────────────────────────────────────


def test_a_call_that_fails_now_and_did_not_before_is_broken() -> None:
    found = one(
        "def mean(values: list[int]) -> float:\n    return sum(values) / len(values) if values else 0.0\n",
        "def mean(values: list[int]) -> float:\n    return sum(values) / len(values)\n",
    )
    assert found is not None
    assert (found.call, found.before, found.broken) == ("mean([])", "0", True)
    assert found.after.startswith("ZeroDivisionError")
    assert list(found.lines) == [1, 2]


def test_another_result_is_a_difference_and_no_defect() -> None:
    found = one("def f(n: int):\n    return n + 1\n", "def f(n: int):\n    return n + 2\n")
    assert found is not None
    assert not found.broken


def test_an_error_that_the_new_code_raises_is_meant() -> None:
    found = one(
        "def f(n: int):\n    return n\n",
        "def f(n: int):\n    if n < 0:\n        raise ValueError('no')\n    return n\n",
    )
    assert found is not None
    assert (found.meant, found.broken) == (True, False)


def test_methods_are_tried_on_objects_made_for_them() -> None:
    before = (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, n: int):\n        self.items.append(n)\n\n"
        "    def top(self):\n        return self.items[-1] if self.items else None\n"
    )
    found = one(before, before.replace(" if self.items else None", ""))
    assert found is not None
    assert found.name == "Stack.top"
    assert found.broken


def test_a_call_is_written_as_a_person_would() -> None:
    plan = [
        {"call": "Item", "arguments": ["a"]},
        {"call": "Cart", "arguments": []},
        {"on": 1, "call": "add", "arguments": [{"step": 0}]},
        {"on": 1, "call": "total", "arguments": []},
    ]
    assert format_plan(plan) == "cart = Cart(); cart.add(Item('a')); cart.total()"
    assert (
        format_plan([{"call": "f", "arguments": [{"date": [2024, 1, 31]}, None]}])
        == "f(date(2024, 1, 31), None)"
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(n: int):\n    return n * 2\n", "def f(n: int):\n    return n + n\n"),  # the same
        ("def f(n: int):\n    return 1 // 0\n", "def f(n: int):\n    return [][0]\n"),  # failed before
        ("def f(n: int):\n    return 1\n", "def f(n: int, m: int):\n    return 2\n"),  # another signature
        (
            "import random\n\ndef f():\n    return random.random()\n",
            "import random\n\ndef f():\n    return 1\n",
        ),
        ("def f(:\n", "def f():\n    return 1\n"),
    ],
    ids=["same", "failed", "signature", "chance", "syntax"],
)
def test_what_shows_nothing_is_no_difference(before: str, after: str) -> None:
    assert find_differences(before, after) == []


def test_a_call_that_no_longer_comes_to_an_end_is_broken() -> None:
    found = one(
        "def f(n: int):\n    while n > 1:\n        n -= 1\n    return n\n",
        "def f(n: int):\n    while n > 1:\n        n += 0\n    return n\n",
    )
    assert found is not None
    assert (found.broken, found.after) == (True, "no answer: it does not come to an end")


def test_an_endless_loop_that_nothing_can_interrupt_costs_its_time_and_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demonstrate, "SECONDS", 2.0)
    stubborn = (
        "def f(n: int):\n    while True:\n        try:\n            while True:\n                n += 1\n"
        "        except BaseException:\n            pass\n"
    )
    assert find_differences("def f(n: int):\n    return n\n", stubborn) == []


def test_a_dataclass_without_a_text_and_a_definition_that_needs_more_hide_nothing() -> None:
    before = (
        "import os\nfrom dataclasses import dataclass\n\n\n@dataclass\nclass Loan:\n    days: int\n\n"
        "    def fine(self):\n        return max(0, self.days) * 2\n\n\n"
        "def load(environ=os.environ):\n    return environ\n"
    )
    found = one(before, before.replace("max(0, self.days)", "self.days"))
    assert found is not None
    assert (found.name, found.call, found.after) == ("Loan.fine", "Loan(-1).fine()", "-2")


def test_a_bound_that_every_result_had_and_one_has_not_is_named() -> None:
    before = "def clamped(n: int, most: int):\n    return max(0, min(n, most))\n"
    found = one(before, before.replace("max(0, min(n, most))", "min(n, most)"))
    assert found is not None
    assert found.lost == "it was never negative"
    assert one(before, before.replace("min(n, most)", "min(n + 1, most)")).lost == ""  # type: ignore[union-attr]


def test_a_second_call_shows_what_the_first_one_hid() -> None:
    before = (
        "class Cache:\n    def __init__(self, size: int):\n        self.size, self.data = size, {}\n\n"
        "    def put(self, key: str, value: int):\n        self.data[key] = value\n"
        "        if len(self.data) > self.size:\n            del self.data[next(iter(self.data))]\n"
    )
    found = one(before, before.replace("next(iter(self.data))", "key"))
    assert found is not None
    assert found.name == "Cache.put"


def test_texts_are_made_for_the_patterns_of_the_module() -> None:
    before = (
        "import re\n\nPART = re.compile(r'(\\d+)([smh])-(?P<x>[^-]+)')\n\n\n"
        "def read(text):\n    found = PART.match(text)\n    return found and int(found[1])\n"
    )
    found = one(before, before.replace("int(found[1])", "found[1]"))
    assert found is not None
    assert found.call.startswith("read('")


# ── what cannot get out ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "body",
    [
        "return open('/etc/passwd').read()",
        "return __import__('os').getcwd()",
        "import os\n    return os.getcwd()",
        "return eval('1')",
        "return getattr(n, '__class__')",
        "return ().__class__.__base__.__subclasses__()",
        "return f.__globals__",
        "return (x for x in ()).gi_frame.f_back",
        "return dataclasses.sys.modules",
        "return random.os",
        "return operator.attrgetter('__class__')(n)",
        "return typing.get_type_hints(f)",
        "return string.Formatter().get_field('0.__class__', (n,), {})",
        "return json.codecs.open('x')",
        "from operator import attrgetter\n    return attrgetter",
        "from random import _os\n    return _os",
    ],
)
def test_a_definition_that_does_more_than_compute_is_not_run(body: str) -> None:
    module = pure_part(f"def f(n: int):\n    {body}\n\n\ndef g():\n    return 1\n")
    assert module is not None
    assert [getattr(node, "name", "") for node in module.body] == ["g"]


def ran(source: str) -> subprocess.CompletedProcess[bytes]:
    """The runner alone, without the analysis that stands before it."""
    job = {
        "before": source,
        "after": source,
        "plans": [[{"call": "f", "arguments": []}]],
        "modules": ["json", "dataclasses"],
        "seconds": 5,
    }
    return subprocess.run(
        [sys.executable, "-I", "-S", "-B", example_runner.__file__],
        input=json.dumps(job).encode(),
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_the_runner_answers_for_what_computes() -> None:
    done = ran("def f():\n    return 2 + 2\n")
    assert done.returncode == 0
    assert json.loads(done.stdout) == [[[], [[["value", "4"]]] * 3]]


@pytest.mark.parametrize(
    "body",
    [
        "json.codecs.open(PATH, 'w')",
        "dataclasses.sys.modules['os'].remove(PATH)",
        "dataclasses.sys.modules['os'].rename(PATH, PATH + 'x')",
        "dataclasses.sys.modules['os'].system('rm ' + PATH)",
        "dataclasses.sys.modules['os'].truncate(PATH, 0)",
        "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
        ".__init__.__globals__['remove'](PATH)",
        "dataclasses.sys.modules['importlib'].import_module('socket').socket()",
    ],
)
def test_the_wall_holds_where_the_analysis_was_deceived(tmp_path: Path, body: str) -> None:
    target = tmp_path / "kept"
    target.write_text("mine")
    done = ran(
        f"import dataclasses, json\nPATH = {str(target)!r}\n\n\ndef f():\n    {body}\n    return 'out'\n"
    )
    assert b"out" not in done.stdout
    assert target.read_text() == "mine"
