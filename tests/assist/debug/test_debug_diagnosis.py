"""What programs print when they fail, as failures with places and fixes. The programs are really run."""
# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keystroke.assist.debug.diagnose import Diagnosis, diagnose
from keystroke.assist.debug.report import Failure, Frame, Language, failures
from keystroke.text import apply_edits


def output(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def read(folder: Path, name: str) -> str | None:
    file = folder / name
    return file.read_text() if file.is_file() else None


def diagnosed(folder: Path, text: str) -> Diagnosis:
    (folder / "app.py").write_text(text)
    found = failures(output(folder, sys.executable, "app.py"))
    assert found, "the program did not fail"
    return diagnose(found[-1], folder, folder, lambda name: read(folder, name))


FIXED = [
    ("import os\nprint(os.pth)\n", "import os\nprint(os.path)\n"),
    ("def f(width, height):\n    return width\nf(widht=1, height=2)\n", "def f(width, height):\n    return width\nf(width=1, height=2)\n"),
    ("class A:\n    def m():\n        return 1\nA().m()\n", "class A:\n    def m(self):\n        return 1\nA().m()\n"),
    ("class A:\n    def m(self):\n        return 1\nprint(A.m())\n", "class A:\n    def m(self):\n        return 1\nprint(A().m())\n"),
    ("d = {'name': 1}\nprint(d['nmae'])\n", "d = {'name': 1}\nprint(d['name'])\n"),
    ("print('a' + 1)\n", "print('a' + str(1))\n"),
    ("x = [1]\nx.push(2)\n", "x = [1]\nx.append(2)\n"),
    ("print('a'.toUpperCase())\n", "print('a'.upper())\n"),
    ("class P:\n    count = 1\n\n\np = P()\nprint(p.cuont)\n", "class P:\n    count = 1\n\n\np = P()\nprint(p.count)\n"),
    ("n = 0\ndef f():\n    n += 1\nf()\n", "n = 0\ndef f():\n    global n\n    n += 1\nf()\n"),
    ("from json import dmps\nprint(dmps(1))\n", "from json import dumps\nprint(dumps(1))\n"),
    ("import jsson\nprint(jsson.dumps(1))\n", "import json as jsson\nprint(jsson.dumps(1))\n"),
    ("def f(x):\n    return lenn(x)\nf([])\n", "def f(x):\n    return len(x)\nf([])\n"),
    ("def f(:\n    pass\n", "def f():\n    pass\n"),
    ("def f():\n  x = 1\n    y = 2\n", "def f():\n  x = 1\n  y = 2\n"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fixed"), FIXED, ids=[repr(case[0])[:40] for case in FIXED])
def test_the_first_fix_makes_the_program_run(tmp_path: Path, text: str, fixed: str) -> None:
    found = diagnosed(tmp_path, text)
    assert (found.path, found.failure.language) == ("app.py", Language.PYTHON)
    assert apply_edits(text, found.repairs[0].fix.edits) == fixed
    (tmp_path / "app.py").write_text(fixed)
    assert failures(output(tmp_path, sys.executable, "app.py")) == ()


def test_the_last_of_a_chain_is_what_stopped_the_program(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e\n"
    )
    found = failures(output(tmp_path, sys.executable, "app.py"))
    assert [(item.kind, item.frames[-1].line) for item in found] == [
        ("ZeroDivisionError", 2),
        ("KeyError", 4),
    ]


def test_an_exception_group_tells_its_members(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "def f():\n    raise ValueError('inner')\n\n\ntry:\n    f()\nexcept ValueError as e:\n"
        "    raise ExceptionGroup('both', [e])\n"
    )
    found = failures(output(tmp_path, sys.executable, "app.py"))
    assert ("ValueError", "inner") in {(item.kind, item.message) for item in found}


def test_the_innermost_frame_inside_the_workspace_is_the_place(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "import json\n\n\ndef load():\n    return json.loads('{')\n\n\nload()\n")
    assert (found.path, found.line, found.failure.kind) == ("app.py", 5, "JSONDecodeError")


def test_a_failure_elsewhere_has_no_place_and_no_fix(tmp_path: Path) -> None:
    place = Frame("/usr/lib/python3/somewhere.py", 3, "f")
    failure = Failure(Language.PYTHON, "NameError", "name 'x' is not defined", (place,))
    assert diagnose(failure, tmp_path, tmp_path, lambda name: read(tmp_path, name)) == Diagnosis(failure)


def test_a_missing_package_is_named_as_it_is_installed(tmp_path: Path) -> None:
    place = Frame("app.py", 1)
    failure = Failure(Language.PYTHON, "ModuleNotFoundError", "No module named 'sklearn'", (place,))
    assert "pip install scikit-learn" in diagnose(failure, tmp_path, tmp_path, lambda _: None).advice


def test_a_pytest_failure_is_located(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    total = 1\n    assert totl == 1\n")
    printed = output(
        tmp_path,
        "env",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--color=yes",
        "test_it.py",
    )
    (failure,) = failures(printed)
    assert (failure.kind, failure.frames[-1]) == ("NameError", Frame("test_it.py", 3))
    found = diagnose(failure, tmp_path, tmp_path, lambda name: read(tmp_path, name))
    text = (tmp_path / "test_it.py").read_text()
    assert "assert total == 1" in apply_edits(text, found.repairs[0].fix.edits)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_node_stack_trace_is_located(tmp_path: Path) -> None:
    (tmp_path / "app.js").write_text("function f() {\n  return missing + 1;\n}\nf();\n")
    (failure,) = failures(output(tmp_path, "node", "app.js"))
    assert (failure.language, failure.kind) == (Language.NODE, "ReferenceError")
    found = diagnose(failure, tmp_path, tmp_path, lambda name: read(tmp_path, name))
    assert (found.path, found.line, found.repairs) == ("app.js", 2, ())


def test_go_panics_and_compiler_errors_are_located() -> None:
    panic = "panic: boom\n\ngoroutine 1 [running]:\nmain.f(...)\n\t/w/main.go:5\nmain.main()\n\t/w/main.go:9 +0x1d\nexit status 2\n"
    (failure,) = failures(panic)
    assert failure == Failure(Language.GO, "panic", "boom", (Frame("/w/main.go", 9), Frame("/w/main.go", 5)))
    (compiled,) = failures("# example\n./main.go:3:5: undefined: x\n")
    assert (compiled.message, compiled.frames) == ("undefined: x", (Frame("./main.go", 3, "", 5),))


@pytest.mark.parametrize(
    "text", ["", "all is well\n", "Traceback (most recent call last):\n", '  File "x", line 1\n' * 5]
)
def test_output_without_a_failure_has_none(text: str) -> None:
    assert failures(text) == ()


def test_colours_do_not_hide_a_traceback() -> None:
    text = "\x1b[1mTraceback\x1b[0m (most recent call last):\n  File \"a.py\", line 1, in \x1b[35m<module>\x1b[0m\n    x\n\x1b[1;35mNameError\x1b[0m: \x1b[35mname 'x' is not defined\x1b[0m\n"
    (failure,) = failures(text)
    assert (failure.kind, failure.message) == ("NameError", "name 'x' is not defined")
