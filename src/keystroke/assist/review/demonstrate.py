"""Runs both versions of changed definitions and reports calls whose results differ.

Only pure definitions are run, extracted from their module, in a separate process with limits on time, memory
and files. No text of a model is run. A call that now fails is a defect, unless the new code raises the error
on purpose.
"""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keystroke.assist.review.examples import PlanGenerator, format_plan
from keystroke.assist.review.invariants import ObservedCall, find_lost_invariant, literal, matches_result
from keystroke.assist.review.purity import MODULES, pure_part
from keystroke.assist.review.scripts import Claim

SECONDS = 10.0
MEMORY = 512 << 20
MAX_CHANGED = 12  # definitions per file that are run
_RUNNER = Path(__file__).with_name("example_runner.py")
_SLIPS = ("IndexError", "KeyError", "TypeError", "AttributeError", "ZeroDivisionError", "UnboundLocalError",
          "RecursionError", "OverflowError", "StopIteration", "RuntimeError", "ValueError")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """`call` of definition `name` (`lines` in the new text, from 1) returned `before` and now returns
    `after`. `broken`: it now fails by accident; `meant`: the code now raises an error on purpose."""

    name: str
    lines: range
    call: str
    before: str
    after: str
    broken: bool = False
    meant: bool = False
    doubtful: bool = False  # it has a guessed argument
    lost: str = ""  # the property that all results had before and this one has not


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A claim that holds in only one version; `holds`: in the new one."""

    claim: Claim
    before: str
    after: str
    holds: bool


def find_differences(before: str, after: str) -> list[Difference]:
    """One difference per changed definition, failures first. Empty where nothing can be run or nothing
    differs."""
    old, new = pure_part(before), pure_part(after)
    if old is None or new is None or not (changed := _changed_in(old, new)):
        return []
    tried: list[list[tuple[str, list[Any], bool]]] = []
    for name in list(changed)[:MAX_CHANGED]:
        generator = PlanGenerator(new, name)
        tried.append([(name, plan, generator.doubtful) for plan in generator.plans(name)])
    # Interleave, so that every definition gets some calls if time runs out.
    plans = [plan for row in itertools.zip_longest(*tried) for plan in row if plan is not None]
    results = _run_plans(ast.unparse(old), ast.unparse(new), [plan for _, plan, _ in plans])
    found: dict[str, list[Difference]] = {}
    seen: dict[str, list[ObservedCall]] = {}
    for (name, plan, doubtful), (skipped, outcomes) in zip(plans, results, strict=False):
        call = format_plan(plan, skipped)
        difference = _find_difference(name, changed[name], call, outcomes)
        if (observed := _observe_call(plan, skipped, call, outcomes)) is not None:
            seen.setdefault(name, []).append(observed)
        if difference is not None:
            if doubtful:
                difference = replace(difference, broken=False, doubtful=True)
            found.setdefault(name, []).append(difference)
    together = [_most_informative(of, find_lost_invariant(seen.get(name, ()))) for name, of in found.items()]
    return sorted(together, key=lambda item: not item.broken)


def _most_informative(found: Sequence[Difference], lost: tuple[ObservedCall, str] | None) -> Difference:
    """The most informative difference: a failure, a lost property, no guessed arguments, a short call."""
    if lost is not None:
        found = [replace(item, lost=lost[1]) if item.call == lost[0].call else item for item in found]
    ranked = sorted(
        found, key=lambda item: (not item.broken, not item.lost, item.doubtful, item.meant, len(item.call))
    )
    return ranked[0]


def find_contradictions(before: str, after: str, claims: Sequence[Claim]) -> list[Contradiction]:
    """Claims that hold in only one of the two versions, with both results."""
    old, new = pure_part(before), pure_part(after)
    if old is None or new is None or not claims:
        return []
    results = _run_plans(ast.unparse(old), ast.unparse(new), [list(claim.plan) for claim in claims])
    found = []
    for claim, (_, (first, again, now)) in zip(claims, results, strict=False):
        if first != again or not first or not now or "broken" in (first[0][0], now[0][0]):
            continue
        was, gives = _last_result(first, len(claim.plan)), _last_result(now, len(claim.plan))
        held_before, holds = matches_result(claim.expected, was), matches_result(claim.expected, gives)
        if held_before is not holds:
            found.append(Contradiction(claim, was, gives, holds))
    return found


def _last_result(outcome: list[Any], steps: int) -> str:
    """The result of a plan's last step."""
    last = outcome[min(steps, len(outcome)) - 1]
    return f"{last[1]}: {last[3]}" if last[0] == "error" else str(last[1]) or "no answer"


