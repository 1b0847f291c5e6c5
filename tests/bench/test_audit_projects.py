"""When a fix counts as wrong by the tests of a project, and what a project declares for its tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.audit_projects import ProjectOutcome, check_texts
from bench.project_archives import ProjectPin
from bench.project_tests import (
    ProjectTests,
    declared_requirements,
    required,
    script_lines_run,
    script_tests_passed,
)

from keystroke.agent.sandbox import find_sandbox

PIN = ProjectPin("pypi", "example", "1.0", 1)


class ScriptedTests(ProjectTests):
    """Tests whose result depends on the text of a file and on how often they have run; builds are digests."""

    def __init__(self, root: Path, passing: Callable[[str, int], set[str]]) -> None:
        super().__init__(PIN, root, find_sandbox())
        self.passing = passing
        self.runs = 0
        self.builds: Callable[[str], str] = lambda text: f"digest of {text}"

    def passed(self, measured: list[str] | None = None, seconds: int = 0) -> set[str]:
        self.runs += 1
        return self.passing(self._text(), self.runs)

    def build(self) -> str:
        return self.builds(self._text())

    def _text(self) -> str:
        return next(self.root.glob("code.*")).read_text(encoding="utf-8")


def check(
    root: Path, passing: Callable[[str, int], set[str]], name: str = "code.py", **builds: str
) -> tuple[bool, ProjectOutcome]:
    (root / name).write_text("old", encoding="utf-8")
    tests = ScriptedTests(root, passing)
    if builds:
        tests.builds = lambda text: builds[text]
    outcome = ProjectOutcome(PIN)
    digest = tests.build() if name.endswith(".c") else ""
    ran = check_texts(outcome, tests, {name: "new"}, {"one", "two"}, digest, "a rule")
    assert (root / name).read_text(encoding="utf-8") == "old"
    return ran, outcome


def test_a_test_that_fails_only_with_the_fix_makes_it_wrong(tmp_path: Path) -> None:
    ran, outcome = check(tmp_path, lambda text, _: {"one"} if text == "new" else {"one", "two"})
    assert ran
    assert outcome.wrong == ["a rule: code.py: two"]


def test_a_test_that_fails_once_by_chance_says_nothing(tmp_path: Path) -> None:
    ran, outcome = check(tmp_path, lambda _, run: {"one"} if run == 1 else {"one", "two"})
    assert ran
    assert outcome.wrong == []


def test_a_test_that_fails_without_the_fix_as_well_says_nothing(tmp_path: Path) -> None:
    ran, outcome = check(tmp_path, lambda _, run: {"one"})
    assert ran
    assert outcome.wrong == []


@pytest.mark.parametrize(
    ("new", "ran", "wrong"),
    [
        ("digest", True, []),
        ("digest of old", False, []),  # the file is not compiled here, so its tests prove nothing
        ("", True, ["a rule: code.c: it does not build"]),
    ],
)
def test_compiled_code_has_to_be_built_again(tmp_path: Path, new: str, ran: bool, wrong: list[str]) -> None:
    found, outcome = check(tmp_path, lambda *_: {"one", "two"}, "code.c", old="digest of old", new=new)
    assert found == ran
    assert outcome.wrong == wrong


def test_the_requirements_of_tests_are_found_where_projects_declare_them(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        """
[dependency-groups]
test = ["alpha>=1", {include-group = "shared"}]
shared = ["beta"]
docs = ["sphinx"]
[tool.hatch.envs.test]
dependencies = ["gamma"]
[tool.poetry.group.dev.dependencies]
python = "^3.9"
delta = "^2"
""",
        encoding="utf-8",
    )
    (tmp_path / "tox.ini").write_text(
        "[testenv]\ndeps =\n    epsilon\n    -rrequirements.txt\n    py27: mock\n    {toxinidir}/other\n",
        encoding="utf-8",
    )
    (tmp_path / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='x', tests_require=['zeta'])\n", encoding="utf-8"
    )
    assert declared_requirements(tmp_path) == {"alpha>=1", "beta", "gamma", "delta", "epsilon", "zeta"}


def test_what_a_release_requires_is_in_its_metadata(tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: x\nRequires-Dist: alpha (>=1)\nRequires-Dist: docs; extra == 'docs'\n",
        encoding="utf-8",
    )
    (tmp_path / "x.egg-info").mkdir()
    (tmp_path / "x.egg-info" / "requires.txt").write_text("beta<3\n\n[dev]\ngamma\n", encoding="utf-8")
    assert required(tmp_path) == {"alpha (>=1)", "beta<3"}


def test_lines_of_scripts_that_ran_are_known_by_the_coverage_of_node(tmp_path: Path) -> None:
    text = "function f() {\n  return 1\n}\nfunction g() {\n  return 2\n}\nf()\n"
    script = tmp_path / "index.js"
    script.write_text(text, encoding="utf-8")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "other.js").write_text("f()\n", encoding="utf-8")
    whole = {"ranges": [{"startOffset": 0, "endOffset": len(text), "count": 1}]}
    unused = {
        "ranges": [
            {"startOffset": text.index("function g"), "endOffset": text.index("f()\n", 40), "count": 0}
        ]
    }
    reports = tmp_path / "coverage"
    reports.mkdir()
    scripts = [
        {"url": script.as_uri(), "functions": [whole, unused]},
        {"url": (tmp_path / "node_modules" / "other.js").as_uri(), "functions": [whole]},
        {"url": "node:internal", "functions": [whole]},
    ]
    (reports / "coverage-1.json").write_text(json.dumps({"result": scripts}), encoding="utf-8")
    assert script_lines_run(tmp_path, reports) == {"index.js": {1, 2, 3, 7}}


def test_tests_of_scripts_are_known_by_what_their_runner_says() -> None:
    passing = "\u2714 reads a name (12.5ms)\n  \u2713 writes it\nok 1 - both\n"
    failing = "not ok 2 - neither\n\u2716 fails (1ms)\n\u2714 fails\n"
    assert script_tests_passed(passing + failing) == {"reads a name", "writes it", "both"}


@pytest.mark.parametrize(
    ("files", "settings"),
    [
        ({"manage.py": "'DJANGO_SETTINGS_MODULE', 'site.settings'", "site/settings.py": ""}, "site.settings"),
        ({"tox.ini": "DJANGO_SETTINGS_MODULE=settings", "tests/settings.py": ""}, "tests.settings"),
        ({"example/settings.py": "", "app/tests/test_settings.py": ""}, "app.tests.test_settings"),
        ({"app/models.py": ""}, ""),
    ],
)
def test_settings_of_django_are_those_for_tests(tmp_path: Path, files: dict[str, str], settings: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert ProjectTests(PIN, tmp_path, find_sandbox()).django_settings() == settings
