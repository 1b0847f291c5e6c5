"""Scores versions of a Python file by the examples in its docstrings, run in the sandbox.

Examples that all hold before the change give no information about it: the change may be meant to make them
wrong. So they count only where one of them fails in the old file.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from keystroke.agent.evaluation.examples import find_examples
from keystroke.agent.evaluation.programs import interpreter_pool, run_examples
from keystroke.agent.sandbox import Sandbox
from keystroke.analysis.syntax import try_parse

_SECONDS = 3.0
_AT_ONCE = 4
_MOST = 20  # examples
# Run as a module, so that code for the main program is skipped.
_MODULE = "__name__ = 'checked'\nexec(compile({text!r}, 'checked.py', 'exec'), globals())"


class DocstringChecks:
    """Runs nothing where the sandbox does not confine. It is searched for once there are examples."""

    def __init__(self, find_sandbox: Callable[[], Sandbox]) -> None:
        self._find_sandbox = find_sandbox

    def __call__(self, path: str, old: str, texts: Sequence[str]) -> list[float]:
        """The share of the old text's examples that hold in each text; empty where they give no
        information."""
        shown = docstring_examples(old) if path.endswith(".py") else []
        if not shown or not (sandbox := self._find_sandbox()).confines:
            return []
        size = min(_AT_ONCE, len(texts) + 1)
        with interpreter_pool(sandbox, size) as ready, ThreadPoolExecutor(size) as pool:
            check = partial(run_examples, ready, examples=shown, seconds=_SECONDS)
            codes = [_MODULE.format(text=text) for text in (old, *texts)]
            before, *after = [result.score for result in pool.map(check, codes)]
        return after if before < 1.0 else []


def docstring_examples(text: str) -> list[str]:
    """The examples of a file's functions, as assertions."""
    module = try_parse(text)
    found: list[str] = []
    for node in module.body if module is not None else ():
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)) is not None:
            found += find_examples(f"def {node.name}({ast.unparse(node.args)}):\n{docstring}", node.name)
    return found[:_MOST]
