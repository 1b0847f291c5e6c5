"""Sets of tasks are read, done, scored, recorded and drawn; what cannot be scored is said."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import httpx
import msgspec
import pytest
from test_task import call, in_turn, scripted

from keystroke.agent.attempts import StopPolicy, WatchState
from keystroke.agent.evaluation.docstring_checks import DocstringChecks, docstring_examples
from keystroke.agent.evaluation.evaluate import EvaluationConfig, Solution, evaluate, missing_tools
from keystroke.agent.evaluation.examples import find_examples
from keystroke.agent.evaluation.folder_sets import folder_tasks, strip_downloads
from keystroke.agent.evaluation.folder_solver import FolderSolver
from keystroke.agent.evaluation.function_sets import function_tasks
from keystroke.agent.evaluation.functions import FunctionChecker, FunctionSolver, program_of, score
from keystroke.agent.evaluation.interpreter_pool import InterpreterPool
from keystroke.agent.evaluation.plot import render_plot
from keystroke.agent.evaluation.programs import interpreter_pool, run_examples, run_program
from keystroke.agent.evaluation.releases import (
    ReleaseTask,
    is_test,
    prepare_task,
    release_tasks,
    unpack_archive,
)
from keystroke.agent.evaluation.report import summarise, table_rows
from keystroke.agent.evaluation.result_file import ResultFile, ResultHeader
from keystroke.agent.evaluation.sets import load_set, select_tasks, with_test_timeout
from keystroke.agent.evaluation.source_archives import source_archive
from keystroke.agent.evaluation.tasks import FolderTask, FunctionTask, ResultStatus, Task, TaskResult
from keystroke.agent.sandbox import Sandbox, find_sandbox
from keystroke.engine.base import Interrupt
from keystroke.errors import EngineError, InputError, Interrupted, NotFound

SANDBOX = find_sandbox()


@pytest.fixture(scope="module")
def ready() -> Iterator[InterpreterPool]:
    with interpreter_pool(SANDBOX, 1) as waiting:
        yield waiting


pytestmark = pytest.mark.skipif(not SANDBOX.confines, reason="no sandbox holds on this machine")

DOUBLE = {
    "task_id": "Own/0",
    "prompt": 'import math\n\n\ndef double(n):\n    """Twice n.\n    >>> double(2)\n    4\n    """\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * n\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(-1) == -2\n",
}
PLUS = {
    "task_id": "Own/1",
    "prompt": '"""\nWrite a function: what is shared.\nassert set(shared((1, 2), (2, 3))) == {2}\n"""\n',
    "entry_point": "shared",
    "canonical_solution": "def shared(a, b):\n    return tuple(set(a) & set(b))\n",
    "base_input": [[[1, 2], [2, 3]]],
    "plus_input": [[[5, 5], [5]], [[], [1]]],
    "assertion": "assert set(shared((1, 2), (2, 3))) == {2}",
    "atol": 0,
}


def written(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


# ── formats ───────────────────────────────────────────────────────────────────────────────────


def test_functions_with_their_own_tests_are_read_and_scored(tmp_path: Path) -> None:
    tasks = function_tasks(written(tmp_path / "own.jsonl.gz", [DOUBLE]))
    assert tasks is not None
    (task,) = tasks
    assert task.examples == ("assert double(2) == 4",)
    assert task.context == "import math\n\n\n"
    assert score(SANDBOX, task, "def double(n):\n    return n + n\n") == (True, "")
    assert not score(SANDBOX, task, "def double(n):\n    return n * n\n")[0]
    assert score(SANDBOX, task, "    return math.floor(2 * n)\n")[0]  # the body alone


def test_functions_scored_by_a_known_solution_keep_types_and_order_as_the_example_has_them(
    tmp_path: Path,
) -> None:
    tasks = function_tasks(written(tmp_path / "plus.jsonl", [PLUS]))
    assert tasks is not None
    (task,) = tasks
    right = "def shared(a, b):\n    assert isinstance(a, tuple)\n    return [x for x in a if x in b]\n"
    assert score(SANDBOX, task, right) == (True, "")
    assert not score(SANDBOX, task, "def shared(a, b):\n    return a\n")[0]


def test_tests_of_unittest_are_scored(tmp_path: Path) -> None:
    row = {
        "task_id": "Own/2",
        "complete_prompt": "import math\n\ndef root(n):\n    '''The root.'''\n",
        "instruct_prompt": "",
        "canonical_solution": "    return math.sqrt(n)\n",
        "entry_point": "root",
        "test": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        self.assertEqual(root(4), 2)\n",
    }
    tasks = function_tasks(written(tmp_path / "big.json", [row]))
    assert tasks is not None
    (task,) = tasks
    assert task.needs == ("math", "unittest")
    assert missing_tools(task) == ""
    assert score(SANDBOX, task, "def root(n):\n    return math.sqrt(n)\n")[0]
    assert not score(SANDBOX, task, "def root(n):\n    return n\n")[0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("assert f(1) == 2", ("assert f(1) == 2",)),
        (">>> f(1)\n2\n", ("assert f(1) == 2",)),
        ("f([1, 2]) => true", ("assert f([1, 2]) == True",)),
        ("f(3) returns 'x'.", ("assert f(3) == 'x'",)),
        ("def f(a, b):\n    '''\n    Input: a = 1, b = [2]\n    Output: 3\n'''", ("assert f(1, [2]) == 3",)),
        ("def f(lst):\n  '''For lst = [1,2] the output should be 3'''", ("assert f([1, 2]) == 3",)),
        ("f(x) == 3", ()),  # x is nothing that is known
        ("f(1) == [1, ...]", ()),
        ("g(1) == 2", ()),
    ],
)
def test_examples_are_read_where_they_are_sure(text: str, found: tuple[str, ...]) -> None:
    assert find_examples(text, "f") == found


def test_a_file_of_something_else_is_no_set(tmp_path: Path) -> None:
    assert function_tasks(written(tmp_path / "a.jsonl", [{"question": 1}])) is None
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        function_tasks(tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="known format"):
        load_set(str(tmp_path / "a.jsonl"), tmp_path)
    with pytest.raises(NotFound, match="there is no set"):
        load_set(str(tmp_path / "missing"), tmp_path)


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive_is_a_set_too(tmp_path: Path, kind: str) -> None:
    inner = written(tmp_path / "own.jsonl", [DOUBLE])
    archive = tmp_path / f"sets.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(archive, "w") as file:
            file.write(inner, "deep/own.jsonl")
    else:
        with tarfile.open(archive, "w:gz") as file_tar:
            file_tar.add(inner, "deep/own.jsonl")
    name, tasks = load_set(str(archive), tmp_path / "cache")
    assert (name, [task.id for task in tasks]) == (archive.name, ["Own/0"])


def test_an_archive_that_leads_out_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as file:
        file.writestr("../../escaped.jsonl", "{}")
    with pytest.raises(InputError, match="leads out"):
        load_set(str(tmp_path / "bad.zip"), tmp_path / "cache")
    assert not (tmp_path.parent / "escaped.jsonl").exists()


def test_tasks_are_chosen_by_name_and_spread_evenly() -> None:
    tasks: list[Task] = [FunctionTask(f"t{n}", "", "", "") for n in range(10)]
    assert [task.id for task in select_tasks(tasks, [], 3)] == ["t0", "t3", "t6"]
    assert [task.id for task in select_tasks(tasks, ["t1", "t9"], 0)] == ["t1", "t9"]
    with pytest.raises(NotFound, match="no task is called"):
        select_tasks(tasks, ["x*"], 0)


# ── programs and judges ───────────────────────────────────────────────────────────────────────


def test_code_that_prints_or_exits_cannot_pass_for_code_that_is_right(ready: InterpreterPool) -> None:
    assert run_program(SANDBOX, "x = 1", 10)[0]
    for cheat in ("import sys; sys.exit(0)", "import os; os._exit(0)", "print('ok'); raise SystemExit"):
        assert not run_program(SANDBOX, cheat, 10)[0]
    assert run_examples(ready, "import os; os._exit(0)", ["assert f(1) == 1"], 10).score == 0.0


def test_examples_say_how_many_hold_and_which_does_not(ready: InterpreterPool) -> None:
    verdict = run_examples(ready, "def f(n): return n", ["assert f(1) == 1", "assert f(2) == 3"], 10)
    assert verdict.score == 0.5
    assert verdict.message == "f(2) == 3 does not hold"
    raised = run_examples(ready, "def f(n): return 1 / 0", ["assert f(1) == 1"], 10)
    assert "ZeroDivisionError" in raised.message
    assert run_examples(ready, "def f(n): return n", ["assert f(1) == 1"], 10).passed
    assert "did not end" in run_examples(ready, "while True: pass", ["assert f(1) == 1"], 0.5).message


def test_each_program_has_an_interpreter_and_a_folder_of_its_own(ready: InterpreterPool) -> None:
    """What one leaves behind, in memory or on disk, the next does not find."""
    leaves = "import builtins; builtins.f = lambda n: n; open('left.py', 'w').write('f = abs')"
    assert run_examples(ready, leaves, ["assert f(1) == 1"], 10).passed
    for finds in ("", "from left import f"):
        assert not run_examples(ready, finds, ["assert f(1) == 1"], 10).passed


def test_an_interpreter_that_died_waiting_is_replaced() -> None:
    with interpreter_pool(SANDBOX, 1) as ready:
        ready._ready[0].stop.set()
        ready._ready[0].ended.result()
        assert run_examples(ready, "def f(n): return n", ["assert f(1) == 1"], 10).passed


def test_an_interrupted_check_says_so_and_nothing_outlives_the_end() -> None:
    with interpreter_pool(SANDBOX, 2) as ready:
        waiting = list(ready._ready)
        interrupt = Interrupt()
        threading.Timer(0.3, interrupt.set).start()
        with pytest.raises(Interrupted):
            run_examples(ready, "while True: pass", ["assert True"], 30, interrupt)
        waiting += ready._ready
    assert all(one.ended.done() and not Path(one.folder.name).exists() for one in waiting)
    with pytest.raises(RuntimeError, match="after close"):
        ready.run("", 1)


def test_an_answer_is_watched_as_it_grows(ready: InterpreterPool) -> None:
    judge = FunctionChecker(ready, FunctionTask("t", "", "f", ""))
    watch = judge.watch()
    assert watch("def f(a):\n    return (a +\n        1)\n").state is WatchState.CONTINUE
    assert judge.watch()("def f(a)\n    return a\nx = 1\n").state is WatchState.HOPELESS
    assert judge.watch()("x = 1\n" * 40).state is WatchState.HOPELESS
    fine = '"""A long\n\ntext: that (is not\ncode\n"""\nimport os\n\nif os:\n    x = 1\nelse:\n    x = 2\n'
    assert judge.watch()(fine).state is WatchState.CONTINUE


def test_the_judge_never_sees_the_tests_that_score(ready: InterpreterPool) -> None:
    task = FunctionTask("t", "def f(n):\n", "f", "assert f(1) == 99\n", examples=("assert f(1) == 1",))
    judge = FunctionChecker(ready, task)
    verdict = judge.check("def f(n):\n    return n\n", Interrupt())
    assert verdict is not None
    assert verdict.passed
    assert not score(SANDBOX, task, "def f(n):\n    return n\n")[0]


def test_what_follows_the_block_is_not_code() -> None:
    task = FunctionTask("t", "def f(n):\n", "f", "")
    assert program_of(task, "def f(n):\n    return n\n```\nThis works because") == "def f(n):\n    return n\n"


# ── doing them ────────────────────────────────────────────────────────────────────────────────


class Scripted:
    """A solver that knows which tasks it passes."""

    def __init__(self, right: Sequence[str] = (), broken: Sequence[str] = ()) -> None:
        self.right, self.broken = right, broken
        self.solved: list[str] = []

    def solve(self, task: Task, way: EvaluationConfig, interrupt: Interrupt) -> Solution:
        self.solved.append(task.id)
        if task.id in self.broken:
            raise EngineError("the engine broke")
        return Solution("answer", 2.0, tokens=10)

    def score(self, task: Task, solved: Solution, interrupt: Interrupt) -> tuple[bool, str]:
        return task.id in self.right, ""

    def close(self) -> None: ...


TASKS: list[Task] = [FunctionTask(f"t{n}", "", "", "") for n in range(4)]


def test_every_task_is_done_in_every_way_and_an_error_is_a_result(tmp_path: Path) -> None:
    record = ResultFile(tmp_path / "out.jsonl", ResultHeader("own", 4))
    ways = [EvaluationConfig("one", "m"), EvaluationConfig("many", "m", 4)]
    solver = Scripted(right=["t0", "t1"], broken=["t2"])
    evaluate(TASKS, ways, solver, record)
    assert [(row.task, row.label, row.status) for row in record.rows][:4] == [
        ("t0", "one", ResultStatus.PASSED),
        ("t1", "one", ResultStatus.PASSED),
        ("t2", "one", ResultStatus.ERROR),
        ("t3", "one", ResultStatus.FAILED),
    ]
    assert len(record.rows) == 8


def test_a_run_goes_on_where_it_stopped_and_does_errors_again(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    evaluate(
        TASKS,
        [EvaluationConfig("one", "m")],
        Scripted(right=["t0"], broken=["t2"]),
        ResultFile(out, ResultHeader("own", 4)),
    )
    with out.open("ab") as file:
        file.write(b'{"task": "t9", "way')  # a crash in the middle of a line
    again = Scripted(right=["t0", "t2"])
    record = ResultFile(out, ResultHeader("own", 4))
    evaluate(TASKS, [EvaluationConfig("one", "m")], again, record)
    assert again.solved == ["t2"]
    assert summarise(record.rows)[0].passed == 2
    assert len(ResultFile(out, ResultHeader("own", 4)).finished_tasks("one")) == 4


def test_results_of_another_set_are_not_mixed_in(tmp_path: Path) -> None:
    ResultFile(tmp_path / "out.jsonl", ResultHeader("own", 4))
    with pytest.raises(InputError, match="holds results of own, not of other"):
        ResultFile(tmp_path / "out.jsonl", ResultHeader("other", 4))
    (tmp_path / "notes").write_text("hello\n")
    with pytest.raises(InputError, match="holds no results"):
        ResultFile(tmp_path / "notes", ResultHeader("own", 4))


def test_an_interrupt_keeps_what_was_done(tmp_path: Path) -> None:
    interrupt = Interrupt()

    class Stopping(Scripted):
        def solve(self, task: Task, way: EvaluationConfig, interrupt: Interrupt) -> Solution:
            if task.id == "t2":
                interrupt.set()
                interrupt.check()
            return super().solve(task, way, interrupt)

    record = ResultFile(tmp_path / "out.jsonl", ResultHeader("own", 4))
    with pytest.raises(Interrupted):
        evaluate(TASKS, [EvaluationConfig("one", "m")], Stopping(), record, jobs=1, interrupt=interrupt)
    assert {row.task for row in ResultFile(tmp_path / "out.jsonl", ResultHeader("own", 4)).rows} == {
        "t0",
        "t1",
    }


def test_what_this_machine_cannot_score_is_skipped_and_does_not_count() -> None:
    tasks: list[Task] = [FunctionTask("t0", "", "", "", needs=("no_such_module_here",)), *TASKS[1:2]]
    record = ResultFile(None, ResultHeader("own", 2))
    evaluate(tasks, [EvaluationConfig("one", "m")], Scripted(right=["t1"]), record)
    (summary,) = summarise(record.rows)
    assert (summary.tasks, summary.skipped, summary.score) == (1, 1, 100.0)
    assert record.rows[0].message == "needs no_such_module_here"


def test_functions_are_solved_by_attempts_that_the_examples_judge(tmp_path: Path) -> None:
    tasks = function_tasks(written(tmp_path / "own.jsonl", [DOUBLE]))
    assert tasks is not None
    wrong, right = "def double(n):\n    return n\n```", "def double(n):\n    return 2 * n\n```"
    chat = scripted(in_turn(wrong, right), small=True)
    record = ResultFile(None, ResultHeader("own", 1))
    with closing(FunctionSolver(chat, SANDBOX)) as solver:
        evaluate(tasks, [EvaluationConfig("one", "m", 1)], solver, record)
    assert record.rows[0].status is ResultStatus.FAILED
    chat = scripted(in_turn(wrong, right), small=True)
    with closing(FunctionSolver(chat, SANDBOX)) as solver:
        evaluate(tasks, [EvaluationConfig("many", "m", 4, StopPolicy.FIRST)], solver, record)
    done = record.rows[-1]
    assert (done.status, done.attempts, done.checked) == (ResultStatus.PASSED, 2, True)


# ── folders ───────────────────────────────────────────────────────────────────────────────────


def exercise(folder: Path) -> Path:
    place = folder / "python" / "exercises" / "practice" / "double"
    (place / ".meta").mkdir(parents=True)
    (place / ".docs").mkdir()
    config = {
        "files": {"solution": ["double.py"], "test": ["double_test.py"], "example": [".meta/example.py"]}
    }
    (place / ".meta" / "config.json").write_text(json.dumps(config))
    (place / ".meta" / "example.py").write_text("def double(n):\n    return 2 * n\n")
    (place / ".docs" / "instructions.md").write_text("Double a number.\n")
    (place / "double.py").write_text("def double(n):\n    pass\n")
    (place / "double_test.py").write_text(
        "from double import double\n\n\ndef test_double():\n    assert double(2) == 4, 'twice is wanted'\n"
    )
    return folder


def test_an_exercise_shows_its_stub_and_hides_its_tests_and_answer(tmp_path: Path) -> None:
    tasks = folder_tasks(exercise(tmp_path))
    assert tasks is not None
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "def double(n):\n    return 2 * n\n```\n"

    solver = FolderSolver(scripted(script, small=True), SANDBOX)
    solved = solver.solve(tasks[0], EvaluationConfig("one", "m"), Interrupt())
    assert solved.passed is True
    assert "Double a number." in seen[0]
    assert "twice is wanted" not in seen[0]
    assert "return 2 * n" in solved.answer


def test_a_second_try_is_shown_what_the_tests_said(tmp_path: Path) -> None:
    tasks = folder_tasks(exercise(tmp_path))
    assert tasks is not None
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return f"def double(n):\n    return {'2 *' if 'twice is wanted' in prompt else '3 *'} n\n```\n"

    chat = scripted(script, small=True)
    assert (
        FolderSolver(chat, SANDBOX).solve(tasks[0], EvaluationConfig("one", "m", tries=1), Interrupt()).passed
        is False
    )
    solved = FolderSolver(chat, SANDBOX).solve(tasks[0], EvaluationConfig("two", "m", tries=2), Interrupt())
    assert solved.passed is True


def test_a_description_that_names_one_of_two_stubs_asks_for_the_whole_file(tmp_path: Path) -> None:
    folder = exercise(tmp_path) / "python" / "exercises" / "practice" / "double"
    (folder / "double.py").write_text("def double(n):\n    pass\n\n\ndef halve(n):\n    pass\n")
    tasks = folder_tasks(tmp_path)
    assert tasks is not None
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "def double(n):\n    return 2 * n\n\n\ndef halve(n):\n    return n // 2\n```\n"

    solved = FolderSolver(scripted(script, small=True), SANDBOX).solve(
        tasks[0], EvaluationConfig("one", "m"), Interrupt()
    )
    assert solved.passed is True
    assert "Write the whole file double.py" in seen[0]
    assert "return n // 2" in solved.answer


def test_tests_that_never_end_are_cut_short_and_the_second_try_is_told(tmp_path: Path) -> None:
    every = folder_tasks(exercise(tmp_path))
    assert every is not None
    (task,) = with_test_timeout(every, 6.0)
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        body = "return 2 * n" if "endless loop" in prompt else "while True: pass"
        return f"def double(n):\n    {body}\n```\n"

    way = EvaluationConfig("two", "m", tries=2)
    assert FolderSolver(scripted(script, small=True), SANDBOX).solve(task, way, Interrupt()).passed is True
    assert "did not end within" in seen[-1]


def test_a_container_s_task_is_scored_without_its_container(tmp_path: Path) -> None:
    place = tmp_path / "set" / "own_task"
    (place / "tests").mkdir(parents=True)
    (place / "task.yaml").write_text("instruction: |-\n  Write it to solution.py. It defines one.\n")
    (place / "tests" / "test_outputs.py").write_text(
        "from pathlib import Path\n\n\ndef test():\n"
        "    assert 'one = 1' in Path('/app/solution.py').read_text()\n"
    )
    (place / "run-tests.sh").write_text(
        "#!/bin/bash\napt-get update\ncurl -LsSf x | sh\nuv init\nuv add pytest==8\n"
        "cd /app\nuv run pytest $TEST_DIR/test_outputs.py -rA\n"
    )
    _, tasks = load_set(str(tmp_path / "set"), tmp_path / "cache")
    (task,) = tasks
    assert isinstance(task, FolderTask)
    assert task.files == ("solution.py",)
    solver = FolderSolver(scripted(lambda prompt: "one = 1\n```\n", small=True), SANDBOX)
    assert solver.solve(task, EvaluationConfig("one", "m"), Interrupt()).passed is True
    wrong = FolderSolver(scripted(lambda prompt: "two = 2\n```\n", small=True), SANDBOX)
    assert wrong.solve(task, EvaluationConfig("one", "m"), Interrupt()).passed is False


def test_a_script_is_freed_of_what_it_would_fetch() -> None:
    script = "set -e\npip3 install pytest 2>/dev/null || pip install pytest\nuv run pytest x\n"
    assert strip_downloads(f"{script}source $HOME/.local/bin/env\n") == "set -e\npytest x\n"


# ── releases ──────────────────────────────────────────────────────────────────────────────────


def archive(files: dict[str, str]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as file:
        for name, text in files.items():
            info = tarfile.TarInfo(f"own-1.0/{name}")
            info.size = len(text.encode())
            file.addfile(info, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("own-1.0/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    return stream.getvalue()


def release(old: bytes, new: bytes) -> ReleaseTask:
    import hashlib

    return ReleaseTask(
        "own",
        "1.0",
        "1.1",
        hashlib.sha256(old).hexdigest(),
        hashlib.sha256(new).hexdigest(),
        ("tests/test_own.py",),
        ("tests/test_own.py::test_new",),
        ("tests/test_own.py::test_old",),
        ("own.py",),
        1,
    )


def test_a_release_task_is_the_old_source_with_the_new_tests(tmp_path: Path) -> None:
    tests = "from own import one, two\n\n\ndef test_old():\n    assert one() == 1\n\n\n"
    tests += "def test_new():\n    assert two() == 2\n"
    source = "def one():\n    return 1\n\n\ndef two():\n    return 3\n"
    old = archive({"own.py": source, "tests/test_own.py": "def test_old():\n    pass\n"})
    new = archive({"own.py": source.replace("3", "2"), "tests/test_own.py": tests})
    made = release(old, new)
    task = prepare_task(made, tmp_path / "cache", lambda package, version: old if version == "1.0" else new)
    assert (task.source / "own.py").read_text() == source
    assert (task.source / "tests" / "test_own.py").read_text() == tests
    assert not (task.source / "link").exists()
    assert "tests/test_own.py::test_new" in task.instruction
    answer = call("edit", path="own.py", old="    return 3", new="    return 2")
    solver = FolderSolver(scripted(in_turn(answer, "Done."), small=False), SANDBOX)
    assert solver.solve(task, EvaluationConfig("one", "m"), Interrupt()).passed is True
    cheat = call("edit", path="tests/test_own.py", old="    assert two() == 2", new="    pass")
    cheating = FolderSolver(scripted(in_turn(cheat, "Done."), small=False), SANDBOX)
    assert cheating.solve(task, EvaluationConfig("one", "m"), Interrupt()).passed is False


def test_another_archive_than_the_verified_one_is_refused(tmp_path: Path) -> None:
    data = archive({"own.py": "x = 1\n"})
    with pytest.raises(InputError, match="not the one this set was verified with"):
        prepare_task(release(data, data), tmp_path, lambda package, version: b"other")
    with pytest.raises(InputError, match="cannot be read"):
        unpack_archive(b"no archive")


def test_the_set_that_ships_names_at_least_forty_tasks() -> None:
    tasks = release_tasks()
    assert len(tasks) >= 40
    assert len({task.id for task in tasks}) == len(tasks)
    assert len({task.package for task in tasks}) >= 15
    for task in tasks:
        assert task.failing
        assert task.passing
        assert task.changed
        assert not any(is_test(path) for path in task.changed)
        assert len(task.old_sha256) == len(task.new_sha256) == 64


# ── what is told ──────────────────────────────────────────────────────────────────────────────


def test_a_summary_counts_scores_and_times() -> None:
    rows = [
        TaskResult("a", "x1", ResultStatus.PASSED, 1.0, 100, attempts=1, model="m", cost=0.5),
        TaskResult("b", "x1", ResultStatus.FAILED, 3.0, 300, attempts=1, model="m"),
        TaskResult("c", "x1", ResultStatus.SKIPPED, model="m"),
        TaskResult("a", "x4", ResultStatus.PASSED, 2.0, 400, attempts=4, model="m"),
    ]
    one, four = summarise(rows)
    assert (one.score, one.tasks, one.skipped, one.seconds_mean) == (50.0, 2, 1, 2.0)
    assert (one.tokens_per_second, one.cost) == (100.0, 0.5)
    assert (four.label, four.attempts) == ("x4", 4.0)
    assert table_rows([one])[0][:4] == ("x1", "50.0", "69.3", "1/2 (1 skipped)")


def test_the_plot_is_a_drawing_with_every_way_in_it() -> None:
    rows = [
        TaskResult(
            "a", f"<x{n}>", ResultStatus.PASSED if n > 1 else ResultStatus.FAILED, 0.1 * n, 10, model=model
        )
        for n in (1, 4, 16)
        for model in ("fast & small", "deep")
    ]
    for named in ("fast & small", "deep"):
        rows = [
            msgspec.structs.replace(r, label=f"{named} {r.label}") if r.model == named else r for r in rows
        ]
    drawing = render_plot(summarise(rows), "own <set>")
    tree = ElementTree.fromstring(drawing)
    texts = [element.text or "" for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "own <set>" in texts
    assert "fast & small" in texts
    assert sum("x16" in text for text in texts) == 2
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}circle"))) == 6


def test_a_plot_of_nothing_is_still_a_drawing() -> None:
    assert ElementTree.fromstring(render_plot([], "nothing")) is not None


def test_a_source_archive_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    release = [
        {"packagetype": "bdist_wheel", "filename": "p-1.whl", "url": "/files/p-1.whl"},
        {"packagetype": "sdist", "filename": "p-1.tar.gz", "url": "/files/p-1.tar.gz"},
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if len(asked) == 1:
            return httpx.Response(503)
        if request.url.path == "/pypi/some-package/json":
            return httpx.Response(200, json={"releases": {"1": release}})
        return httpx.Response(200, content=b"archive")

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", client)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.test/simple")
    folder = tmp_path / "archives"
    for _ in range(2):
        assert source_archive("Some_Package", "1", folder) == b"archive"
    assert asked == ["/pypi/some-package/json", "/pypi/some-package/json", "/files/p-1.tar.gz"]
    with pytest.raises(InputError, match="no source archive of Some_Package 2"):
        source_archive("Some_Package", "2", folder)


SHOWN_WRONG = '''from __future__ import annotations


def double(n: int) -> int:
    """Twice the number.

    >>> double(2)
    4
    >>> double(0)
    0
    """
    return n + 1


if __name__ == "__main__":
    raise SystemExit(3)
'''


def test_examples_in_docstrings_tell_versions_of_a_file_apart() -> None:
    assert docstring_examples(SHOWN_WRONG) == ["assert double(2) == 4", "assert double(0) == 0"]
    checks = DocstringChecks(lambda: SANDBOX)
    texts = [SHOWN_WRONG.replace("n + 1", body) for body in ("2 * n", "n + 2", "n // 0")]
    assert checks("a.py", SHOWN_WRONG, texts) == [1.0, 0.5, 0.0]
    assert checks("a.js", SHOWN_WRONG, texts) == []
    assert checks("a.py", texts[0], texts) == []  # they hold already: the change may be about them


def test_a_file_without_examples_is_not_run() -> None:
    def looked() -> Sandbox:
        raise AssertionError("the sandbox is not needed")

    assert DocstringChecks(looked)("a.py", "def f():\n    return 1\n", ["x = 1\n"]) == []
