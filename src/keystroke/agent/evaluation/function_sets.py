"""Reads sets of function tasks in their published formats: HumanEval and its variants, MBPP+, BigCodeBench.

The formats are recognised by their fields. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
from pathlib import Path
from typing import Any

from keystroke.agent.evaluation.examples import find_examples
from keystroke.agent.evaluation.tasks import FunctionTask
from keystroke.errors import InputError

_LARGEST = 512 << 20


def function_tasks(path: Path) -> list[FunctionTask] | None:
    """The tasks of a file of JSON lines or one JSON list; None for other files."""
    rows = _read_rows(path)
    if not rows:
        return None
    known = set(rows[0])
    if {"prompt", "entry_point", "base_input", "canonical_solution"} <= known:
        return [_read_mbpp_plus(row) for row in rows]
    if {"prompt", "entry_point", "test"} <= known:
        return [_read_human_eval(row) for row in rows]
    if {"instruct_prompt", "complete_prompt", "test", "entry_point"} <= known:
        return [_read_big_code(row) for row in rows]
    return None


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except (OSError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if len(data) > _LARGEST:
        raise InputError(f"{path} is larger than {_LARGEST >> 20} MB; that is not a set of tasks")
    try:
        text = data.decode("utf-8")
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            if len(rows) == 1 and all(isinstance(row, dict) for row in rows[0].values()):
                rows = list(rows[0].values())  # rows keyed by name
    except (ValueError, RecursionError, AttributeError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _read_human_eval(row: dict[str, Any]) -> FunctionTask:
    prompt, entry = str(row["prompt"]), str(row["entry_point"])
    tests = f"{row['test']}\n\ncheck({entry})\n"
    return FunctionTask(
        str(row.get("task_id", entry)),
        prompt,
        entry,
        tests,
        _context(prompt, entry),
        find_examples(prompt, entry),
    )


def _context(prompt: str, entry: str) -> str:
    """The part of a prompt before the function: imports and helpers that the answer may use."""
    found = re.search(rf"^(?:async\s+)?def\s+{re.escape(entry)}\b", prompt, re.MULTILINE)
    return prompt[: found.start()] if found else ""


def _read_big_code(row: dict[str, Any]) -> FunctionTask:
    prompt, entry = str(row["complete_prompt"]), str(row["entry_point"])
    tests = f"{row['test']}\n\nimport unittest as _unittest\n_unittest.main(argv=['x'], verbosity=0)\n"
    return FunctionTask(
        str(row["task_id"]),
        prompt,
        entry,
        tests,
        _context(prompt, entry),
        find_examples(prompt, entry),
        seconds=60.0,
        needs=_imported_packages(f"{row['test']}\n{_context(prompt, entry)}"),
    )


def _imported_packages(text: str) -> tuple[str, ...]:
    """The packages a program imports at top level."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return ()
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in body if isinstance(node, ast.ImportFrom) and node.module]
    return tuple(sorted({name.partition(".")[0] for name in names}))


# ── tests by comparison with a known solution ─────────────────────────────────────────────────

_COMPARE = '''
import copy as _copy, json as _json, math as _math, time as _time

def _shaped(value, like, kind=None):
    """A value read from JSON, with tuples, sets and complex numbers where the examples have them."""
    if isinstance(like, (list, tuple, set, frozenset)):
        kind, inner = type(like), list(like)
    else:
        inner = []
    if isinstance(value, list) and kind is not None:
        last = len(inner) - 1
        return kind(_shaped(v, inner[min(i, last)] if inner else None, kind) for i, v in enumerate(value))
    if isinstance(like, (int, float, complex)) and isinstance(value, str):
        return complex(value)
    return value

def _same(a, b):
    if isinstance(a, float) or isinstance(b, float):
        try:
            return a == b or _math.isclose(a, b, rel_tol=1e-7, abs_tol=_tolerance)
        except (TypeError, OverflowError):
            return False
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b

def _compare(candidate):
    spent = 0.0
    for given in _inputs:
        arguments = [_shaped(v, _like[i]) if i < len(_like) else v for i, v in enumerate(given)]
        began = _time.perf_counter()
        want = _known(*_copy.deepcopy(arguments))
        spent += _time.perf_counter() - began
        if spent > 5.0:
            break  # the known solution itself is too slow for the inputs that are left
        got = candidate(*_copy.deepcopy(arguments))
        assert _same(_seen(got), _seen(want)), f"wrong for {arguments!r:.200}"
'''


def _read_mbpp_plus(row: dict[str, Any]) -> FunctionTask:
    """MBPP+: inputs in JSON, a reference solution, and assertions that show the types."""
    prompt, entry = str(row["prompt"]), str(row["entry_point"])
    assertion = str(row.get("assertion", ""))
    like, seen = _comparison_form(assertion, entry)
    inputs = [*row["base_input"], *row.get("plus_input", ())]
    solution = re.sub(rf"(?<![\w.]){re.escape(entry)}\b", "_known", str(row["canonical_solution"]))
    tests = "\n".join(
        (
            f"_candidate = {entry}",
            solution,
            _COMPARE,
            f"_tolerance = {float(row.get('atol') or 0)!r}",
            f"_like = {like}",
            f"_seen = {seen}",
            f"_inputs = _json.loads({json.dumps(json.dumps(inputs))})",
            "_compare(_candidate)\n",
        )
    )
    return FunctionTask(
        str(row["task_id"]), prompt, entry, tests, "", find_examples(prompt, entry), seconds=30.0
    )


def _comparison_form(assertion: str, entry: str) -> tuple[str, str]:
    """From the first assertion: its arguments, whose types the inputs take, and the function applied to an
    answer before it is compared, such as `set`."""
    try:
        lines = ast.parse(assertion).body
    except SyntaxError:
        lines = []
    for line in lines:
        if not isinstance(line, ast.Assert):
            continue
        for node in ast.walk(line.test):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == entry:
                arguments = ast.unparse(ast.Tuple(node.args, ast.Load()))
                return f"list({arguments})", _enclosing_call(line.test, node)
    return "[]", "lambda answer: answer"


def _enclosing_call(test: ast.expr, call: ast.Call) -> str:
    if test is call or (isinstance(test, ast.UnaryOp) and test.operand is call):
        return "bool"
    for node in ast.walk(test):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("set", "sorted", "bool")
            and call in node.args
        ):
            return node.func.id
    return "lambda answer: answer"
