"""Rules of a project that can be checked are checked on every change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keystroke.assist.edit import EditTask, Workspace, plan_edit, propose_edit
from keystroke.assist.edit.rule_checks import command_for_tests, find_violation, rule_checks

OLD = "import json\n\n\ndef load(path: str) -> str:\n    return path\n"


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("Never call `print()`.", "print(path)", "log.info('print(x)')"),
        ("- Do not use `os.system` or `eval`.", "eval(path)", "evaluate(path)"),
        ("* Use `logging` instead of `print`.", "print(path)", "logging.info(path)"),
        ("No comments.", "path = path  # same", "path = '# no comment'"),
        ("Lines are at most 60 characters.", f"path = '{'x' * 60}'", "path = 'x'"),
    ],
)
def test_what_a_rule_forbids_is_found(rule: str, bad: str, good: str) -> None:
    for body, found in ((bad, True), (good, False)):
        new = OLD.replace("    return", f"    {body}\n    return")
        assert (find_violation(OLD, new, "a.py", rule) is not None) is found


@pytest.mark.parametrize(
    ("rule", "bad", "good"),
    [
        ("All functions have type hints.", "def f(x):", "def f(x: int) -> int:"),
        ("Function names are snake_case.", "def doIt() -> None:", "def do_it() -> None:"),
        ("Every public function needs a docstring.", "def f() -> None:", "def _f() -> None:"),
        (
            "Never import `requests`; use httpx.",
            "import requests\ndef f() -> None:",
            "import httpx\ndef f() -> None:",
        ),
    ],
)
def test_new_definitions_and_imports_follow_the_rules(rule: str, bad: str, good: str) -> None:
    for head, found in ((bad, True), (good, False)):
        new = f"{OLD}\n\n{head}\n    return None\n"
        assert (find_violation(OLD, new, "a.py", rule) is not None) is found


def test_what_was_there_before_and_other_files_are_not_judged() -> None:
    old = OLD.replace("    return", "    print(path)\n    return")
    assert find_violation(old, old.replace("json", "csv"), "a.py", "Never call `print`.") is None
    assert find_violation("x\n", "print\n", "notes.txt", "Never call `print`.") is None
    assert rule_checks("Be kind. Write good code. Prefer small functions.") == ()


def test_the_command_for_the_tests_is_read() -> None:
    assert command_for_tests("Setup: `pip install .`\nRun the tests with `pytest -q`.") == "pytest -q"
    assert command_for_tests("Use `make lint`.") is None


class Answers:
    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), [""]

    def write(self, messages: list[dict[str, str]], prediction: object) -> Iterator[str]:
        self.asked.append(messages[-1]["content"])
        yield self.answers.pop(0)


def fence_text(body: str) -> str:
    return f"```python\ndef load(path: str) -> str:\n    {body}\n    return path\n```\n"


def test_a_broken_rule_is_asked_about_and_what_remains_is_reported(tmp_path: Path) -> None:
    rules = "Never call `print`."
    writer = Answers(fence_text("print(path)"), fence_text("log(path)").replace("log", "json.dumps"))
    task = EditTask({"a.py": OLD}, "load should show the path", rules=rules)
    proposal = propose_edit(task, writer)  # type: ignore[arg-type]
    assert "the project's rules say \"Never call" in writer.asked[2]
    assert proposal.texts["a.py"] == OLD.replace("    return", "    json.dumps(path)\n    return")
    (tmp_path / "a.py").write_text(OLD)
    stubborn = Answers(fence_text("print(path)"), fence_text("print(path)"))
    plan = plan_edit(Workspace(tmp_path), ["a.py"], "load should show the path", stubborn, rules=rules)  # type: ignore[arg-type]
    assert plan.changes
    assert plan.warnings == (
        'a.py: the project\'s rules say "Never call `print`.", and the change uses print',
    )
