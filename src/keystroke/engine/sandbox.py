"""Templates that come with weights, run where they can do no harm.

Law: nothing a template writes reaches beyond its own text: no attributes of Python objects, no text without
end. Whatever it tries becomes ModelDamaged. The only file of the engine that imports jinja2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from keystroke.errors import ModelDamaged

_LARGEST_RENDER = 64 << 20  # characters, of a whole conversation or of any text a template multiplies


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also refuses arithmetic that would fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            repeats = isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int)
            if repeats and len(value) * times > _LARGEST_RENDER:
                raise jinja2.exceptions.SecurityError("a text multiplied beyond all use")
        if operator == "**" and (abs(left) > 1 << 16 or abs(right) > 64):
            raise jinja2.exceptions.SecurityError("a power beyond all use")
        return super().call_binop(context, operator, left, right)


class _AnswerMarks(Extension):
    """`{% generation %}` marks the model's own words for training; here it only stands around them."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Compiled:
    """A template that parses."""

    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    def render(self, **variables: Any) -> str:
        """The text. What the template's helpers raise passes through; what it does wrong itself may be any
        exception, and what is unsafe is ModelDamaged."""
        parts, size = [], 0
        try:
            for piece in self._template.generate(**variables):
                size += len(piece)
                if size > _LARGEST_RENDER:
                    raise jinja2.exceptions.SecurityError("it writes without end")
                parts.append(piece)
        except jinja2.exceptions.SecurityError as error:
            raise ModelDamaged(f"the model's chat template tried something unsafe: {error}") from None
        return "".join(parts)


def compiled(
    source: str, filters: Mapping[str, Callable[..., Any]], helpers: Mapping[str, Callable[..., Any]]
) -> Compiled:
    """The template, or ModelDamaged where it does not parse."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _AnswerMarks])
    environment.filters.update(filters)
    environment.globals.update(helpers)
    try:
        return Compiled(environment.from_string(source))
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelDamaged(f"the model's chat template does not parse: {error}") from error
