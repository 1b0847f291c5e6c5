"""A change demonstrated: calls for which the new version of a definition does something else than before.

Law: only definitions that compute and nothing else are run, cut out of their module, in a process of its
own with limits on time, memory and files. No text of a model is run. A call that fails now and did not
before is a defect by itself, unless the new code raises the error on purpose; any other difference only
says that something changed.
"""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keystroke.assist.review.examples import Maker, shown
from keystroke.assist.review.purity import MODULES, computing_part

SECONDS = 10.0
MEMORY = 512 << 20
MAX_CHANGED = 12  # definitions of one file that are tried
_RUNNER = Path(__file__).with_name("example_runner.py")
_SLIPS = ("IndexError", "KeyError", "TypeError", "AttributeError", "ZeroDivisionError", "UnboundLocalError",
          "NameError", "RecursionError", "OverflowError", "StopIteration", "RuntimeError")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """`call` of definition `name` (its lines in the new text, from 1) gave `before` and now gives `after`.
    `broken`: now it fails, and nobody meant it to; `meant`: now the code raises an error by itself."""

    name: str
    lines: range
    call: str
    before: str
    after: str
    broken: bool = False
    meant: bool = False
    doubtful: bool = False  # an argument was guessed that nothing in the module speaks for


def differences(before: str, after: str) -> list[Difference]:
    """One difference for each changed definition that shows one, failures first. Empty where nothing can be
    run, or nothing differs."""
    old, new = computing_part(before), computing_part(after)
    if old is None or new is None:
        return []
    changed = _changed(old, new)
    if not changed:
        return []
    tried: list[list[tuple[str, list[Any], bool]]] = []
    for name in list(changed)[:MAX_CHANGED]:
        maker = Maker(new, name)
        tried.append([(name, plan, maker.doubtful) for plan in maker.plans(name)])
    # One of each in turn: where time runs short, every definition has had some.
    plans = [plan for row in itertools.zip_longest(*tried) for plan in row if plan is not None]
    results = _run(ast.unparse(old), ast.unparse(new), [plan for _, plan, _ in plans])
    found: dict[str, Difference] = {}
    for (name, plan, doubtful), outcomes in zip(plans, results, strict=False):
        difference = _difference(name, changed[name], plan, outcomes)
        if difference is not None and doubtful:
            difference = replace(difference, broken=False, doubtful=True)
        if difference is not None and (name not in found or (difference.broken and not found[name].broken)):
            found[name] = difference
    return sorted(found.values(), key=lambda item: not item.broken)


def _changed(old: ast.Module, new: ast.Module) -> dict[str, range]:
    """Definitions that both have with the same parameters and another body, and the lines of each."""
    before, after = _definitions(old), _definitions(new)
    result = {}
    for name, node in after.items():
        other = before.get(name)
        if other is None or ast.dump(other) == ast.dump(node):
            continue
        if ast.dump(other.args) == ast.dump(node.args):
            result[name] = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return result


def _definitions(module: ast.Module) -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{m.name}": m for m in node.body if isinstance(m, ast.FunctionDef)}
    return found


def _difference(name: str, lines: range, plan: list[Any], outcomes: list[Any]) -> Difference | None:
    first, again, now = outcomes
    if first != again or first == now or not first or first[0][0] == "broken":
        return None
    if any(item[0] == "error" and not item[2] for item in first):
        return None  # it failed before: whatever it does now is no regression
    for was, step in zip(first, [*now, *([["value", "nothing"]] * len(first))], strict=False):
        if was == step:
            continue
        if step[0] == "broken":
            return None
        if was[0] == "error":
            if step[0] == "error":
                return None
            return Difference(name, lines, shown(plan), f"{was[1]}: {was[3]}", step[1])
        if step[0] == "error":
            kind, meant, message = step[1], step[2], step[3]
            slip = not meant and kind in _SLIPS
            return Difference(name, lines, shown(plan), was[1], f"{kind}: {message}", slip, meant)
        return Difference(name, lines, shown(plan), was[1], step[1])
    return None


def _run(before: str, after: str, plans: list[Any]) -> list[Any]:
    job = json.dumps(
        {
            "before": before,
            "after": after,
            "plans": plans,
            "modules": sorted(MODULES),
            "seconds": SECONDS / 2,
        }
    )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", str(_RUNNER)],
            input=job.encode(),
            capture_output=True,
            timeout=SECONDS,
            check=False,
            cwd="/" if sys.platform != "win32" else None,
            preexec_fn=_limit if sys.platform != "win32" else None,
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []
    return answer if isinstance(answer, list) else []


def _limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
