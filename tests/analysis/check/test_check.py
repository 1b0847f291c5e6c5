"""Errors in unsaved text: found where they are, mended by fixes that were tried, silence elsewhere."""
# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystroke.analysis.check import Diagnostic, Level, Project, check, fixes_for
from keystroke.errors import InputError
from keystroke.text import apply_edits

# text, the code of the diagnostic, the text after its first fix
MENDED = [
    ("def f(x)\n    return x\n", "syntax-error", "def f(x):\n    return x\n"),
    ("for i in range(3)  # loop\n    print(i)\n", "syntax-error", "for i in range(3):  # loop\n    print(i)\n"),
    ("class A\n    pass\n", "syntax-error", "class A:\n    pass\n"),
    ("print('a'\nx = 1\n", "syntax-error", "print('a')\nx = 1\n"),
    ("x = [1, 2\ny = 3\n", "syntax-error", "x = [1, 2]\ny = 3\n"),
    ("def f(a, b:\n    return a\n", "syntax-error", "def f(a, b):\n    return a\n"),
    ("x = (1, 2]\n", "syntax-error", "x = (1, 2)\n"),
    ("x = {'a': [1, 2}\n", "syntax-error", "x = {'a': [1, 2]}\n"),
    ("x = 1)\n", "syntax-error", "x = 1\n"),
    ('print("hello)\n', "syntax-error", 'print("hello")\n'),
    ("if x = 1:\n    pass\n", "syntax-error", "if x == 1:\n    pass\n"),
    ("def f():\nreturn 1\n", "syntax-error", "def f():\n    return 1\n"),
    ("def f():\n    x = 1\n      y = 2\n    return x\n", "syntax-error", "def f():\n    x = 1\n    y = 2\n    return x\n"),
    ("if 1:\n    x = 1\n   y = 2\n", "syntax-error", "if 1:\n    x = 1\n    y = 2\n"),
    ("def f():\n\tx = 1\n        return x\n", "syntax-error", "def f():\n        x = 1\n        return x\n"),
    ("print 'a'\n", "syntax-error", "print('a')\n"),
    ("if a:\n    pass\nelse if b:\n    pass\n", "syntax-error", "if a:\n    pass\nelif b:\n    pass\n"),
    ("pressed len([])\nx = 1\n", "syntax-error", "pressed = len([])\nx = 1\n"),
    ("d = {}\nprint(d[row'])\n", "syntax-error", "d = {}\nprint(d['row'])\n"),
    ("d = {'a': 1 'b': 2}\n", "syntax-error", "d = {'a': 1, 'b': 2}\n"),
    ("x = f'{a'\n", "syntax-error", "x = f'{a}'\n"),
    ("x = 1\nif x && True:\n    pass\n", "syntax-error", "x = 1\nif x and True:\n    pass\n"),
    ("s = \u201chi\u201d\n", "syntax-error", 's = "hi"\n'),
    ("try:\n    f()\nexcept ValueError, e:\n    pass\n", "syntax-error", "try:\n    f()\nexcept ValueError as e:\n    pass\n"),
    ("if x == 1 {\n    y = 1\n", "syntax-error", "if x == 1:\n    y = 1\n"),
    ("'''abc\nx = 1\n", "syntax-error", "'''abc\nx = 1'''\n"),
    ("def f(x)\r\n    return x\r\n", "syntax-error", "def f(x):\r\n    return x\r\n"),
    ("def f():\n    total = 1\n    return totl\n", "undefined-name", "def f():\n    total = 1\n    return total\n"),
    ("print(sys.argv)\n", "undefined-name", "import sys\n\nprint(sys.argv)\n"),
    ('"""Doc."""\n\nprint(Path("."))\n', "undefined-name", '"""Doc."""\n\nfrom pathlib import Path\n\nprint(Path("."))\n'),
    (
        "import os\nimport sys\n\nprint(os.sep, sys.path, json.dumps(1))\n",
        "undefined-name",
        "import json\nimport os\nimport sys\n\nprint(os.sep, sys.path, json.dumps(1))\n",
    ),
    (
        "from typing import Any\n\nx: Optional[Any] = None\n",
        "undefined-name",
        "from typing import Any, Optional\n\nx: Optional[Any] = None\n",
    ),
    ("x = null\n", "undefined-name", "x = None\n"),
    ("print('ä', nmae := 1, nmea)\n", "undefined-name", "print('ä', nmae := 1, nmae)\n"),
    (
        "class A:\n    def __init__(self):\n        self.size = 1\n\n    def m(self):\n        return size\n",
        "undefined-name",
        "class A:\n    def __init__(self):\n        self.size = 1\n\n    def m(self):\n        return self.size\n",
    ),
    (
        "class A:\n    def __init__(self):\n        self.size = 1\n\n    def m(self):\n        return self.szie\n",
        "unknown-self-attribute",
        "class A:\n    def __init__(self):\n        self.size = 1\n\n    def m(self):\n        return self.size\n",
    ),
    ("class A:\n    def m():\n        return 1\n", "missing-self", "class A:\n    def m(self):\n        return 1\n"),
    (
        "n = 0\n\n\ndef f():\n    n += 1\n    return n\n",
        "undefined-local",
        "n = 0\n\n\ndef f():\n    global n\n    n += 1\n    return n\n",
    ),
    ("import os\nimport sys\n\nprint(sys.path)\n", "unused-import", "import sys\n\nprint(sys.path)\n"),
    ("from os import path, sep\n\nprint(sep)\n", "unused-import", "from os import sep\n\nprint(sep)\n"),
    ("def f():\n    import os\n", "unused-import", "def f():\n    pass\n"),
    ("from collections import Mapping\n\nprint(Mapping)\n", "unknown-import-name", "from collections.abc import Mapping\n\nprint(Mapping)\n"),
    ("from os import pathh\n\nprint(pathh)\n", "unknown-import-name", "from os import path\n\nprint(path)\n"),
    ("import os\n\nos.pth.join('a')\n", "unknown-module-attribute", "import os\n\nos.path.join('a')\n"),
    ("name = 1\nprint('hi {name}')\n", "missing-f-prefix", "name = 1\nprint(f'hi {name}')\n"),
    ("print(f'hi')\n", "useless-f-prefix", "print('hi')\n"),
    ("x = 1\nprint(x is 1)\n", "is-literal", "x = 1\nprint(x == 1)\n"),
]  # fmt: skip


