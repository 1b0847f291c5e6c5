"""Finds Python functions without an implementation. Code that does not parse has none."""

from __future__ import annotations

import ast
import textwrap

from keystroke.analysis.syntax import try_parse


def find_stubs(text: str) -> list[str]:
    """Names of the functions and methods whose body does nothing, in the order of the text."""
    tree = try_parse(textwrap.dedent(text))
    if tree is None:
        return []
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and all(map(_is_empty_statement, node.body))
    ]
    return [node.name for node in sorted(found, key=lambda node: node.lineno)]


def _is_empty_statement(statement: ast.stmt) -> bool:
    """Whether a statement is `pass`, `...`, a docstring or `raise NotImplementedError`."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    if not isinstance(statement, ast.Raise):
        return False
    raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
