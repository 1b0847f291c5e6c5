"""The required form of an answer: tools, how they may be called, and the format of the text.

Reads the fields of every API into an `AnswerForm`; contradictory or unsupported fields are refused by name.
A local model is held to the form by a grammar; a remote server gets it as request fields, and its answer is
checked at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from keystroke.assist.tool_calls.file_edits import SegmentSource, WholeEditCalls, edits_files, same_file
from keystroke.assist.tool_calls.forms import HERMES, call_form, opens_thought
from keystroke.assist.tool_calls.grammar import calls_constraint
from keystroke.assist.tool_calls.parser import answer_parser
from keystroke.assist.tool_calls.seen import seen_lines
from keystroke.assist.tool_calls.tools import OfferedTool, Toolset, short_toolset, whole_toolset
from keystroke.assist.tool_calls.usable import ToolConstraints, usable_tools
from keystroke.engine.generation import GenerationParams
from keystroke.engine.grammar import constraint as languages
from keystroke.engine.grammar.constraint import Constraint
from keystroke.engine.grammar.validate import text_violation
from keystroke.engine.model import Model
from keystroke.errors import EngineError, GrammarError, InputError, KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.client_edits import ClientEdits, makes_edits
from keystroke.gateway.api.tool_history import (
    calls_made,
    exhausted_tools,
    files_looked_at,
    files_read,
    last_user_text,
    short_files,
    texts_read,
    written_edits,
)
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.service import Service
from keystroke.protocol.items import Item, Tool
from keystroke.protocol.requests import ChatRequest, ConstraintFields, CreateRequest

SMALL_MODEL = 4_000_000_000  # parameters below which a model is shown short declarations
_MAX_SCHEMA_TEXT = 8000  # characters of a schema that is put into the prompt


@dataclass(frozen=True, slots=True)
class TextFormat:
    """The format of an answer's text: `constraint` for a local model, `wire` for a remote server, `words`
    for the prompt."""

    constraint: Constraint
    wire: Mapping[str, Any]
    words: str = ""
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    mode: str = "auto"  # auto, required, none
    only: frozenset[str] | None = None  # only these tools

    @property
    def wire(self) -> Any:
        """The value in the chat API; None: its default."""
        if self.only is not None and len(self.only) == 1 and self.mode == "required":
            return {"type": "function", "function": {"name": next(iter(self.only))}}
        return self.mode if self.mode != "auto" else None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    toolset: Toolset = field(default_factory=Toolset)
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    text: TextFormat | None = None
    usable: Toolset | None = None  # the tools that the grammar allows
    more: Mapping[str, Any] = field(default_factory=dict)  # further fields for a remote server

    @property
    def remote(self) -> dict[str, Any]:
        """The request fields for a remote server."""
        fields = {**self.more, **({} if self.text is None else self.text.wire)}
        if self.toolset:
            if self.choice.wire is not None:
                fields["tool_choice"] = self.choice.wire
            if not self.parallel:
                fields["parallel_tool_calls"] = False
        return fields

    def check(self, text: str) -> KeystrokeError | None:
        """The error of a remote server's answer that does not meet the schema."""
        schema = None if self.text is None else self.text.schema
        why = None if schema is None or not text else text_violation(schema, text)
        if why is None or self.text is None:
            return None
        return EngineError(f"The remote model's answer does not meet {self.text.constraint.origin}: {why}.")

    def constraint(self, model: Model, items: Sequence[Item] = ()) -> Constraint | None:
        """The constraint that holds `model` to this form, given the conversation `items`."""
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

    def parser(self, model: Model | None, prompt: Sequence[int] = ()) -> SegmentSource:
        """A parser of the output of `model` behind `prompt`, which the constraint holds; None: of a remote
        model."""
        required, local = self.choice.mode == "required", model is not None
        form = HERMES if model is None or model.chat is None else call_form(model.chat.source)
        parser = answer_parser(
            form,
            self.usable if local and self.usable is not None else self.toolset,
            constrained=local and bool(self.toolset),
            parallel=self.parallel,
            formatted=self.text is not None and not (local and required),
            thinking=model is not None and opens_thought(form, model.tokenizer, prompt),
        )
        edits = local and any(edits_files(shown.tool) for shown in self.toolset.shown)
        return WholeEditCalls(parser) if edits else parser

    def client_edits(
        self, service: Service, entry: ServedModel, caller: Caller, items: Sequence[Item]
    ) -> ClientEdits | None:
        """What checks and makes the calls that change files; None where no tool of a local model does."""
        if entry.model is None or not any(edits_files(shown.tool) for shown in self.toolset.shown):
            return None
        makes = self.toolset.short and entry.model.chat is not None
        files = files_read(items, self.toolset)
        return ClientEdits(service, entry, caller, files, last_user_text(items), makes=makes)

    def with_usable_tools(self, items: Sequence[Item]) -> AnswerForm:
        """With the tools that the constraint for `items` allows."""
        if not self.toolset:
            return self
        return replace(self, usable=usable_tools(self.toolset, self._bounds(items)))

    def _bounds(self, items: Sequence[Item]) -> ToolConstraints:
        """The limits that the conversation puts on tool calls: a small model quotes what it has read."""
        if not self.toolset.short:
            return ToolConstraints(self.choice.only)
        own = written_edits(items, self.toolset)
        seen = seen_lines(texts_read(items, self.toolset))
        others = tuple(line for line in seen if line.removesuffix("\n") not in own.lines)
        request = last_user_text(items)
        files = files_read(items, self.toolset) if makes_edits(request) else {}
        looked, absent = files_looked_at(items, self.toolset)
        return ToolConstraints(
            only=self.choice.only,
            seen_lines=others if any(map(str.strip, others)) else (),
            request=request,
            exhausted=exhausted_tools(items, self.toolset),
            written=tuple(sorted(own.paths)),
            copied=tuple(sorted(own.copied)),
            known=tuple(sorted(own.known)),
            short=tuple(
                path for path in short_files(items, self.toolset) if path not in own.paths | own.copied
            ),
            made=tuple(
                path for path in files if not any(same_file(path, one) for one in own.paths | own.copied)
            ),
            looked=looked,
            absent=absent,
            has_acted=bool(calls_made(items)),
            closed=self.choice.mode != "required",
        )


