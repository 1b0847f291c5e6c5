"""Parses examples written as code (in tests, documentation or by a model) into plans.

Nothing is run. Supported are plain values, calls of the module's own definitions, names for their results and
claims about them. An example with anything else is ignored as a whole.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keystroke.analysis.syntax import try_parse
from keystroke.assist.review.purity import is_plain_attribute

_TAGGED = {"date": "date", "datetime": "time", "Decimal": "decimal"}
_MOST = 30  # steps of a plan


class _Unknown(Exception):
    """An unsupported form."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The last step of `plan` returns `expected`: a value as code, or the name of an error. `text` is the
    claim as written, at `line` (from 1)."""

    plan: tuple[Any, ...]
    expected: str
    text: str
    line: int


def parse_claims(code: str, names: Collection[str]) -> list[Claim]:
    """The claims of a script, or of each test in it, about the definitions in `names`."""
    module = try_parse(code)
    if module is None:
        return []
    found = list(_read_claims(module.body, names))
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found += _read_claims(node.body, names)
    return found


def docstring_examples(text: str) -> Iterator[str]:
    """The `>>>` examples in the docstrings of a module, as code."""
    module = try_parse(text)
    for node in ast.walk(module) if module is not None else ():
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            continue
        lines = (ast.get_docstring(node) or "").split("\n")
        script: list[str] = []
        for line, below in zip(lines, [*lines[1:], ""], strict=True):
            if not line.strip().startswith(">>> "):
                continue
            call = line.strip()[4:]
            given = below.strip()
            has_result = bool(given) and not given.startswith((">>>", "...", "Traceback"))
            script.append(f"assert ({call}) == ({given})" if has_result else call)
        if script:
            yield "\n".join(script)


def _read_claims(body: Sequence[ast.stmt], names: Collection[str]) -> Iterator[Claim]:
    """The claims of one script, up to the first unsupported statement."""
    steps = _Steps(names)
    for node in body:
        try:
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                steps.assign(node.targets[0], node.value)
            elif isinstance(node, ast.Expr):
                if not isinstance(node.value, ast.Constant):
                    yield from steps.expression(node.value)
            elif isinstance(node, ast.Assert):
                yield steps.claim(node.test)
            elif isinstance(node, ast.With) and len(node.body) == 1:
                yield steps.raising(node)
            elif not isinstance(
                node, ast.Import | ast.ImportFrom | ast.Pass | ast.FunctionDef | ast.ClassDef
            ):
                return
        except (_Unknown, RecursionError):
            if isinstance(node, ast.Assert | ast.With):
                continue  # later statements do not depend on it
            return


class _Steps:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._plan: list[Any] = []
        self._known: dict[str, Any] = {}

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        if not isinstance(target, ast.Name):
            raise _Unknown
        self._known[target.id] = self._value(value, self._plan)
        if len(self._plan) > _MOST:
            raise _Unknown

    def expression(self, node: ast.expr) -> Iterator[Claim]:
        """A call; one of `assertEqual` and similar is a claim."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, given = node.func.attr, node.args
            if name in ("assertEqual", "assertEquals") and len(given) >= 2:
                yield self._claim(given[0], given[1], node)
                return
            if name in ("assertTrue", "assertFalse", "assertIsNone") and given:
                wanted = {"assertTrue": True, "assertFalse": False, "assertIsNone": None}[name]
                yield self._claim(given[0], ast.Constant(wanted), node)
                return
        if isinstance(node, ast.Compare):
            yield self.claim(node)
            return
        if not isinstance(node, ast.Call):
            raise _Unknown
        self._call(node, self._plan)

    def claim(self, test: ast.expr) -> Claim:
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
            return self._claim(test.left, test.comparators[0], test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._claim(test.operand, ast.Constant(False), test)
        return self._claim(test, ast.Constant(True), test)

    def raising(self, node: ast.With) -> Claim:
        context = node.items[0].context_expr
        raises = isinstance(context, ast.Call) and ast.unparse(context.func).rpartition(".")[2]
        inner = node.body[0]
        if raises not in ("raises", "assertRaises") or not isinstance(inner, ast.Expr | ast.Assign):
            raise _Unknown
        assert isinstance(context, ast.Call)
        if not context.args or not isinstance(context.args[0], ast.Name):
            raise _Unknown
        plan = list(self._plan)
        self._call(inner.value, plan)
        return Claim(tuple(plan), context.args[0].id, ast.unparse(node), node.lineno)

    def _claim(self, left: ast.expr, right: ast.expr, source: ast.expr) -> Claim:
        if isinstance(left, ast.Constant) and isinstance(right, ast.Call):
            left, right = right, left
        try:
            expected = repr(ast.literal_eval(right))
        except (ValueError, TypeError):
            raise _Unknown from None
        plan = list(self._plan)
        self._call(left, plan)
        return Claim(tuple(plan), expected, ast.unparse(source), getattr(source, "lineno", 1))

    def _call(self, node: ast.expr, plan: list[Any]) -> int:
        """A call, a property or a built-in of one, as a step; its number."""
        if isinstance(node, ast.Attribute):
            self._check_attribute(node.attr)
            plan.append({"on": self._step_of(node.value, plan), "call": node.attr, "arguments": []})
            return len(plan) - 1
        if not isinstance(node, ast.Call) or any(isinstance(a, ast.Starred) for a in node.args):
            raise _Unknown
        if any(word.arg is None for word in node.keywords):
            raise _Unknown
        if isinstance(node.func, ast.Attribute) and not self._is_module(node.func.value):
            self._check_attribute(node.func.attr)
            step: dict[str, Any] = {"on": self._step_of(node.func.value, plan), "call": node.func.attr}
        else:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in self._names:
                raise _Unknown
            step = {"call": name}
        step["arguments"] = [self._value(argument, plan) for argument in node.args]
        if node.keywords:
            step["named"] = {str(word.arg): self._value(word.value, plan) for word in node.keywords}
        plan.append(step)
        return len(plan) - 1

    @staticmethod
    def _check_attribute(name: str) -> None:
        if not is_plain_attribute(name):
            raise _Unknown

    def _is_module(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id not in self._known and node.id not in self._names

    def _step_of(self, node: ast.expr, plan: list[Any]) -> int:
        """The step that made an object."""
        if isinstance(node, ast.Name):
            known = self._known.get(node.id)
            if not isinstance(known, dict) or "step" not in known:
                raise _Unknown
            return int(known["step"])
        return self._call(node, plan)

    def _value(self, node: ast.expr, plan: list[Any]) -> Any:
        if isinstance(node, ast.Constant):
            if not isinstance(node.value, str | int | float | None):
                raise _Unknown
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self._value(node.operand, plan)
            if not isinstance(value, int | float):
                raise _Unknown
            return -value
        if isinstance(node, ast.Name):
            if node.id not in self._known:
                raise _Unknown
            return self._known[node.id]
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            parts = [self._value(part, plan) for part in node.elts]
            return parts if isinstance(node, ast.List) else {type(node).__name__.lower(): parts}
        if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
            pairs = zip(node.keys, node.values, strict=True)
            return {"dict": [[self._value(k, plan), self._value(v, plan)] for k, v in pairs if k is not None]}
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in _TAGGED and name not in self._names:
                given = [self._value(part, plan) for part in node.args]
                return {_TAGGED[name]: str(given[0]) if name == "Decimal" and given else given}
            return {"step": self._call(node, plan)}
        raise _Unknown
