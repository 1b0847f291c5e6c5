"""What a request asks of the form of its answer: the tools, how they may be called, the language of its text.

Wire fields in, an AnswerForm out, whichever API they came through; fields that contradict each other or
cannot be met are refused by name. What holds a model to the form is the engine's grammar; a model that runs
elsewhere is told of it, where its server understands, and checked at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from keystroke.assist.tool_calls.forms import call_form
from keystroke.assist.tool_calls.grammar import calls_constraint
from keystroke.assist.tool_calls.parser import AnswerParser
from keystroke.assist.tool_calls.seen import seen_lines
from keystroke.assist.tool_calls.tools import Offered, Toolset, short_toolset, whole_toolset
from keystroke.assist.tool_calls.usable import Bounds, usable_tools
from keystroke.engine.generation import GenerationParams
from keystroke.engine.grammar import constraint as languages
from keystroke.engine.grammar.constraint import Constraint
from keystroke.engine.grammar.validate import unmet_text
from keystroke.engine.model import Model
from keystroke.errors import EngineError, GrammarError, InputError, KeystrokeError
from keystroke.gateway.api.conversation import (
    asked,
    calls_made,
    short_files,
    spent_tools,
    texts_read,
    written,
)
from keystroke.protocol.items import Item, Tool

SMALL = 4_000_000_000  # parameters below which a model is shown short declarations
_LONGEST_WORDS = 8000  # characters of a schema that a model is still shown


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The language of an answer's text: held to by a local model (`constraint`), passed on to a remote server
    as `wire`, and told to the model in `words`."""

    constraint: Constraint
    wire: Mapping[str, Any]
    words: str = ""
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: str = "auto"  # auto, required, none
    only: frozenset[str] | None = None  # of these tools alone

    @property
    def wire(self) -> Any:
        """As a server of the chat API reads it; None: its default."""
        if self.only is not None and len(self.only) == 1 and self.mode == "required":
            return {"type": "function", "function": {"name": next(iter(self.only))}}
        return self.mode if self.mode != "auto" else None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    toolset: Toolset = field(default_factory=Toolset)
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    text: TextFormat | None = None
    usable: Toolset | None = None  # of the tools, those that the grammar lets a held model call

    @property
    def remote(self) -> dict[str, Any]:
        """The fields that tell another server."""
        fields: dict[str, Any] = {} if self.text is None else dict(self.text.wire)
        if self.toolset:
            if self.choice.wire is not None:
                fields["tool_choice"] = self.choice.wire
            if not self.parallel:
                fields["parallel_tool_calls"] = False
        return fields

    def check(self, text: str) -> KeystrokeError | None:
        """What is wrong with an answer that another server made."""
        schema = None if self.text is None else self.text.schema
        why = None if schema is None or not text else unmet_text(schema, text)
        if why is None:
            return None
        assert self.text is not None
        return EngineError(f"The remote model's answer does not meet {self.text.constraint.origin}: {why}.")

    def constraint(self, model: Model, items: Sequence[Item] = ()) -> Constraint | None:
        """What holds `model` to this form. `items` are the conversation: what the model has read, and what
        it was asked."""
        answer = None if self.text is None else self.text.constraint
        if not self.toolset:
            return answer
        return calls_constraint(
            self.toolset,
            call_form(model.chat.source if model.chat is not None else ""),
            model.tokenizer,
            self._bounds(items),
            required=self.choice.mode == "required",
            parallel=self.parallel,
            answer=answer,
        )

    def parser(self, *, local: bool) -> AnswerParser:
        """What reads the answers of a model, which this form's constraint holds where it is `local`."""
        required = self.choice.mode == "required"
        return AnswerParser(
            self.usable if local and self.usable is not None else self.toolset,
            held=local and bool(self.toolset),
            parallel=self.parallel,
            formatted=self.text is not None and not (local and required),
        )

    def narrowed(self, items: Sequence[Item]) -> AnswerForm:
        """With the tools that the constraint for `items` lets a model call."""
        if not self.toolset:
            return self
        return replace(self, usable=usable_tools(self.toolset, self._bounds(items)))

    def _bounds(self, items: Sequence[Item]) -> Bounds:
        """What the conversation says of the tools: a small model quotes what it has read."""
        if not self.toolset.short:
            return Bounds(self.choice.only)
        own = written(items, self.toolset)
        seen = seen_lines(texts_read(items, self.toolset))
        others = tuple(line for line in seen if line.removesuffix("\n") not in own.lines)
        return Bounds(
            only=self.choice.only,
            seen=others if any(map(str.strip, others)) else (),
            asked=asked(items),
            spent=spent_tools(items, self.toolset),
            written=tuple(sorted(own.paths)),
            copied=tuple(sorted(own.copied)),
            short=tuple(
                path for path in short_files(items, self.toolset) if path not in own.paths | own.copied
            ),
            acted=bool(calls_made(items)),
            closed=self.choice.mode != "required",
        )


# Tools