# Tools


def tool_choice(choice: Any, offered: Sequence[OfferedTool]) -> ToolChoice:
    """The choice in any form of the OpenAI APIs. Raises InputError for a malformed choice, or one that names
    a tool that is not offered."""
    if choice in (None, "auto"):
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if choice in ("required", "any"):
        return ToolChoice("required")
    if not isinstance(choice, dict):
        raise InputError("tool_choice must be auto, required, none or name a tool.", param="tool_choice")
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        tools = inner.get("tools") if isinstance(inner, dict) else None
        if not isinstance(tools, list) or not tools:
            raise InputError(
                "tool_choice.tools must list the tools that are allowed.", param="tool_choice.tools"
            )
        names = frozenset(_tool_name(tool, f"tool_choice.tools[{at}]") for at, tool in enumerate(tools))
        mode = inner.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise InputError("tool_choice.mode must be auto or required.", param="tool_choice.mode")
    elif kind in ("function", "custom"):
        names, mode = frozenset({_tool_name(choice, "tool_choice")}), "required"
    elif isinstance(kind, str):  # one that the original runs itself, unless offered here
        names, mode = frozenset({kind} & {tool.name for tool in offered}), "required"
        if not names:
            return ToolChoice()
    else:
        raise InputError("tool_choice.type must be a text such as function.", param="tool_choice.type")
    unknown = sorted(names - {tool.name for tool in offered})
    if unknown and offered:
        raise InputError(
            f"tool_choice names {unknown[0]}, which is not among the tools.", param="tool_choice"
        )
    return ToolChoice(mode, names)


def _tool_name(tool: Any, param: str) -> str:
    """The name in `{name}`, `{function: {name}}` or `{custom: {name}}`."""
    inner = tool
    if isinstance(tool, dict) and "name" not in tool:
        inner = tool.get("function", tool.get("custom"))
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not name:
        raise InputError(f"{param}.name must be the name of a tool.", param=f"{param}.name")
    return name


