"""Parameter lists of functions, and the steps from one list to another.

Parameters are matched by name. A new parameter needs a default for the existing calls.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise

from keystroke.analysis.syntax import parse_quietly
from keystroke.errors import InputError


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    default: str | None
    annotation: str | None

    def __str__(self) -> str:
        words = f"{self.name}: {self.annotation}" if self.annotation else self.name
        if self.default is None:
            return words
        return f"{words} = {self.default}" if self.annotation else f"{words}={self.default}"


def parse_parameters(text: str) -> list[Parameter]:
    """The plain parameters of a list such as `a, b: int = 1`."""
    try:
        tree = parse_quietly(f"def f({text}\n): pass")
    except (SyntaxError, ValueError):
        raise InputError(f"{text!r:.80} is not a list of parameters; write it as in a `def`") from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise InputError(f"{text!r:.80} is not a list of parameters; write it as in a `def`")
    return function_parameters(tree.body[0].args)


def function_parameters(given: ast.arguments) -> list[Parameter]:
    if given.vararg or given.kwarg or given.kwonlyargs or given.posonlyargs:
        raise InputError("only functions with plain parameters can be changed: no *, ** or / among them")
    lacking = len(given.args) - len(given.defaults)
    return [
        Parameter(
            item.arg,
            ast.unparse(given.defaults[at - lacking]) if at >= lacking else None,
            ast.unparse(item.annotation) if item.annotation else None,
        )
        for at, item in enumerate(given.args)
    ]


@dataclass(frozen=True, slots=True)
class SignatureSteps:
    """Indices to remove (last first), parameters to append, and the final order."""

    removed: tuple[int, ...]
    added: tuple[Parameter, ...]
    order: tuple[int, ...]


def signature_steps(before: list[Parameter], after: list[Parameter]) -> SignatureSteps:
    old, new = [p.name for p in before], [p.name for p in after]
    if len(set(new)) < len(new):
        raise InputError("a parameter is named twice; name each once")
    removed = tuple(at for at in reversed(range(len(old))) if old[at] not in new)
    added = tuple(p for p in after if p.name not in old)
    for item in added:
        if item.default is None:
            raise InputError(
                f"the new parameter {item.name} needs a default for existing calls: write {item.name}=VALUE"
            )
    for left, right in pairwise(after):
        if left.default is not None and right.default is None:
            raise InputError(
                f"{right.name} has no default, so it cannot come after {left.name}, which has one"
            )
    now = [name for name in old if name in new] + [p.name for p in added]
    return SignatureSteps(removed, added, tuple(now.index(name) for name in new))
