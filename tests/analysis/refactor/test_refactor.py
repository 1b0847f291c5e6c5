"""Refactorings as edits: meaning kept, files and line ends kept, unsaved text used, nothing written."""
# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keystroke.analysis.refactor import Refactoring, RefactoringPlan
from keystroke.errors import Forbidden, InputError, NotFound
from keystroke.text import apply_edits

MAIN = '''"""Doc."""

import os
import sys

from tools import helper


def area(width: int, height: int = 2) -> int:
    size = width * height
    return size


class Box:
    def grow(self, by):
        return area(by, 1) + helper(by)


print(area(1, 2), area(width=3), Box().grow(2), sys.argv[1:])
'''
TOOLS = "from typing import Any\r\n\r\n\r\ndef helper(x: Any) -> Any:\r\n    return x + 1\r\n"
USER = "import main\nfrom main import area\n\nprint(area(5), main.area(6, height=7))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "main.py").write_text(MAIN)
    (tmp_path / "tools.py").write_bytes(TOOLS.encode())
    (tmp_path / "user.py").write_text(USER)
    return tmp_path


@pytest.fixture
def work(folder: Path) -> Iterator[Refactoring]:
    opened = Refactoring(folder)
    yield opened
    opened.close()


def printed(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-B", "user.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def applied(folder: Path, work: Refactoring, done: RefactoringPlan) -> dict[str, str]:
    """The new texts, which are also put on disk; before that nothing must have changed there."""
    before = {"main.py": MAIN, "tools.py": TOOLS, "user.py": USER}
    assert {p.name: p.read_bytes().decode() for p in folder.iterdir() if p.is_file()} == before
    texts = {path: apply_edits(before[path], edits) for path, edits in done.edits.items()}
    for path, text in texts.items():
        (folder / path).write_bytes(text.encode())
    return texts


def test_a_rename_reaches_every_file_and_keeps_what_the_program_prints(
    folder: Path, work: Refactoring
) -> None:
    done = work.rename("main.py", MAIN.index("area"), "surface")
    was = printed(folder)
    texts = applied(folder, work, done)
    assert set(texts) == {"main.py", "user.py"}
    assert texts["user.py"] == USER.replace("area", "surface")
    assert texts["main.py"] == MAIN.replace("area", "surface")
    assert printed(folder) == was


def test_a_renamed_parameter_is_renamed_in_calls(folder: Path, work: Refactoring) -> None:
    texts = applied(folder, work, work.rename("main.py", MAIN.index("height: int"), "tall"))
    assert texts["user.py"] == USER.replace("height=7", "tall=7")
    assert texts["main.py"] == MAIN.replace("height", "tall")


def test_line_ends_of_another_file_are_kept(folder: Path, work: Refactoring) -> None:
    texts = applied(folder, work, work.rename("main.py", MAIN.index("helper"), "assist"))
    assert texts["tools.py"] == TOOLS.replace("helper", "assist")


def test_offsets_count_in_the_text_with_its_own_line_ends(work: Refactoring) -> None:
    done = work.rename("tools.py", TOOLS.index("helper"), "assist")
    assert apply_edits(TOOLS, done.edits["tools.py"]) == TOOLS.replace("helper", "assist")


def test_unsaved_text_stands_above_the_file(folder: Path) -> None:
    typed = USER + "\n\ndef unsaved():\n    return area(8)\n"
    opened = Refactoring(folder, {"user.py": typed})
    done = opened.rename("main.py", MAIN.index("area"), "surface")
    assert apply_edits(typed, done.edits["user.py"]) == typed.replace("area", "surface")
    assert (folder / "user.py").read_text() == USER


def test_a_variable_is_extracted(folder: Path, work: Refactoring) -> None:
    start = MAIN.index("width * height")
    done = work.extract_variable("main.py", start, start + len("width * height"), "product")
    text = applied(folder, work, done)["main.py"]
    assert "    product = width * height\n    size = product\n" in text


def test_a_function_is_extracted_and_the_program_prints_the_same(folder: Path, work: Refactoring) -> None:
    start, end = MAIN.index("    size ="), MAIN.index("    return size")
    done = work.extract_function("main.py", start, end, "measure")
    text = applied(folder, work, done)["main.py"]
    assert "size = measure(width, height)" in text
    assert "def measure(width, height):" in text
    assert printed(folder).splitlines()[-1] == "10 42"


def test_a_variable_is_inlined(folder: Path, work: Refactoring) -> None:
    text = applied(folder, work, work.inline("main.py", MAIN.index("size =")))["main.py"]
    assert "    return width * height\n" in text
    assert "size" not in text


def test_a_function_is_moved_and_imports_follow(folder: Path, work: Refactoring) -> None:
    texts = applied(folder, work, work.move("main.py", MAIN.index("area"), "tools.py"))
    assert "def area(width: int, height: int = 2) -> int:\r\n" in texts["tools.py"]
    assert "def area" not in texts["main.py"]
    assert printed(folder).splitlines()[-1] == "10 42"


def test_a_changed_signature_reaches_every_call_and_keeps_annotations(
    folder: Path, work: Refactoring
) -> None:
    done = work.change_signature("main.py", MAIN.index("area"), "width, depth=1, height=2")
    texts = applied(folder, work, done)
    assert "def area(width: int, depth=1, height: int = 2) -> int:" in texts["main.py"]
    assert "area(by, height=1)" in texts["main.py"]
    assert printed(folder).splitlines()[-1] == "10 42"


def test_imports_are_organised(folder: Path, work: Refactoring) -> None:
    text = applied(folder, work, work.organise_imports("main.py"))["main.py"]
    assert "import os" not in text
    assert "import sys" in text


def test_nothing_is_left_behind(folder: Path, work: Refactoring) -> None:
    before = sorted(folder.rglob("*"))
    work.rename("main.py", MAIN.index("area"), "surface")
    work.organise_imports("main.py")
    assert sorted(folder.rglob("*")) == before


def test_code_of_the_project_is_never_run(tmp_path: Path) -> None:
    (tmp_path / ".ropeproject").mkdir()
    (tmp_path / ".ropeproject" / "config.py").write_text("open('ran', 'w').close()\n")
    (tmp_path / "a.py").write_text("open('ran', 'w').close()\nx = 1\nprint(x)\n")
    Refactoring(tmp_path).rename("a.py", (tmp_path / "a.py").read_text().index("x = 1"), "y")
    assert not (tmp_path / "ran").exists()
    assert not Path("ran").exists()


REFUSED = [
    (lambda w: w.rename("main.py", MAIN.index("area"), "area"), "already"),
    (lambda w: w.rename("main.py", MAIN.index("area"), "helper"), "already means something"),
    (lambda w: w.rename("main.py", MAIN.index("area"), "not a name"), "not a name"),
    (lambda w: w.rename("main.py", MAIN.index("area"), "class"), "not a name"),
    (lambda w: w.rename("main.py", 3, "other"), "cannot rename Doc"),
    (lambda w: w.rename("main.py", 10_000, "other"), "outside"),
    (lambda w: w.extract_function("main.py", 5, 5, "f"), "empty"),
    (lambda w: w.extract_variable("main.py", MAIN.index("width *"), MAIN.index("size\n\n"), "f"), "cannot extract"),
    (lambda w: w.change_signature("main.py", MAIN.index("area"), "width"), "would be wrong"),
    (lambda w: w.change_signature("main.py", MAIN.index("area"), "width, height, depth"), "needs a default"),
    (lambda w: w.change_signature("main.py", MAIN.index("area"), "height, width"), "cannot come after"),
    (lambda w: w.change_signature("main.py", MAIN.index("area"), "a b"), "not a list of parameters"),
    (lambda w: w.change_signature("main.py", MAIN.index("area"), "width, width"), "not a list of parameters|twice"),
    (lambda w: w.move("main.py", MAIN.index("area"), "main.py"), "already"),
    (lambda w: w.move("main.py", MAIN.index("grow"), "tools.py"), "top of a module|cannot move"),
    (lambda w: w.inline("main.py", MAIN.index("sys.argv")), "cannot inline"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "words"), REFUSED, ids=[case[1] for case in REFUSED])
def test_what_cannot_be_done_is_one_sentence(work: Refactoring, ask: object, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        ask(work)  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_broken_binary_or_outside_are_refused(folder: Path) -> None:
    (folder / "bad.py").write_text("def (\n")
    (folder / "binary.py").write_bytes(b"\0\1\2")
    work = Refactoring(folder)
    with pytest.raises(NotFound, match="does not exist"):
        work.organise_imports("nosuch.py")
    with pytest.raises(InputError, match="does not parse"):
        work.organise_imports("bad.py")
    with pytest.raises(InputError, match="binary"):
        work.organise_imports("binary.py")
    with pytest.raises(Forbidden, match="outside"):
        work.organise_imports("../outside.py")
    # The others are refactored all the same.
    assert "user.py" in work.rename("main.py", MAIN.index("area"), "surface").edits


@pytest.mark.parametrize(
    ("before", "selected", "after"),
    [
        ("def f(a, b):\n    return (a + b) * 2\n", "a + b", "    total = a + b\n    return total * 2\n"),
        ("def f(a, b):\n    return (a + b) * 2\n", "(a + b)", "    total = a + b\n    return total * 2\n"),
        ("def f(a):\n    return(a + 1)\n", "a + 1", "    total = a + 1\n    return total\n"),
        ("def f(a):\n    return g((a + 1))\n", "(a + 1)", "    total = a + 1\n    return g(total)\n"),
        ("def f(a):\n    return (a, 1)\n", "(a, 1)", "    total = (a, 1)\n    return total\n"),
        ("def f(a):\n    return sum(x for x in a)\n", "x for x in a", "    total = (x for x in a)\n    return sum(total)\n"),
        ("def f(a):\n    return 1 if(a > 1)else 2\n", "a > 1", "    total = a > 1\n    return 1 if total else 2\n"),
    ],
)  # fmt: skip
def test_an_extracted_variable_leaves_no_parentheses_behind(
    tmp_path: Path, before: str, selected: str, after: str
) -> None:
    (tmp_path / "a.py").write_text(before)
    start = before.index(selected)
    done = Refactoring(tmp_path).extract_variable("a.py", start, start + len(selected), "total")
    assert apply_edits(before, done.edits["a.py"]).endswith(after)


def test_a_rename_follows_export_lists_and_quoted_annotations_and_no_other_string(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    files = {
        "pack/__init__.py": 'from .core import *\nfrom .core import __all__ as names\n\n__all__ = ["Thing", "other"]\nother = 1\n',
        "pack/core.py": '__all__ = ["Thing"]\n\n\nclass Thing:\n    """A Thing."""\n\n    label = "Thing"\n',
        "pack/use.py": 'from __future__ import annotations\n\nfrom .core import Thing\n\n\ndef f(x: "Thing | None") -> list["Thing"]:\n    return [Thing()]\n',
        "pack/else.py": '__all__ = ["Thing"]\nThing = 1\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    work = Refactoring(tmp_path)
    done = work.rename("pack/core.py", files["pack/core.py"].index("Thing:"), "Item")
    after = {name: apply_edits(text, done.edits.get(name, ())) for name, text in files.items()}
    assert after["pack/__init__.py"] == files["pack/__init__.py"].replace("Thing", "Item")
    assert (
        after["pack/core.py"]
        == '__all__ = ["Item"]\n\n\nclass Item:\n    """A Thing."""\n\n    label = "Thing"\n'
    )
    assert after["pack/use.py"] == files["pack/use.py"].replace("Thing", "Item")
    assert after["pack/else.py"] == files["pack/else.py"]


def test_a_rename_follows_dotted_paths_in_strings(tmp_path: Path) -> None:
    files = {
        "src/shop/__init__.py": "from shop.pricing import total\n",
        "src/shop/pricing.py": "def total(items):\n    return sum(items)\n",
        "src/shop/report.py": "from shop.pricing import total\n\n\ndef line(x):\n    return total(x)\n",
        "tests/__init__.py": "",
        "tests/test_report.py": (
            "from unittest import mock\n\nfrom shop.pricing import total\n\n\n"
            'PATHS = ["shop.pricing.total", "shop.report.total", "shop.pricing:total", "shop.total"]\n'
            'OTHER = ["shop.other.total", "total", "pricing.total", "the shop.pricing.total", "a.total"]\n\n\n'
            "def test_line(monkeypatch):\n"
            '    with mock.patch("shop.report.total", lambda x: 7), mock.patch("shop.total"):\n'
            '        monkeypatch.setattr("shop.pricing.total.__doc__", "")\n'
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = Refactoring(tmp_path).rename("src/shop/pricing.py", 4, "grand_total")
    changed = apply_edits(files["tests/test_report.py"], done.edits["tests/test_report.py"])
    assert (
        'PATHS = ["shop.pricing.grand_total", "shop.report.grand_total", "shop.pricing:grand_total", "shop.total"]'
        in changed
    )
    assert files["tests/test_report.py"].split("\n")[6] in changed  # those of OTHER stay
    assert 'mock.patch("shop.report.grand_total", lambda x: 7), mock.patch("shop.grand_total")' in changed
    assert 'setattr("shop.pricing.grand_total.__doc__"' in changed


def test_a_real_package_renamed_there_and_back_is_the_same_and_runs_in_between(tmp_path: Path) -> None:
    import shutil

    import pyflakes

    shutil.copytree(
        Path(pyflakes.__file__).parent,
        tmp_path / "pyflakes",
        ignore=shutil.ignore_patterns("test", "__pycache__"),
    )
    before = {p: p.read_bytes() for p in tmp_path.rglob("*.py")}
    names = [
        ("checker.py", "class Binding", "Tied"),
        ("checker.py", "def getAlternatives", "branches"),
        ("messages.py", "class UnusedImport", "IdleImport"),
    ]
    program = (
        "import sys; sys.path.insert(0, '.'); from pyflakes import api; api.check('import os\\n', 'x.py')"
    )
    usual = "x.py:1:1: 'os' imported but unused\n"
    for file, definition, new in names:
        path = f"pyflakes/{file}"
        old = definition.rpartition(" ")[2]
        for wanted, there in (
            (new, f"{definition.partition(' ')[0]} {old}"),
            (old, f"{definition.partition(' ')[0]} {new}"),
        ):
            work = Refactoring(tmp_path)
            done = work.rename(path, work.text(path).index(there) + len(there), wanted)
            work.close()
            for name, edits in done.edits.items():
                target = tmp_path / name
                target.write_bytes(apply_edits(target.read_bytes().decode(), edits).encode())
            ran = subprocess.run(
                [sys.executable, "-B", "-c", program],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (ran.stdout, ran.stderr) == (usual, ""), (wanted, ran.stderr)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*.py")} == before
