"""Twenty small tasks of our own: fix, rename, add, delete, create.

A task has initial files, an instruction, and a check of the resulting folder. Checks run the code where there
is code to run; how the change was made does not matter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Check = Callable[[Path], bool]


@dataclass(frozen=True)
class ClientTask:
    name: str
    kind: str  # fix, rename, add, delete, create
    files: Mapping[str, str]
    prompt: str
    check: Check


def runs(code: str) -> Check:
    """Python code that must run without an exception in the folder."""

    def check(folder: Path) -> bool:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, timeout=20, check=False
        )
        return done.returncode == 0

    return check


def holds(path: str, *texts: str, without: str = "") -> Check:
    """A file that contains all `texts`, and not `without`."""

    def check(folder: Path) -> bool:
        file = folder / path
        if not file.is_file():
            return False
        content = file.read_text(errors="replace")
        return all(text in content for text in texts) and not (without and without in content)

    return check


def gone(path: str) -> Check:
    return lambda folder: not (folder / path).exists()


def both(*checks: Check) -> Check:
    return lambda folder: all(check(folder) for check in checks)


CALC = "def add(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a * b\n"
SHOP = "PRICE = 3\n\n\ndef total(count):\n    return PRICE * count\n"

TASKS = (
    ClientTask(
        "greeting",
        "fix",
        {"hello.py": "print('hi')\n"},
        "In hello.py, print 'hello' instead of 'hi'.",
        holds("hello.py", "hello", without="'hi'"),
    ),
    ClientTask(
        "minus",
        "fix",
        {"calc.py": CALC},
        "In calc.py the function add subtracts. Make it return a + b.",
        runs("import calc; assert calc.add(2, 3) == 5; assert calc.mul(2, 3) == 6"),
    ),
    ClientTask(
        "off by one",
        "fix",
        {"last.py": "def last(items):\n    return items[len(items)]\n"},
        "last in last.py raises IndexError. Fix it so that it returns the last item.",
        runs("import last; assert last.last([1, 2, 3]) == 3"),
    ),
    ClientTask(
        "empty list",
        "fix",
        {"mean.py": "def mean(values):\n    return sum(values) / len(values)\n"},
        "mean in mean.py fails for an empty list. Make it return 0 then.",
        runs("import mean; assert mean.mean([]) == 0; assert mean.mean([2, 4]) == 3"),
    ),
    ClientTask(
        "typo",
        "fix",
        {"README.md": "# Notes\n\nThis is teh first line.\n"},
        "Correct the typo 'teh' in README.md.",
        holds("README.md", "the first line", without="teh"),
    ),
    ClientTask(
        "price",
        "fix",
        {"shop.py": SHOP},
        "Set PRICE to 5 in shop.py.",
        runs("import shop; assert shop.total(2) == 10"),
    ),
    ClientTask(
        "comparison",
        "fix",
        {"age.py": "def adult(age):\n    return age > 18\n"},
        "In age.py, adult must be true for 18 as well.",
        runs("import age; assert age.adult(18) and age.adult(40) and not age.adult(17)"),
    ),
    ClientTask(
        "function name",
        "rename",
        {"area.py": "def calc(w, h):\n    return w * h\n"},
        "Rename the function calc in area.py to area.",
        runs("import area; assert area.area(2, 3) == 6; assert not hasattr(area, 'calc')"),
    ),
    ClientTask(
        "variable name",
        "rename",
        {"config.py": "tmo = 30\n"},
        "Rename the variable tmo in config.py to timeout.",
        runs("import config; assert config.timeout == 30; assert not hasattr(config, 'tmo')"),
    ),
    ClientTask(
        "class name",
        "rename",
        {"pets.py": "class Cat:\n    def speak(self):\n        return 'meow'\n"},
        "Rename the class Cat in pets.py to Kitten.",
        runs("import pets; assert pets.Kitten().speak() == 'meow'; assert not hasattr(pets, 'Cat')"),
    ),
    ClientTask(
        "another function",
        "add",
        {"calc.py": "def add(a, b):\n    return a + b\n"},
        "Add a function sub(a, b) to calc.py that returns a - b. Keep add.",
        runs("import calc; assert calc.sub(5, 3) == 2; assert calc.add(1, 2) == 3"),
    ),
    ClientTask(
        "docstring",
        "add",
        {"area.py": "def area(w, h):\n    return w * h\n"},
        "Add a docstring to the function area in area.py.",
        runs("import area; assert area.area.__doc__; assert area.area(2, 3) == 6"),
    ),
    ClientTask(
        "default",
        "add",
        {"greet.py": "def greet(name):\n    return 'hello ' + name\n"},
        "Give the parameter name of greet in greet.py the default 'world'.",
        runs("import greet; assert greet.greet() == 'hello world'; assert greet.greet('x') == 'hello x'"),
    ),
    ClientTask(
        "line",
        "add",
        {"requirements.txt": "requests\nnumpy\n"},
        "Add the line 'rich' to requirements.txt.",
        holds("requirements.txt", "requests\n", "numpy\n", "rich"),
    ),
    ClientTask(
        "file",
        "delete",
        {"old.py": "print('old')\n", "new.py": "print('new')\n"},
        "Delete the file old.py.",
        both(gone("old.py"), holds("new.py", "print('new')")),
    ),
    ClientTask(
        "function",
        "delete",
        {"calc.py": "def add(a, b):\n    return a + b\n\n\ndef unused():\n    pass\n"},
        "Remove the function unused from calc.py.",
        runs("import calc; assert calc.add(1, 2) == 3; assert not hasattr(calc, 'unused')"),
    ),
    ClientTask(
        "print",
        "delete",
        {"double.py": "def double(x):\n    print('debug')\n    return 2 * x\n"},
        "Remove the debug print from double.py.",
        both(
            holds("double.py", "def double", without="print"),
            runs("import double; assert double.double(2) == 4"),
        ),
    ),
    ClientTask(
        "note",
        "create",
        {},
        "Create a file notes.txt with the line: buy milk",
        holds("notes.txt", "buy milk"),
    ),
    ClientTask(
        "module",
        "create",
        {},
        "Create a file square.py with a function square(x) that returns x * x.",
        runs("import square; assert square.square(4) == 16"),
    ),
    ClientTask(
        "data",
        "create",
        {},
        'Create a file config.json with this content: {"debug": true, "port": 8080}',
        runs("import json; d = json.load(open('config.json')); assert d == {'debug': True, 'port': 8080}"),
    ),
)
