"""Normalises code so that equivalent answers can be compared.

Layout, comments and docstrings are removed; in Python, local variables are numbered. Text that does not
parse is compared as it is, without trailing white space.
"""

from __future__ import annotations

import ast

from keystroke.analysis.syntax import parse_tree, walk


def normalise(text: str, language: str | None) -> str:
    """A key that is the same for equivalent texts, nearly always."""
    if language == "python":
        try:
            return ast.dump(_Normaliser().visit(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return _strip_lines(text)
    if language is None:
        return _strip_lines(text)
    leaves = (
        node for node in walk(parse_tree(text, language)) if node.is_leaf() and "comment" not in node.kind()
    )
    return " ".join(node.text() for node in leaves)


def _strip_lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


class _Normaliser(ast.NodeTransformer):
    """Removes docstrings and annotations and numbers local variables."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def visit_Module(self, node: ast.Module | ast.ClassDef) -> ast.AST:
        node.body = _without_docstring(node.body)
        return self.generic_visit(node)

    visit_ClassDef = visit_Module  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return self.generic_visit(node)
        return self.generic_visit(ast.Assign([node.target], node.value, lineno=0))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(self._names.get(node.arg, node.arg))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.body, node.returns = _without_docstring(node.body), None
        outer = dict(self._names)
        arguments = node.args
        # Keyword-only names are part of the interface; names of positional parameters seldom matter.
        own = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        own += [a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None]
        own += [
            n.id
            for part in node.body
            for n in ast.walk(part)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        ]
        for name in own:
            self._names.setdefault(name, f"v{len(self._names)}")
        result = self.generic_visit(node)
        self._names = outer
        return result

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return body[1:] or [ast.Pass()]
    return body