def offered_tools(tools: Sequence[Tool] | None) -> list[OfferedTool]:
    """The tools of a request that a model can call; server-side tools are left out."""
    offered: dict[str, OfferedTool] = {}
    for tool in tools or ():
        inner = tool.tools if tool.type == "namespace" and tool.tools else [tool]
        for one in inner:
            if one.name and one.type in ("function", "custom"):
                namespace = tool.name if tool.type == "namespace" else None
                offered[one.name] = _offered_tool(one, namespace)
    return list(offered.values())


def _offered_tool(tool: Tool, namespace: str | None) -> OfferedTool:
    form: dict[str, Any] = tool.format or {}
    nested = form.get("grammar")
    grammar: dict[str, Any] = nested if isinstance(nested, dict) else form
    definition, syntax = grammar.get("definition"), grammar.get("syntax")
    has_grammar = isinstance(definition, str) and syntax in ("lark", "regex")
    return OfferedTool(
        tool.name or "",
        tool.type == "custom",
        namespace,
        tool.description or "",
        tool.parameters or {},
        bool(tool.strict),
        (str(syntax), str(definition)) if has_grammar else None,
    )


def answer_form(
    request: CreateRequest | ChatRequest,
    tools: Sequence[Tool] | None,
    text: TextFormat | None,
    items: Sequence[Item],
    *,
    declarations: str,
    parameters: int,
) -> AnswerForm:
    """The form of an answer by a model with so many `parameters` (0: unknown). `declarations`: the setting
    for short tool declarations."""
    offered = offered_tools(tools)
    chosen = tool_choice(request.tool_choice, offered)
    if not offered:
        chosen = ToolChoice()
    elif chosen.mode == "none":
        offered = []
    short = declarations == "short" or (declarations == "auto" and 0 < parameters < SMALL_MODEL)
    if chosen.only is not None and chosen.mode == "required":
        offered = [tool for tool in offered if tool.name in chosen.only]
    toolset = short_toolset(offered, last_user_text(items)) if short and offered else whole_toolset(offered)
    return AnswerForm(toolset, chosen, request.parallel_tool_calls is not False, text)


async def constrain(
    model: Model,
    params: GenerationParams,
    form: AnswerForm,
    items: Sequence[Item] = (),
    tools: Sequence[Tool] | None = None,
) -> tuple[GenerationParams, AnswerForm]:
    """`params` with the constraint of `form`, compiled in a thread, and the form that can be enforced. Raises
    GrammarError, naming the field, where the form cannot be enforced."""
    if form.text is None and not form.toolset:
        return params, form

    def compile_form() -> tuple[GenerationParams, AnswerForm]:
        from keystroke.engine.grammar.compiler import prepare  # imported late: it is slow to import

        able = form
        constraint = able.constraint(model, items)
        try:
            prepare(constraint, model.tokenizer, model.engine.info)
        except GrammarError as error:
            able = _relax(form, tools, error, model)
            constraint = able.constraint(model, items)
            prepare(constraint, model.tokenizer, model.engine.info)
        return replace(params, constraint=constraint), able.with_usable_tools(items)

    return await asyncio.to_thread(compile_form)


def _relax(form: AnswerForm, tools: Sequence[Tool] | None, error: GrammarError, model: Model) -> AnswerForm:
    """The form after its grammar was refused: tools whose schema cannot be enforced accept any object,
    unless they are strict. Raises `error`, or one that names the tool, where nothing can be relaxed."""
    from keystroke.engine.grammar.compiler import prepare

    shown = []
    for one in form.toolset.shown:
        schema = languages.json_schema(
            one.parameters, strict=one.tool.strict, origin=_origin(one.tool, tools)
        )
        try:
            prepare(schema, model.tokenizer, model.engine.info)
        except GrammarError:
            if one.tool.strict:
                raise
            one = replace(one, parameters={"type": "object"}, grounded=frozenset())
        shown.append(one)
    if tuple(shown) == form.toolset.shown:
        raise error
    return replace(form, toolset=replace(form.toolset, shown=tuple(shown)))


