"""The grammar of an answer that may call tools.

It allows any text until a call begins, then that call in the form of the model's chat template; or only
calls, where the caller requires them. Bare or fenced JSON calls are constrained too, where calls are JSON. A
value between tags ends at its closing tag; on lines of its own, only a line that is nothing else closes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from keystroke.assist.tool_calls.forms import ARGS, HARMONY, NAMED, SPACE, CallForm, call_head
from keystroke.assist.tool_calls.harmony import harmony_rules
from keystroke.assist.tool_calls.seen import quoted_lines_term
from keystroke.assist.tool_calls.tools import ShownTool, Toolset
from keystroke.assist.tool_calls.usable import ToolConstraints, must_edit_next, must_read_first, usable_tools
from keystroke.engine.grammar.constraint import Constraint, FreeText, json_schema, regex_as_lark
from keystroke.engine.grammar.json_strings import escape_grammar
from keystroke.engine.tokenizer import Tokenizer

_KEY = rf'/{SPACE},{SPACE}"(arguments|parameters)"{SPACE}:{SPACE}/'
# In free text: all of it may yet be a bare call; its end may yet be the head of one.
_OPENING = rf"{SPACE}`{{0,2}}(?:```[json]{{0,4}}{SPACE})?(?:\{{.*)?"
_PENDING = rf'\{{{SPACE}(?:"(?:n(?:a(?:m(?:e(?:".*)?)?)?)?)?)?\Z'
_BARE = rf'/{SPACE}(```(json)?{SPACE})?\{{{SPACE}"name"{SPACE}:{SPACE}"/'


def calls_constraint(
    toolset: Toolset,
    form: CallForm,
    tokenizer: Tokenizer,
    bounds: ToolConstraints = ToolConstraints(),  # noqa: B008 - immutable
    *,
    required: bool = False,
    parallel: bool = True,
    answer: Constraint | None = None,
) -> Constraint:
    """The constraint of an answer, given the tools. `bounds`: what the conversation implies for them.
    `required`: only calls are allowed. `answer`: the constraint of text that is not a call. Raises
    GrammarError where a schema or a tool's own grammar cannot be enforced."""
    writer = _Writer(form, tokenizer, bounds)
    look = must_read_first(toolset, bounds) or must_edit_next(toolset, bounds)
    usable = usable_tools(toolset, replace(bounds, closed=bounds.closed and not required))
    for shown in usable.shown:
        writer.add(shown)
    if toolset.short:
        writer.forbid([s.name for s in toolset.shown if usable.find(s.name) is None])
    if not usable.shown:
        return answer if answer is not None else writer.write_words_only()
    if form is HARMONY:
        writer.write_channels(parallel, answer, required)
    elif required or look or answer is not None:
        writer.write_calls_only(parallel and not look, answer, required or look)
    else:
        writer.write_calls_in_text(parallel)
    return writer.constraint()