def tool_choice(wanted: Any, offered: Sequence[Offered]) -> ToolChoice:
    """Raises InputError for a choice that is none, or names a tool that is not offered."""
    if wanted in (None, "auto"):
        return ToolChoice()
    if wanted == "none":
        return ToolChoice("none")
    if wanted in ("required", "any"):
        return ToolChoice("required")
    if not isinstance(wanted, dict):
        raise InputError("tool_choice must be auto, required, none or name a tool.", param="tool_choice")
    if wanted.get("type") == "allowed_tools":
        nested = wanted.get("allowed_tools")
        inner: dict[str, Any] = nested if isinstance(nested, dict) else wanted
        names = frozenset(_named(tool) for tool in inner.get("tools") or ())
        mode = "required" if inner.get("mode") == "required" else "auto"
    else:
        names, mode = frozenset({_named(wanted)}), "required"
        if names == {""}:  # a tool that the server would run itself: it runs none
            return ToolChoice()
    unknown = sorted(names - {tool.name for tool in offered})
    if unknown or not names:
        raise InputError(
            f"tool_choice names {unknown[0] if unknown else 'no tool'}, which is not among the tools.",
            param="tool_choice",
        )
    return ToolChoice(mode, names)


def _named(tool: Any) -> str:
    if not isinstance(tool, dict):
        return ""
    function = tool.get("function")
    name = tool.get("name") or (function.get("name") if isinstance(function, dict) else None)
    return name if isinstance(name, str) else ""


def offered_tools(tools: Sequence[Tool] | None) -> list[Offered]:
    """The tools of a request that a model can call; those that a server would run itself are left out."""
    offered: dict[str, Offered] = {}
    for tool in tools or ():
        inner = tool.tools if tool.type == "namespace" and tool.tools else [tool]
        for one in inner:
            if one.name and one.type in ("function", "custom"):
                namespace = tool.name if tool.type == "namespace" else None
                offered[one.name] = _offered(one, namespace)
    return list(offered.values())


def _offered(tool: Tool, namespace: str | None) -> Offered:
    form: dict[str, Any] = tool.format or {}
    nested = form.get("grammar")
    grammar: dict[str, Any] = nested if isinstance(nested, dict) else form
    definition, syntax = grammar.get("definition"), grammar.get("syntax")
    held = isinstance(definition, str) and syntax in ("lark", "regex")
    return Offered(
        tool.name or "",
        tool.type == "custom",
        namespace,
        tool.description or "",
        tool.parameters or {},
        bool(tool.strict),
        (str(syntax), str(definition)) if held else None,
    )


def answer_form(
    tools: Sequence[Tool] | None,
    choice: Any,
    parallel: bool | None,
    text: TextFormat | None,
    *,
    declarations: str,
    parameters: int,
    items: Sequence[Item] = (),
) -> AnswerForm:
    """The form of an answer by a model with so many `parameters` (0: not known). `declarations`: the setting
    that says whether small models are shown short ones."""
    offered = offered_tools(tools)
    chosen = tool_choice(choice, offered) if offered else ToolChoice()
    if chosen.mode == "none":
        offered = []
    short = declarations == "short" or (declarations == "auto" and 0 < parameters < SMALL)
    if chosen.only is not None and chosen.mode == "required":
        offered = [tool for tool in offered if tool.name in chosen.only]
    toolset = short_toolset(offered, asked(items)) if short and offered else whole_toolset(offered)
    return AnswerForm(toolset, chosen, parallel is not False, text)


async def hold(
    model: Model,
    params: GenerationParams,
    form: AnswerForm,
    items: Sequence[Item] = (),
    tools: Sequence[Tool] | None = None,
) -> tuple[GenerationParams, AnswerForm]:
    """`params` with what holds `model` to `form`, compiled off the loop; and the form as it can be held to.
    Raises GrammarError, naming the field, where what was asked for cannot be enforced."""
    if form.text is None and not form.toolset:
        return params, form

    def compiled() -> tuple[GenerationParams, AnswerForm]:
        from keystroke.engine.grammar.compiler import prepare  # here: it takes a while to import

        able = form
        constraint = able.constraint(model, items)
        try:
            prepare(constraint, model.tokenizer, model.engine.info)
        except GrammarError as error:
            able = _spared(form, tools, error, model)
            constraint = able.constraint(model, items)
            prepare(constraint, model.tokenizer, model.engine.info)
        return replace(params, constraint=constraint), able.narrowed(items)

    return await asyncio.to_thread(compiled)


def _spared(form: AnswerForm, tools: Sequence[Tool] | None, error: GrammarError, model: Model) -> AnswerForm:
    """The form after a grammar of it was refused: tools whose schema cannot be enforced take any object,
    unless they are strict. Raises `error`, or one that names the tool, where nothing can be spared."""
    from keystroke.engine.grammar.compiler import prepare

    shown = []
    for one in form.toolset.shown:
        wanted = languages.json_schema(one.parameters, strict=one.tool.strict, origin=_place(one.tool, tools))
        try:
            prepare(wanted, model.tokenizer, model.engine.info)
        except GrammarError:
            if one.tool.strict:
                raise
            one = replace(one, parameters={"type": "object"}, grounded=frozenset())
        shown.append(one)
    if tuple(shown) == form.toolset.shown:
        raise error
    return replace(form, toolset=replace(form.toolset, shown=tuple(shown)))


