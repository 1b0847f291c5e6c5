"""A fix is right: run before and after it, harmless input gives the same and an attack no longer works."""

from __future__ import annotations

import importlib.util
import io
import json
import ntpath
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from installed import program
from keystroke.analysis.audit import Auditor, all_rules
from keystroke.text import apply_edits

BENCH = Path(__file__).parents[3] / "bench"
LANGUAGES = ("python", "javascript", "c", "cpp", "go", "java")
RANDOM = {"python": 80, "javascript": 24, "c": 12, "go": 10, "java": 8}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fixes() -> ModuleType:
    return load("audit_fixes")


def test_every_rule_with_a_fix_has_a_trial_that_runs_it(fixes: ModuleType) -> None:
    tried = {trial.rule for trial in fixes.read_trials()}
    fixable = {rule.id for rule in all_rules().values() if any(not fix.suggest for fix in rule.fixes)}
    assert fixable - tried - {"go-ldap-injection"} == set()  # its library is no part of Go


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_fix_keeps_harmless_results_and_stops_the_attack(language: str, fixes: ModuleType) -> None:
    if not fixes.works(language):
        pytest.skip(f"no working toolchain for {language}")
    trials = [trial for trial in fixes.read_trials() if trial.language == language and not trial.slow]
    done = fixes.outcomes(trials)
    assert [(item.trial.rule, item.trial.name, item.wrong) for item in done if item.wrong] == []
    assert len(done) == len(trials) > 0


@pytest.mark.parametrize("language", RANDOM)
def test_a_fix_of_a_random_program_is_right(language: str, fixes: ModuleType) -> None:
    if not fixes.works(language):
        pytest.skip(f"no working toolchain for {language}")
    trials = load("audit_random").trials(7, RANDOM[language], language)
    offered = [item for item in fixes.outcomes(trials) if item.fixed is not None]
    assert [(item.trial.program, item.fixed, item.wrong) for item in offered if item.wrong] == []
    assert len(offered) >= len(trials) // 2


def test_a_wrong_fix_is_noticed(fixes: ModuleType) -> None:
    trial = next(item for item in fixes.read_trials() if item.rule == "python-unsafe-yaml")
    kept = fixes.FixOutcome(trial, trial.program)
    broken = fixes.FixOutcome(trial, trial.program.replace("yaml.load(", "str("))
    for outcome in (kept, broken):
        jobs = [fixes.FixJob(text, trial.driver, trial.inputs) for text in (trial.program, outcome.fixed)]
        outcome.before, outcome.after = fixes.RUNNERS["python"](jobs)
    assert "still works" in kept.wrong
    assert "harmless" in broken.wrong


# On Windows "//../../x" names a host, and "C:" a drive.
LEAVING = ["/../../x", "..\\..\\x", "//host/share/../x", "C:/x", "\\..\\..\\x", "a/../../../x"]
HARMLESS = {"a.txt": "C:\\data\\a.txt", "/js/a.js": "C:\\data\\js\\a.js", "a/b": "C:\\data\\a\\b"}


def path_fixed(language: str, text: str) -> str:
    fixed = [item.fixes[0] for item in Auditor(language).audit(text) if item.fixes]
    return apply_edits(text, fixed[0].edits)


@pytest.mark.parametrize("name", [*LEAVING, *HARMLESS])
def test_a_fixed_path_of_python_stays_in_its_folder_on_windows_too(name: str) -> None:
    text = "import os\nfrom flask import request\n\n\ndef show():\n"
    text += "    return open(os.path.join('C:/data', request.args['name'])).read()\n"
    opened: list[str] = []

    def open_file(path: str) -> io.StringIO:
        opened.append(ntpath.normpath(path))
        return io.StringIO()

    system = SimpleNamespace(path=ntpath, sep="\\")
    names = {"os": system, "open": open_file, "request": SimpleNamespace(args={"name": name})}
    exec(path_fixed("python", text).partition("\n\n\n")[2], names)
    try:
        names["show"]()  # type: ignore[operator]
    except ValueError:
        assert name not in HARMLESS  # another drive or host is refused
        return
    assert all(path.startswith("C:\\data\\") for path in opened)
    assert opened == [HARMLESS.get(name, opened[0])]


@pytest.mark.parametrize("line", ["path.join('C:/data', req.query.name)", "`C:/data/${req.query.name}`"])
def test_a_fixed_path_of_javascript_stays_in_its_folder_on_windows_too(line: str) -> None:
    node = program("node")
    if node is None:
        pytest.skip("no Node.js here")
    text = 'const fs = require("fs");\nconst path = require("path");\nfunction show(req, res) {\n'
    text += f"  fs.readFile({line}, (e, d) => res.send(d));\n}}\n"
    fixed = path_fixed("javascript", text).partition("\n")[2]
    script = f"""const opened = [];
const fs = {{ readFile: (name) => opened.push(require("path").win32.normalize(name)) }};
{fixed.replace('require("path")', 'require("path").win32')}
for (const name of {json.dumps([*LEAVING, *HARMLESS])}) show({{ query: {{ name }} }}, {{}});
console.log(JSON.stringify(opened));"""
    ran = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True)
    opened = json.loads(ran.stdout)
    assert len(opened) == len(LEAVING) + len(HARMLESS)
    assert all(path.startswith("C:\\data\\") for path in opened)
    assert opened[len(LEAVING) :] == list(HARMLESS.values())
