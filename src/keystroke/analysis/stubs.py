"""Functions that wait to be written: a head and, at most, what they promise.

Pure, Python only. Code that does not parse has none.
"""

from __future__ import annotations

import ast
import textwrap
import warnings


def find_stubs(text: str) -> list[str]:
    """Names of the functions and methods whose body does nothing, in the order of the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the text, not of ours
        try:
            tree = ast.parse(textwrap.dedent(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return []
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and all(map(_nothing, node.body))
    ]
    return [node.name for node in sorted(found, key=lambda node: node.lineno)]


def _nothing(statement: ast.stmt) -> bool:
    """`pass`, `...`, a text, or the word that it is not implemented."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if not isinstance(statement, ast.Raise):
        return False
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