def only(text: str, code: str) -> Diagnostic:
    (found,) = [item for item in check(text, "a.py") if item.code == code]
    return found


@pytest.mark.parametrize(("text", "code", "mended"), MENDED, ids=[repr(case[0])[:40] for case in MENDED])
def test_the_first_fix_is_the_right_one_and_the_diagnostic_is_gone(text: str, code: str, mended: str) -> None:
    found = only(text, code)
    assert 0 <= found.start <= found.end <= len(text)
    assert apply_edits(text, found.fixes[0].edits) == mended
    assert code not in {item.code for item in check(mended, "a.py", fixes=False)}


@pytest.mark.parametrize(("text", "code"), [case[:2] for case in MENDED])
def test_every_fix_that_is_offered_was_proved(text: str, code: str) -> None:
    before = [item.code for item in check(text, "a.py", fixes=False)]
    for found in check(text, "a.py"):
        for fix in found.fixes:
            after = [item.code for item in check(apply_edits(text, fix.edits), "a.py", fixes=False)]
            assert after.count(found.code) < before.count(found.code)


def test_a_misspelt_module_is_mended_with_or_without_uses() -> None:
    assert (
        apply_edits("import jsn\n", only("import jsn\n", "unresolved-import").fixes[0].edits)
        == "import json\n"
    )
    used = "import jsn\n\nprint(jsn.dumps(1))\n"
    fixed = apply_edits(used, only(used, "unresolved-import").fixes[0].edits)
    assert fixed == "import json as jsn\n\nprint(jsn.dumps(1))\n"


def test_fixes_can_be_made_later_for_one_diagnostic() -> None:
    text = "import os\nprint(undefind)\nundefined = 1\n"
    for quick, full in zip(check(text, "a.py", fixes=False), check(text, "a.py"), strict=True):
        assert quick.fixes == ()
        assert fixes_for(text, quick, "a.py") == full.fixes


