"""A fix is right: run before and after it, harmless input gives the same and an attack no longer works."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from keystroke.analysis.audit import all_rules

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