def definitions(text: str) -> set[str]:
    """The names defined in the pure part of a module."""
    module = pure_part(text)
    body = module.body if module is not None else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def changed_definitions(before: str, after: str) -> dict[str, range]:
    """The definitions whose body changed, with the lines of each."""
    old, new = pure_part(before), pure_part(after)
    return {} if old is None or new is None else _changed_in(old, new)


def _changed_in(old: ast.Module, new: ast.Module) -> dict[str, range]:
    """Definitions in both versions with the same parameters and another body, and their lines."""
    before, after = _list_functions(old), _list_functions(new)
    result = {}
    for name, node in after.items():
        other = before.get(name)
        if other is None or ast.dump(other) == ast.dump(node):
            continue
        if ast.dump(other.args) == ast.dump(node.args):
            result[name] = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return result


def _list_functions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}": m for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


def _find_difference(name: str, lines: range, call: str, outcomes: list[Any]) -> Difference | None:
    first, again, now = outcomes
    if first != again or first == now or not first or first[-1][0] in ("broken", "endless"):
        return None
    if any(item[0] == "error" and not item[2] for item in first):
        return None  # it failed before, so this is no regression
    for was, step in zip(first, [*now, *([["value", "nothing"]] * len(first))], strict=False):
        if was == step:
            continue
        if step[0] == "broken" or step[:2] == ["error", "NameError"]:
            return None  # a dependency was left out, or the checks report it
        if step[0] == "endless":
            return Difference(name, lines, call, was[1], "no answer: it does not come to an end", broken=True)
        if was[0] == "error":
            if step[0] == "error":
                return None
            return Difference(name, lines, call, f"{was[1]}: {was[3]}", step[1])
        if step[0] == "error":
            kind, meant, message = step[1], step[2], step[3]
            slip = not meant and kind in _SLIPS
            return Difference(name, lines, call, was[1], f"{kind}: {message}", slip, meant)
        return Difference(name, lines, call, was[1], step[1])
    return None


def _observe_call(plan: list[Any], skipped: list[int], call: str, outcomes: list[Any]) -> ObservedCall | None:
    """The results of the tested call in both versions; None where one of them failed."""
    target = max(n for n, step in enumerate(plan) if not step.get("before") and not step.get("after"))
    at = target - sum(number < target for number in skipped)
    first, again, now = outcomes
    if first != again or min(len(first), len(now)) <= at:
        return None
    if first[at][0] != "value" or now[at][0] != "value":
        return None
    plain = tuple(item for item in plan[target]["arguments"] if isinstance(item, int | float | str | list))
    return ObservedCall(call, plain, literal(first[at][1]), literal(now[at][1]))


def _run_plans(before: str, after: str, plans: list[Any]) -> list[Any]:
    job = json.dumps(
        {"before": before, "after": after, "plans": plans, "modules": sorted(MODULES), "seconds": SECONDS / 2}
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", str(_RUNNER)],
            input=job.encode(),
            capture_output=True,
            timeout=SECONDS,
            check=False,
            cwd="/" if sys.platform != "win32" else None,
            preexec_fn=_limit_resources if sys.platform != "win32" else None,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []
    return answer if isinstance(answer, list) else []


def _limit_resources() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