CORRECT = [
    "import os.path\nprint(os.path.sep, os.sep)\n",
    "try:\n    import nosuchthing\nexcept ImportError:\n    nosuchthing = None\n",
    "import numpy_of_someone_else\nprint(numpy_of_someone_else.x)\n",
    "import re\nprint(re.MULTILINE, re.I)\n",
    "class A(Base):\n    def m(self):\n        return self.from_elsewhere\nBase = object\n".replace(
        "(Base)", "(dict)"
    ),
    "class A:\n    def __getattr__(self, name):\n        return 1\n    def m(self):\n        return self.anything\n",
    "class A:\n    def m(self):\n        return self.x\na = A()\na.x = 1\nprint(a.m())\n",
    "class B:\n    def run(self):\n        return self.step()\nclass C(B):\n    def step(self):\n        return 1\nprint(C)\n",
    "print('{name}'.format(name=1))\nx = '{name}'\nprint(x)\n",
    "import nosuch.thing  # noqa: F401\n",
    "def f():\n    return later()\ndef later():\n    return 1\nprint(f)\n",
    "print([x for x in range(3)], (lambda y: y)(1))\n",
    "match 1:\n    case [a, *b]:\n        print(a, b)\n    case {'k': v, **rest}:\n        print(v, rest)\n",
]


@pytest.mark.parametrize("text", CORRECT)
def test_correct_text_is_left_alone(text: str) -> None:
    assert [item for item in check(text, "a.py") if item.level is not Level.HINT] == []


def test_the_standard_library_gives_no_false_errors() -> None:
    folder = Path(sysconfig.get_paths()["stdlib"])
    wrong = []
    for name in ("json/decoder.py", "argparse.py", "dataclasses.py", "email/utils.py", "textwrap.py"):
        text = (folder / name).read_text("utf-8")
        wrong += [
            (name, item) for item in check(text, folder / name, fixes=False) if item.level is Level.ERROR
        ]
    assert wrong == []


def test_names_of_the_project_are_read_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(
        "import os\nos.mkdir('was_run')\n\n\ndef square(x):\n    return x * x\n"
    )
    text = "import shapes\nfrom shapes import sqare\n\nprint(shapes.squre(2), sqare)\n"
    found = check(text, tmp_path / "main.py", project=Project(tmp_path))
    assert {item.code for item in found} == {"unknown-import-name", "unknown-module-attribute"}
    for item in found:
        assert "square" in apply_edits(text, item.fixes[0].edits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shapes.py"]
    assert "shapes" not in sys.modules


def test_a_module_of_the_same_name_in_a_package_does_not_hide_the_standard_one(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "types.py").write_text("mine = 1\n")
    text = "from types import GeneratorType\n\nprint(GeneratorType)\n"
    assert check(text, package / "a.py", project=Project(tmp_path)) == ()


@pytest.mark.parametrize("text", ["", "\0", "\ud800", "x = '\ud800'\n", "(" * 500, "\t\r\x0c", "#" * 100_000])
def test_strange_texts_are_answered_not_raised(text: str) -> None:
    check(text, "a.py")


def test_what_is_not_python_or_too_long_is_not_checked() -> None:
    assert check("this is { not python", "a.txt") == ()
    with pytest.raises(InputError, match="at most"):
        check("x = 1\n" * 400_000, "a.py")


PROGRAM = """import os


class Shape:
    def __init__(self, width, height=2):
        self.width = width
        self.height = height

    def area(self):
        if self.width > 0:
            return self.width * self.height
        return f"{self.width} of {os.sep}"


print(Shape(1).area(), [x for x in (1, 2)], {"a": 1})
"""


@settings(max_examples=60)
@given(st.integers(0, len(PROGRAM) - 1), st.sampled_from(["", "(", ")", ":", "'", "=", " ", "x"]))
def test_a_slip_of_one_key_is_answered_and_its_fixes_hold(at: int, typed: str) -> None:
    text = PROGRAM[:at] + typed + PROGRAM[at + (typed == "") :]
    before = [item.code for item in check(text, "a.py", fixes=False)]
    for found in check(text, "a.py"):
        for fix in found.fixes:
            after = check(apply_edits(text, fix.edits), "a.py", fixes=False)
            if found.code == "syntax-error":
                line = text.count("\n", 0, found.start)
                assert all(
                    item.code != "syntax-error" or text.count("\n", 0, min(item.start, len(text))) > line
                    for item in after
                )
            else:
                assert [item.code for item in after].count(found.code) < before.count(found.code)
