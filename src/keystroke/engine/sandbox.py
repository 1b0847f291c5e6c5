"""Templates that come with weights, run where they can do no harm.

Nothing a template writes reaches beyond its own text: no attributes of Python objects, no text without
end. Whatever it tries becomes ModelDamaged. A template of somebody else's also runs in a process of its own
(`render_foreign`): loops inside loops and texts that double cannot be bounded from inside. The only file of
the engine that imports jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

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


class CompiledTemplate:
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


class RefusalError(Exception):
    """Raised by a template through `raise_exception`."""


def compile_template(source: str, clock: Callable[[], datetime] = datetime.now) -> CompiledTemplate:
    """The template, or ModelDamaged where it does not parse."""
    environment = _environment()
    environment.filters["tojson"] = _tojson
    helpers: Mapping[str, Callable[..., Any]] = {
        "raise_exception": _refuse,
        "strftime_now": lambda form: clock().strftime(form),
    }
    environment.globals.update(helpers)
    try:
        return CompiledTemplate(environment.from_string(source))
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelDamaged(f"the model's chat template does not parse: {error}") from error


def check_syntax(source: str) -> None:
    """Raises ModelDamaged where it does not parse. Nothing of the template is run: compiling would already
    work out what is constant in it."""
    try:
        _environment().parse(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelDamaged(f"the model's chat template does not parse: {error}") from error


def render_foreign(source: str, variables: dict[str, Any]) -> tuple[str, str]:
    """`render_here` for another process, which asks with plain values."""
    try:
        return render_template(_cached_template(source), variables)
    except ModelDamaged as error:
        return "damaged", error.message


def render_template(template: CompiledTemplate, variables: dict[str, Any]) -> tuple[str, str]:
    """("text", the text), or why there is none: "refused", "damaged" or "failed", and the reason."""
    try:
        return "text", template.render(**variables)
    except RefusalError as refusal:
        return "refused", str(refusal)
    except ModelDamaged as error:
        return "damaged", error.message
    except MemoryError:
        raise
    except Exception as error:  # a template is foreign code: it can raise anything
        return "failed", f"{type(error).__name__}: {error}"


@lru_cache(maxsize=4)
def _cached_template(source: str) -> CompiledTemplate:
    return compile_template(source)


def _environment() -> _Sandbox:
    return _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _AnswerMarks])


def _refuse(message: str) -> NoReturn:
    raise RefusalError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Chat templates want JSON as it is, not escaped for HTML as jinja2's own filter does.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
