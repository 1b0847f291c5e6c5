"""What programs print when they fail, as failures with places and fixes. The programs are really run."""
# ruff: noqa: E501 - a case is one line

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from installed import program
from keystroke.analysis.failures.diagnose import Diagnosis, diagnose
from keystroke.analysis.failures.failure import Failure, Language, StackFrame
from keystroke.analysis.failures.report import FailureWatcher, find_failures
from keystroke.clients.cli.live_run import TerminalLine
from keystroke.text import apply_edits


def output(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def read(folder: Path, name: str) -> str | None:
    file = folder / name
    return file.read_text() if file.is_file() else None


def diagnosed(folder: Path, text: str) -> Diagnosis:
    (folder / "app.py").write_text(text)
    found = find_failures(output(folder, sys.executable, "app.py"))
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
    assert find_failures(output(tmp_path, sys.executable, "app.py")) == ()


def test_the_last_of_a_chain_is_what_stopped_the_program(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "try:\n    1 / 0\nexcept Exception as e:\n    raise KeyError('x') from e\n"
    )
    found = find_failures(output(tmp_path, sys.executable, "app.py"))
    assert [(item.kind, item.frames[-1].line) for item in found] == [
        ("ZeroDivisionError", 2),
        ("KeyError", 4),
    ]


def test_an_exception_group_tells_its_members(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "def f():\n    raise ValueError('inner')\n\n\ntry:\n    f()\nexcept ValueError as e:\n"
        "    raise ExceptionGroup('both', [e])\n"
    )
    found = find_failures(output(tmp_path, sys.executable, "app.py"))
    assert ("ValueError", "inner") in {(item.kind, item.message) for item in found}


def test_the_innermost_frame_inside_the_workspace_is_the_place(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "import json\n\n\ndef load():\n    return json.loads('{')\n\n\nload()\n")
    assert (found.path, found.line, found.failure.kind) == ("app.py", 5, "JSONDecodeError")


def test_a_failure_elsewhere_has_no_place_and_no_fix(tmp_path: Path) -> None:
    place = StackFrame("/usr/lib/python3/somewhere.py", 3, "f")
    failure = Failure(Language.PYTHON, "NameError", "name 'x' is not defined", (place,))
    assert diagnose(failure, tmp_path, tmp_path, lambda name: read(tmp_path, name)) == Diagnosis(failure)


def test_a_missing_package_is_named_as_it_is_installed(tmp_path: Path) -> None:
    place = StackFrame("app.py", 1)
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
    (failure,) = find_failures(printed)
    assert (failure.kind, failure.frames[-1]) == ("NameError", StackFrame("test_it.py", 3))
    found = diagnose(failure, tmp_path, tmp_path, lambda name: read(tmp_path, name))
    text = (tmp_path / "test_it.py").read_text()
    assert "assert total == 1" in apply_edits(text, found.repairs[0].fix.edits)


@pytest.mark.skipif(program("node") is None, reason="node is not installed")
def test_a_node_stack_trace_is_located(tmp_path: Path) -> None:
    (tmp_path / "app.js").write_text("function f() {\n  return missing + 1;\n}\nf();\n")
    (failure,) = find_failures(output(tmp_path, "node", "app.js"))
    assert (failure.language, failure.kind) == (Language.NODE, "ReferenceError")
    found = diagnose(failure, tmp_path, tmp_path, lambda name: read(tmp_path, name))
    assert (found.path, found.line, found.repairs) == ("app.js", 2, ())


def test_go_panics_and_compiler_errors_are_located() -> None:
    panic = "panic: boom\n\ngoroutine 1 [running]:\nmain.f(...)\n\t/w/main.go:5\nmain.main()\n\t/w/main.go:9 +0x1d\nexit status 2\n"
    (failure,) = find_failures(panic)
    assert failure == Failure(
        Language.GO, "panic", "boom", (StackFrame("/w/main.go", 9), StackFrame("/w/main.go", 5))
    )
    (compiled,) = find_failures("# example\n./main.go:3:5: undefined: x\n")
    assert (compiled.message, compiled.frames) == ("undefined: x", (StackFrame("./main.go", 3, "", 5),))


LOCATED = [
    ("node", "s.js", "function f() {\n  return 1 +;\n}\n", ["node", "s.js"], (Language.NODE, "SyntaxError", 2)),
    ("gcc", "a.c", "int main(void) {\n  return y;\n}\n", ["gcc", "-c", "a.c"], (Language.C, "compile error", 2)),
    ("g++", "a.cpp", "int main() {\n  return y;\n}\n", ["g++", "-c", "a.cpp"], (Language.CPP, "compile error", 2)),
    ("javac", "A.java", "class A {\n  int x = y;\n}\n", ["javac", "A.java"], (Language.JAVA, "compile error", 2)),
    ("rustc", "m.rs", "fn main() {\n    y;\n}\n", ["rustc", "m.rs"], (Language.RUST, "compile error E0425", 2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "name", "text", "command", "expected"), LOCATED, ids=[c[0] for c in LOCATED]
)
def test_what_compilers_say_is_located(
    tmp_path: Path, tool: str, name: str, text: str, command: list[str], expected: tuple[Language, str, int]
) -> None:
    if program(tool, "-version" if tool == "javac" else "--version") is None:
        pytest.skip(f"{tool} is not installed")
    (tmp_path / name).write_text(text)
    failure = find_failures(output(tmp_path, *command))[0]
    found = diagnose(failure, tmp_path, tmp_path, lambda path: read(tmp_path, path))
    assert (failure.language, failure.kind, found.line) == expected
    assert (found.path, found.code) == (name, text.splitlines()[1].strip())


TRACES = {
    "java": (
        'Exception in thread "main" java.lang.RuntimeException: outer\n\tat org.deep.A.main(A.java:4)\n'
        "Caused by: java.lang.IndexOutOfBoundsException: Index 3\n\tat org.deep.A.f(A.java:3)\n"
        "\tat java.base/java.util.List.get(List.java:9)\n\t... 1 more\n",
        [("RuntimeException", "outer", 4), ("IndexOutOfBoundsException", "Index 3", 3)],
    ),
    "rust": (
        "thread 'main' (17) panicked at src/org/deep/A.java:3:5:\nindex out of bounds\nstack backtrace:\n",
        [("panic", "index out of bounds", 3)],
    ),
    "sanitizer": (
        "==9==ERROR: AddressSanitizer: heap-use-after-free on address 0x1 at pc 0x2\n"
        "WRITE of size 4\n    #0 0xaaaa in main /w/a.c:2:3\n    #1 0xbbbb in start /lib/x.c:9\n\nfreed by\n",
        [("AddressSanitizer", "heap-use-after-free", 2)],
    ),
    "tsc": (
        "src/a.ts(3,5): error TS2322: Type 'x'.\nsrc/b.ts:4:6 - error TS2304: Cannot find.\n",
        [("compile error", "TS2322: Type 'x'.", 3), ("compile error", "TS2304: Cannot find.", 4)],
    ),
    "go test": ("--- FAIL: TestIt (0.00s)\n    it_test.go:12: got 1\nFAIL\n", [("test", "got 1", 12)]),
    "mypy": ("src/a.py:7:5: error: Incompatible types  [x]\nsrc/a.py:8: note: see\n", [("compile error", "Incompatible types  [x]", 7)]),
    "logger": (
        '[web-1] Traceback (most recent call last):\n[web-1]   File "a.py", line 3, in f\n[web-1]     x()\n'
        "[web-1] struct.error: bad\n",
        [("struct.error", "bad", 3)],
    ),
    "notes": (
        'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: two\nlines\n',
        [("ValueError", "two", 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_stack_traces_of_many_makers_are_read(name: str) -> None:
    text, expected = TRACES[name]
    assert [(f.kind, f.message, f.frames[-1].line) for f in find_failures(text)] == expected


def test_a_place_told_by_its_end_counts_if_only_one_file_fits(tmp_path: Path) -> None:
    for name in ("one/src/org/deep/A.java", "one/src/org/other/A.java", "node_modules/org/deep/A.java"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x\n" * 9)
    deep = Failure(Language.JAVA, "E", "", (StackFrame("org/deep/A.java", 3),))
    found = diagnose(deep, tmp_path, tmp_path, lambda path: read(tmp_path, path))
    assert (found.path, found.line) == ("one/src/org/deep/A.java", 3)
    unclear = Failure(Language.JAVA, "E", "", (StackFrame("A.java", 3),))
    assert diagnose(unclear, tmp_path, tmp_path, lambda path: read(tmp_path, path)).path == ""


@settings(max_examples=60, deadline=None)
@given(
    names=st.lists(st.sampled_from(sorted(TRACES)), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 800), max_size=8),
    pause=st.sampled_from([0.0, 0.01]),
)
def test_however_output_is_cut_the_same_failures_are_told(
    names: list[str], cuts: list[int], pause: float
) -> None:
    text = "".join(f"{TRACES[name][0]}and then\n" for name in names)
    data = text.encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    watch, now = FailureWatcher(), 0.0
    told: list[Failure] = []
    for start, end in itertools.pairwise(places):
        watch.feed(1, data[start:end], now)
        now += pause
        if watch.seconds_until_due(now) == 0.0:
            told += watch.take_completed(now)
    told += watch.take_completed(now + 10)
    assert set(told) == set(find_failures(text))
    assert watch.take_completed(now + 20, ended=True) == []
    assert watch.seconds_until_due(now + 20) is None


def test_two_streams_do_not_tear_each_others_tracebacks() -> None:
    watch = FailureWatcher()
    half = b'Traceback (most recent call last):\n  File "a.py", line 3, in f\n'
    watch.feed(2, half, 0.0)
    watch.feed(1, b"printed meanwhile\nTypeError: no\n", 0.0)
    watch.feed(2, b"KeyError: 'x'\n", 0.0)
    (failure,) = watch.take_completed(1.0)
    assert (failure.kind, failure.frames[-1].line) == ("KeyError", 3)


def test_a_stream_without_end_is_heard_in_bounded_memory_and_still_told() -> None:
    watch = FailureWatcher()
    for step in range(400):
        watch.feed(1, b"an error was avoided\n" * 200, step * 0.01)
        if watch.seconds_until_due(step * 0.01) == 0.0:
            assert watch.take_completed(step * 0.01) == []
    watch.feed(1, TRACES["notes"][0].encode(), 5.0)
    assert [item.kind for item in watch.take_completed(6.0)] == ["ValueError"]
    assert sum(len(stream.data) for stream in watch._streams.values()) < 1 << 20


@pytest.mark.parametrize(
    ("shown", "unfinished"),
    [
        (b"", b""),
        (b"a line\n", b""),
        (b"a line\r\n\x1b[0m", b""),
        (b"log\n>>> ", b">>> "),
        (b"\x1b[32m$\x1b[0m ls", b"\x1b[32m$\x1b[0m ls"),
        (b"\r 40% \r 41%", None),
        (b"\x1b[2Jmenu", None),
        (b"\x1b[?1049h\x1b[Htext\n", None),
        (b"\x1b[?1049htext\x1b[?1049l\n", b""),
        (b"x" * 5000, None),
    ],
)
def test_a_screen_tells_what_would_be_written_over(shown: bytes, unfinished: bytes | None) -> None:
    screen = TerminalLine()
    for at in range(0, len(shown), 7):
        screen.feed(shown[at : at + 7])
    whole = TerminalLine()
    whole.feed(shown)
    assert whole.unfinished_line() == unfinished
    assert screen.unfinished_line() == unfinished or shown.startswith(b"\x1b[?1049h")


@pytest.mark.parametrize(
    "text", ["", "all is well\n", "Traceback (most recent call last):\n", '  File "x", line 1\n' * 5]
)
def test_output_without_a_failure_has_none(text: str) -> None:
    assert find_failures(text) == ()


def test_colours_do_not_hide_a_traceback() -> None:
    text = "\x1b[1mTraceback\x1b[0m (most recent call last):\n  File \"a.py\", line 1, in \x1b[35m<module>\x1b[0m\n    x\n\x1b[1;35mNameError\x1b[0m: \x1b[35mname 'x' is not defined\x1b[0m\n"
    (failure,) = find_failures(text)
    assert (failure.kind, failure.message) == ("NameError", "name 'x' is not defined")