def _place(tool: Offered, tools: Sequence[Tool] | None) -> str:
    for index, one in enumerate(tools or ()):
        if one.name == tool.name:
            return f"tools[{index}].parameters"
    return "tools"


# Text


def text_format(
    given: Mapping[str, Any] | None,
    param: str,
    *,
    grammar: str | None = None,
    json_schema: Any = None,
    guided_json: Any = None,
    guided_regex: str | None = None,
    guided_choice: Sequence[str] | None = None,
    guided_grammar: str | None = None,
    structured_outputs: Mapping[str, Any] | None = None,
) -> TextFormat | None:
    """The one format that a request asks for, in whichever field: OpenAI's (`given`, in the field `param`),
    llama.cpp's, vLLM's. Raises GrammarError or InputError."""
    found: list[TextFormat] = []
    if given is not None and (one := _openai_format(given, param)) is not None:
        found.append(one)
    if grammar:
        found.append(_of(languages.gbnf(grammar, origin="grammar"), {"grammar": grammar}))
    if json_schema:
        found.append(_of_schema(json_schema, "json_schema"))
    found += _vllm_formats(
        {
            "json": guided_json,
            "regex": guided_regex,
            "choice": guided_choice,
            "grammar": guided_grammar,
        },
        "guided_",
    )
    if structured_outputs is not None:
        found += _vllm_formats(structured_outputs, "structured_outputs.")
    if len(found) > 1:
        names = " and ".join(one.constraint.origin for one in found[:2])
        raise InputError(f"{names} both say what the answer must be; send one of them.", param=param)
    return found[0] if found else None


def _openai_format(given: Mapping[str, Any], param: str) -> TextFormat | None:
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        if isinstance(given.get("schema"), dict):  # llama.cpp's way
            return _of_schema(given["schema"], f"{param}.schema")
        return _of(
            languages.any_json(origin=param),
            {"response_format": {"type": "json_object"}},
            "Answer with one JSON object and nothing else.",
            {"type": "object"},
        )
    if kind == "json_schema":
        inner, place = (
            (given["json_schema"], f"{param}.json_schema") if "json_schema" in given else (given, param)
        )
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise InputError(
                f"{place}.schema is missing; send a JSON Schema object.", param=f"{place}.schema"
            )
        return _of_schema(schema, f"{place}.schema", strict=bool(inner.get("strict")))
    if kind in ("regex", "grammar") and isinstance(given.get("pattern", given.get("grammar")), str):
        text = given.get("pattern", given.get("grammar"))
        made = languages.regex if kind == "regex" else languages.gbnf
        return _of(made(text, origin=param), {"response_format": dict(given)})
    raise InputError(
        f"{param} asks for {kind!s:.40}; text, json_object and json_schema are known.", param=f"{param}.type"
    )


def _vllm_formats(given: Mapping[str, Any], prefix: str) -> list[TextFormat]:
    made: list[TextFormat] = []
    for key, value in given.items():
        if value is None or value is False:
            continue
        origin = f"{prefix}{key}"
        if key == "json":
            made.append(_of_schema(value, origin))
        elif key == "json_object":
            made.append(_of(languages.any_json(origin=origin), {"structured_outputs": {key: value}}))
        elif key == "regex":
            made.append(_of(languages.regex(_string(value, origin), origin=origin), {"guided_regex": value}))
        elif key == "choice":
            words = value if isinstance(value, list) else [value]
            made.append(_of(languages.choice(words, origin=origin), {"guided_choice": words}))
        elif key == "grammar":
            made.append(_of(languages.gbnf(_string(value, origin), origin=origin), {"guided_grammar": value}))
        elif key not in ("whitespace_pattern", "disable_any_whitespace", "disable_fallback"):
            raise InputError(f"{origin} is not known here; use json, regex, choice or grammar.", param=origin)
    return made


def _of_schema(schema: Any, origin: str, *, strict: bool = True) -> TextFormat:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(f"{origin} is not JSON.", param=origin) from error
    constraint = languages.json_schema(schema, strict=strict, origin=origin)
    written = msgspec.json.encode(schema).decode()
    words = f"Answer with JSON that follows this schema, and nothing else:\n{written}"
    wire = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}
    told = words if len(written) <= _LONGEST_WORDS else ""
    return TextFormat(constraint, {"response_format": wire}, told, schema)


def _of(
    constraint: Constraint, wire: Mapping[str, Any], words: str = "", schema: Mapping[str, Any] | None = None
) -> TextFormat:
    return TextFormat(constraint, wire, words, schema)


def _string(value: Any, origin: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{origin} must be a text.", param=origin)
    return value