def _origin(tool: OfferedTool, tools: Sequence[Tool] | None) -> str:
    for index, one in enumerate(tools or ()):
        if one.name == tool.name:
            return f"tools[{index}].parameters"
    return "tools"


# Text


def text_format(
    given: Mapping[str, Any] | None,
    param: str,
    request: CreateRequest | ConstraintFields,
) -> TextFormat | None:
    """The format that a request asks for, in OpenAI's field (`given`, named `param`), llama.cpp's or vLLM's.
    Raises GrammarError or InputError."""
    found: list[TextFormat] = []
    if given is not None and (one := _openai_format(given, param)) is not None:
        found.append(one)
    if isinstance(request, ConstraintFields):
        if request.grammar:
            constraint = languages.gbnf(request.grammar, origin="grammar")
            found.append(TextFormat(constraint, {"grammar": request.grammar}))
        if request.json_schema:
            found.append(_schema_format(request.json_schema, "json_schema"))
        kinds = ("json", "regex", "choice", "grammar")
        found += _vllm_formats({kind: getattr(request, f"guided_{kind}") for kind in kinds}, "guided_")
    if request.structured_outputs is not None:
        found += _vllm_formats(request.structured_outputs, "structured_outputs.")
    if len(found) > 1:
        names = " and ".join(one.constraint.origin for one in found[:2])
        raise InputError(f"{names} both set the format of the answer; send one of them.", param=param)
    return found[0] if found else None


def _openai_format(given: Mapping[str, Any], param: str) -> TextFormat | None:
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        if isinstance(given.get("schema"), dict):  # as llama.cpp sends it
            return _schema_format(given["schema"], f"{param}.schema")
        return TextFormat(
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
        return _schema_format(schema, f"{place}.schema", strict=bool(inner.get("strict")))
    if kind in ("regex", "grammar") and isinstance(given.get("pattern", given.get("grammar")), str):
        text = given.get("pattern", given.get("grammar"))
        language = languages.regex if kind == "regex" else languages.gbnf
        return TextFormat(language(text, origin=param), {"response_format": dict(given)})
    raise InputError(
        f"{param} asks for {kind!s:.40}; text, json_object and json_schema are known.", param=f"{param}.type"
    )


def _vllm_formats(given: Mapping[str, Any], prefix: str) -> list[TextFormat]:
    found: list[TextFormat] = []
    for key, value in given.items():
        if value is None or value is False:
            continue
        origin = f"{prefix}{key}"
        if key == "json":
            found.append(_schema_format(value, origin))
        elif key == "json_object":
            found.append(TextFormat(languages.any_json(origin=origin), {"structured_outputs": {key: value}}))
        elif key == "choice":
            words = value if isinstance(value, list) else [value]
            found.append(TextFormat(languages.choice(words, origin=origin), {"guided_choice": words}))
        elif key in ("regex", "grammar"):
            if not isinstance(value, str):
                raise InputError(f"{origin} must be a text.", param=origin)
            language = languages.regex if key == "regex" else languages.gbnf
            found.append(TextFormat(language(value, origin=origin), {f"guided_{key}": value}))
        elif key not in ("whitespace_pattern", "disable_any_whitespace", "disable_fallback"):
            raise InputError(f"{origin} is not known here; use json, regex, choice or grammar.", param=origin)
    return found


def _schema_format(schema: Any, origin: str, *, strict: bool = True) -> TextFormat:
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise GrammarError(f"{origin} is not JSON.", param=origin) from error
    constraint = languages.json_schema(schema, strict=strict, origin=origin)
    written = msgspec.json.encode(schema).decode()
    words = f"Answer with JSON that follows this schema, and nothing else:\n{written}"
    wire = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": strict}}
    shown = words if len(written) <= _MAX_SCHEMA_TEXT else ""
    return TextFormat(constraint, {"response_format": wire}, shown, schema)
