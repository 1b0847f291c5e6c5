"""A jinja2 sandbox for the chat templates of models.

A template cannot access attributes of Python objects or produce unlimited text; unsafe operations raise
ModelDamaged. Foreign templates also run in another process (`render_foreign`), since nested loops and growing
texts cannot be limited from inside. The only module of the engine that imports jinja2.
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
    """Also refuses arithmetic with huge results."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            repeats = isinstance(value, (str, bytes, list, tuple)) and isinstance(times, int)
            if repeats and len(value) * times > _LARGEST_RENDER:
                raise jinja2.exceptions.SecurityError("a repetition that is too long")
        if operator == "**" and (abs(left) > 1 << 16 or abs(right) > 64):
            raise jinja2.exceptions.SecurityError("a power that is too large")
        return super().call_binop(context, operator, left, right)


class _AnswerMarks(Extension):
    """Accepts `{% generation %}`, which marks the model's text for training, and ignores it."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CompiledTemplate:
    def __init__(self, template: jinja2.Template) -> None:
        self._template = template

    def render(self, **variables: Any) -> str:
        """The rendered text. Raises ModelDamaged for unsafe operations, and any exception of the template."""
        parts, size = [], 0
        try:
            for piece in self._template.generate(**variables):
                size += len(piece)
                if size > _LARGEST_RENDER:
                    raise jinja2.exceptions.SecurityError("its text is too long")
                parts.append(piece)
        except jinja2.exceptions.SecurityError as error:
            raise ModelDamaged(f"the model's chat template tried something unsafe: {error}") from None
        return "".join(parts)


class RefusalError(Exception):
    """Raised by a template through `raise_exception`."""


def compile_template(source: str, clock: Callable[[], datetime] = datetime.now) -> CompiledTemplate:
    """Compile a template. Raises ModelDamaged if it does not parse."""
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
    """Raises ModelDamaged if the template does not parse. Nothing is evaluated; compiling would already fold
    constants."""
    try:
        _environment().parse(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelDamaged(f"the model's chat template does not parse: {error}") from error


def render_foreign(source: str, variables: dict[str, Any]) -> tuple[str, str]:
    """`render_template` for the other process, from the source of the template."""
    try:
        return render_template(_cached_template(source), variables)
    except ModelDamaged as error:
        return "damaged", error.message


def render_template(template: CompiledTemplate, variables: dict[str, Any]) -> tuple[str, str]:
    """("text", the text), or the kind of error ("refused", "damaged" or "failed") and its message."""
    try:
        return "text", template.render(**variables)
    except RefusalError as refusal:
        return "refused", str(refusal)
    except ModelDamaged as error:
        return "damaged", error.message
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
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
    # Unlike jinja2's filter, without HTML escapes.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