class _Writer:
    """Writes the rules. `arguments_N` is what the Nth tool takes."""

    def __init__(self, form: CallForm, tokenizer: Tokenizer, bounds: ToolConstraints) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._seen = tuple(bounds.seen_lines)
        self._written = tuple(bounds.written)
        self._names: list[str] = []
        self._rules: list[str] = []
        self._parts: list[dict[str, Any]] = []
        self._free: FreeText | None = None
        self._exclusion = ""  # what free text may not hold

    def constraint(self) -> Constraint:
        top = {"name": "answer", "lark_grammar": "\n".join(["%llguidance {}", *self._rules, ""])}
        return Constraint(tuple(map(json.dumps, [top, *self._parts])), "tools", self._free)

    # Tools

    def add(self, shown: ShownTool) -> None:
        written = self._arguments_term if self._form.tags is None else self._parameters_term
        self._rules.append(f"arguments_{len(self._names)}: {written(shown)}")
        self._names.append(shown.name)

    def forbid(self, names: Sequence[str]) -> None:
        """Forbid calls of these tools; text that begins such a call is excluded too."""
        if names:
            closed = "|".join(_escape_pattern(json.dumps(name)) for name in names)
            self._exclusion = rf" & ~/(?s:.*)\{{{SPACE}\"name\"{SPACE}:{SPACE}({closed})(?s:.*)/"

    def _arguments_term(self, shown: ShownTool) -> str:
        tool, number = shown.tool, len(self._names)
        written = self._own_grammar(shown)
        if written is not None:
            inside = escape_grammar(written, f"tool {tool.name}")
            self._parts.append({"name": f"input_{number}", "lark_grammar": inside})
            return f"{_quote('{' + json.dumps('input') + ': ' + QUOTE)} @input_{number} {_quote(QUOTE + '}')}"
        if (shown.grounded and self._seen) or (shown.is_edit and self._written):
            return self._ordered_term(shown, number)
        # Arguments are an object, also where a schema does not state it.
        return self._schema_term(
            {**shown.parameters, "type": "object"}, f"schema_{number}", tool.strict, tool.name
        )

    def _own_grammar(self, shown: ShownTool) -> str | None:
        """The Lark grammar of a custom tool's input; None where it has none."""
        tool = shown.tool
        if not tool.custom or shown.is_edit or tool.grammar is None:
            return None
        syntax, text = tool.grammar
        return text if syntax == "lark" else regex_as_lark(text, origin=f"tool {tool.name}")

    def _ordered_term(self, shown: ShownTool, number: int) -> str:
        """Parameters in order: those that must quote consist of lines that were seen, and the path of an edit
        is none that was written."""
        terms: list[str] = []
        for place, (name, schema) in enumerate(shown.properties.items()):
            lead = ("{" if place == 0 else ", ") + json.dumps(name) + ": "
            if name in shown.grounded:
                terms.append(f"{_quote(lead + QUOTE)} SEEN {_quote(QUOTE)}")
            elif name == "path" and shown.is_edit and self._written and "enum" not in schema:
                terms.append(f"{_quote(lead + QUOTE)} FRESH {_quote(QUOTE)}")
            else:
                inner = self._schema_term(schema, f"schema_{number}_{place}", False, shown.name)
                terms.append(f"{_quote(lead)} {inner}")
        if shown.grounded and not any(rule.startswith("SEEN:") for rule in self._rules):
            # Blank lines alone do not identify a place.
            self._rules += [f"LINES: {quoted_lines_term(self._seen)}", r"SEEN: LINES & ~/(\\[nrt]| )*/"]
        if self._written and not any(rule.startswith("FRESH:") for rule in self._rules):
            barred = "|".join(_path_pattern(path) for path in self._written)
            self._rules.append(rf'FRESH: /[^"\\\x00-\x1f]+/ & ~/{barred}/')
        return " ".join([*terms, _quote("}")])

    def _parameters_term(self, shown: ShownTool) -> str:
        """Values between tags, in the order of the schema."""
        tags, tool, number = self._form.tags, shown.tool, len(self._names)
        assert tags is not None
        if not any(rule.startswith("value_end") for rule in self._rules):
            closing = self._mark_term(tags.closing)
            if tags.on_lines:
                self._rules += [
                    rf"text_value[lazy]: /(?s:.*)\n{_escape_pattern(tags.closing)}\n/",
                    f'value_end: "\\n" {closing} "\\n"',
                ]
            elif closing.startswith("<["):
                self._rules += [f"text_value: /(?s:.*)/ {closing}", f"value_end: {closing}"]
            else:
                self._rules += [
                    rf"text_value[lazy]: /(?s:.*){_escape_pattern(tags.closing)}/",
                    f"value_end: {closing}",
                ]
        required = shown.parameters.get("required") or ()
        terms: list[str] = []
        for place, (name, schema) in enumerate(shown.properties.items()):
            if self._form.name == "qwen":
                opening = _quote(f"<parameter={name}>{LINE}")
            else:
                key, key_end, value = map(self._mark_term, ("<arg_key>", "</arg_key>", "<arg_value>"))
                opening = f"/{SPACE}/ {key} {_quote(name)} {key_end} /{SPACE}/ {value}"
            kind = schema.get("type") if isinstance(schema, Mapping) else None
            words = schema.get("enum") if isinstance(schema, Mapping) else None
            if (written := self._own_grammar(shown)) is not None:
                self._parts.append({"name": f"input_{number}", "lark_grammar": written})
                value_term = f"@input_{number} value_end"
            elif isinstance(words, list) and words and all(isinstance(w, str) for w in words):
                value_term = f"({' | '.join(map(_quote, words))}) value_end"
            elif kind in (None, "string"):
                value_term = "text_value"
            else:
                inner = self._schema_term(schema, f"schema_{number}_{place}", tool.strict, tool.name)
                value_term = f"{inner} value_end"
            is_needed = name in required or tool.custom
            terms.append(f"{opening} {value_term}" if is_needed else f"({opening} {value_term})?")
        return " ".join(terms) or '""'

    def _mark_term(self, text: str) -> str:
        """A mark as a term: a control token where the tokenizer has it."""
        token = self._tokenizer.special(text)
        return _quote(text) if token is None else f"<[{token}]>"

    def _schema_term(self, schema: Mapping[str, Any], name: str, strict: bool, tool: str) -> str:
        constraint = json_schema(schema, strict=strict, origin=f"tool {tool}")
        self._parts.append({**json.loads(constraint.parts[0]), "name": name})
        return f"@{name}"

    # Answers

    def write_words_only(self) -> Constraint:
        """One line of a sentence or two: a model that may not call a tool would otherwise write its calls as
        examples."""
        self._rules.append(r"start: /[^\s{}`<>*\[\]][^\n{}`<>*]{0,300}/")
        return self.constraint()

    def write_channels(self, parallel: bool, answer: Constraint | None, required: bool) -> None:
        """An answer in harmony's channels."""
        options = "" if answer is None else self._answer_term(answer)
        self._rules += harmony_rules(
            self._tokenizer, self._names, required=required, parallel=parallel, answer=options
        )

    def write_calls_only(self, parallel: bool, answer: Constraint | None, required: bool) -> None:
        """Nothing but calls; or, with `answer` and not `required`, a text of its language."""
        options = ["calls"]
        if answer is not None and not required:
            options.append(self._answer_term(answer))
        thought = self._thought_term("/(?s:.*)/", r" /[ \n]*/")
        before, after = self._form.marks(self._tokenizer)
        if self._form.listed:
            more = f" ({_quote(', ')} call)*" if parallel else ""
            self._rules.append(f"calls: {before} {_quote('[')} call{more} {_quote(']')} {after}")
        else:
            self._rules.append(f"block: {before} call {after}")
            more = f" ({_quote(LINE)} block)*" if parallel and self._form.before else ""
            self._rules.append(f"calls: block{more}")
        self._rules += [self._call_rule(), f"start: {thought}({' | '.join(options)})"]

    def _answer_term(self, answer: Constraint) -> str:
        """The term of a text that is no call."""
        first, *rest = map(json.loads, answer.parts)
        self._parts += [{**first, "name": "answer_text"}, *rest]
        return "@answer_text"

    def write_calls_in_text(self, parallel: bool) -> None:
        """Any text; where a call begins, that call."""
        if self._form.tags is not None or self._form is NAMED:
            self._write_marked_calls(parallel)
            return
        pieces = [f"loose_{number}" for number in range(len(self._names))]
        if self._form.before:
            pieces.insert(0, self._marked_call_term())
        for number, name in enumerate(self._names):
            head = call_head(_escape_pattern(json.dumps(name)))
            self._rules.append(f"head_{number}[lazy]: /(?s:.*){head}/{self._exclusion}")
            self._rules.append(f"loose_{number}: head_{number} SPACE arguments_{number} BRACE")
        # Bare or fenced JSON at the very beginning is a call: it must name a tool on offer.
        named = [f"({_quote(n + QUOTE)} KEY arguments_{i} BRACE)" for i, n in enumerate(self._names)]
        self._rules += [
            f"opened[lazy]: {_BARE}",
            f"unmarked: opened ({' | '.join(named)})",
            f"piece: {' | '.join(pieces)}",
            self._call_rule(),
            f"KEY: {_KEY}",
            f"SPACE: /{SPACE}/",
            rf"BRACE: /{SPACE}\}}/",
            f"END: /{SPACE}(```)?{SPACE}/",
            f"TEXT: /(?s:.*)/{self._exclusion}",
        ]
        mark = self._form.before.strip()
        kind = (self._form.name, str(parallel), str(self._tokenizer.special(mark)), *self._names)
        pending = f"{_PENDING}|{_beginnings_pattern(mark)}" if mark else _PENDING
        self._free = FreeText(kind, _OPENING, pending, b'"name')  # no token holds a whole head and more
        alone = "unmarked END | piece END | TEXT"
        self._rules.append("start: unmarked? piece* TEXT" if parallel else f"start: {alone}")

    def _write_marked_calls(self, parallel: bool) -> None:
        """Any text; after the form's mark, a call."""
        thought = self._thought_term("TEXT")
        self._rules += [
            f"piece: {self._marked_call_term()}",
            self._call_rule(),
            f"SPACE: /{SPACE}/",
            f"TEXT: /(?s:.*)/{self._exclusion}",
            f"start: {thought}piece* TEXT" if parallel else f"start: {thought}(piece SPACE | TEXT)",
        ]

    def _thought_term(self, text: str, space: str = "") -> str:
        """A thought of `text` before the answer, which the prompt may have opened."""
        think, unthink = map(self._tokenizer.special, self._form.think)
        if think is None or unthink is None:
            return ""
        self._rules.append(f"thought: <[{think}]>? {text} <[{unthink}]>{space}")
        return "thought? "

    def _marked_call_term(self) -> str:
        """A call after its mark, which is a control token where the tokenizer has one."""
        mark, closing = self._form.before.strip(), self._form.after.strip()
        token, closed = self._tokenizer.special(mark), self._tokenizer.special(closing)
        if token is None:
            self._rules.append(f"marked[lazy]: /(?s:.*){_escape_pattern(mark)}/{self._exclusion}")
        else:
            self._rules.append(f"marked: TEXT <[{token}]>")
        if self._form is NAMED:
            return "marked call"
        if self._form.listed:
            return f"marked SPACE {_quote('[')} call ({_quote(', ')} call)* {_quote(']')}"
        return f"marked SPACE call SPACE {_quote(closing) if closed is None else f'<[{closed}]>'}"

    def _call_rule(self) -> str:
        """One call in the template's own form."""
        each = []
        for number, name in enumerate(self._names):
            if self._form.name == "qwen":
                lead, end = _quote(f"<function={name}>{LINE}"), _quote("</function>")
            elif self._form.tags is not None:
                lead, end = _quote(name), f"/{SPACE}/"
            elif self._form is NAMED:
                lead, end = f"{_quote(name)} {self._mark_term(ARGS)}", ""
            else:
                lead, end = _quote(f'{{"name": {json.dumps(name)}, "{self._form.key}": '), _quote("}")
            each.append(f"({lead} arguments_{number} {end})")
        return f"call: {' | '.join(each)}"


QUOTE, LINE = '"', "\n"


def _quote(text: str) -> str:
    return json.dumps(text)


def _beginnings_pattern(mark: str) -> str:
    """The pattern of a text's end that may be the beginning of `mark`, or all of it and more."""
    parts = [re.escape(mark[:length]) for length in range(1, len(mark))]
    return rf"(?:{'|'.join(reversed(parts))})\Z|{re.escape(mark)}.*\Z"


def _path_pattern(path: str) -> str:
    """The pattern of all paths that name the same file as `path`."""
    named = _escape_pattern(path.removeprefix("./"))
    if not path.startswith("/"):
        return rf"(.*\/)?{named}"
    parts = path.strip("/").split("/")
    return "|".join(
        [named, *(rf"(\.\/)?{_escape_pattern('/'.join(parts[n:]))}" for n in range(1, len(parts)))]
    )


def _escape_pattern(text: str) -> str:
    """A text as it stands in a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")
