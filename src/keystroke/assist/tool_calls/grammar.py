"""The grammar of an answer that may call tools.

Law: says what a model may write, in the form its template was made for: any text until a call begins, then
that call and nothing else; or calls alone, where the caller requires them. A call begun in another common
form (bare or fenced JSON) is held to its arguments too. Knows no wire.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keystroke.assist.tool_calls.forms import SPACE, CallForm, call_head
from keystroke.assist.tool_calls.seen import within_quotes
from keystroke.assist.tool_calls.tools import Shown, Toolset
from keystroke.engine.grammar.constraint import Constraint, json_schema, regex_as_lark
from keystroke.engine.grammar.json_strings import in_json_string
from keystroke.engine.tokenizer import Tokenizer

_DELETES = re.compile(r"\b(delet|remov|eras|drop|rm\b|get rid)", re.IGNORECASE)
_KEY = rf'/{SPACE},{SPACE}"(arguments|parameters)"{SPACE}:{SPACE}/'
_BARE = rf'/{SPACE}(```(json)?{SPACE})?\{{{SPACE}"name"{SPACE}:{SPACE}"/'


def calls_constraint(
    toolset: Toolset,
    form: CallForm,
    tokenizer: Tokenizer,
    *,
    required: bool = False,
    parallel: bool = True,
    only: Collection[str] | None = None,
    seen: Sequence[str] = (),
    asked: str = "",
    spent: Collection[str] = (),
    answer: Constraint | None = None,
) -> Constraint:
    """What an answer may be, given the tools. `required`: nothing but calls. `only`: of these tools, by the
    names they were offered under. `seen`: lines that grounded parameters may quote. `spent`: tools that led
    nowhere. `answer`: what text that is no call must be. Raises GrammarError where a schema or a tool's own
    grammar cannot be enforced."""
    writer = _Writer(form, tokenizer, tuple(seen))
    for shown in usable_tools(toolset, only=only, seen=seen, asked=asked, spent=spent).shown:
        writer.add(shown)
    if required or answer is not None:
        writer.calls_alone(parallel, answer, required)
    else:
        writer.calls_in_text(parallel)
    return writer.constraint()


def usable_tools(
    toolset: Toolset,
    *,
    only: Collection[str] | None = None,
    seen: Sequence[str] = (),
    asked: str = "",
    spent: Collection[str] = (),
) -> Toolset:
    """Of the tools that a model is shown, those that the constraint with the same arguments lets it call."""
    allowed = tuple(s for s in toolset.shown if only is None or s.tool.name in only)
    usable = tuple(s for s in allowed if _usable(s, seen, asked))
    fresh = tuple(s for s in usable if s.tool.name not in spent)
    return replace(toolset, shown=fresh or usable or allowed)


def _usable(shown: Shown, seen: Sequence[str], asked: str) -> bool:
    """Lines nobody has read cannot be replaced; a file is deleted where the user speaks of that."""
    if shown.grounded and not seen:
        return False
    return not (shown.is_edit and shown.name == "delete_file") or bool(_DELETES.search(asked))


class _Writer:
    """Writes the rules. `arguments_N` is what the Nth tool takes."""

    def __init__(self, form: CallForm, tokenizer: Tokenizer, seen: tuple[str, ...]) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._seen = seen
        self._names: list[str] = []
        self._rules: list[str] = []
        self._parts: list[dict[str, Any]] = []

    def constraint(self) -> Constraint:
        top = {"name": "answer", "lark_grammar": "\n".join(["%llguidance {}", *self._rules, ""])}
        return Constraint(tuple(map(json.dumps, [top, *self._parts])), "tools")

    # Tools

    def add(self, shown: Shown) -> None:
        self._rules.append(f"arguments_{len(self._names)}: {self._arguments(shown)}")
        self._names.append(shown.name)

    def _arguments(self, shown: Shown) -> str:
        tool, number = shown.tool, len(self._names)
        if tool.custom and not shown.is_edit and tool.grammar is not None:
            syntax, text = tool.grammar
            written = text if syntax == "lark" else regex_as_lark(text, origin=f"tool {tool.name}")
            inside = in_json_string(written, f"tool {tool.name}")
            self._parts.append({"name": f"input_{number}", "lark_grammar": inside})
            return f"{_text('{' + json.dumps('input') + ': ' + QUOTE)} @input_{number} {_text(QUOTE + '}')}"
        if shown.grounded and self._seen:
            return self._grounded(shown, number)
        # Arguments are an object, whatever a schema forgets to say.
        return self._schema(
            {**shown.parameters, "type": "object"}, f"schema_{number}", tool.strict, tool.name
        )

    def _grounded(self, shown: Shown, number: int) -> str:
        """Parameters in order, those that quote made of lines that were seen."""
        terms: list[str] = []
        for place, (name, schema) in enumerate(shown.parameters["properties"].items()):
            lead = ("{" if place == 0 else ", ") + json.dumps(name) + ": "
            if name in shown.grounded:
                terms.append(f"{_text(lead + QUOTE)} SEEN {_text(QUOTE)}")
            else:
                inner = self._schema(schema, f"schema_{number}_{place}", False, shown.name)
                terms.append(f"{_text(lead)} {inner}")
        if not any(rule.startswith("SEEN:") for rule in self._rules):
            self._rules += [f"LINES: {within_quotes(self._seen)}", r"SEEN: LINES & /(?s:.+)/"]
        return " ".join([*terms, _text("}")])

    def _schema(self, schema: Mapping[str, Any], name: str, strict: bool, tool: str) -> str:
        made = json_schema(schema, strict=strict, origin=f"tool {tool}")
        self._parts.append({**json.loads(made.parts[0]), "name": name})
        return f"@{name}"

    # Answers

    def calls_alone(self, parallel: bool, answer: Constraint | None, required: bool) -> None:
        """Nothing but calls; or, with `answer` and not `required`, a text of its language."""
        said = ["calls"]
        if answer is not None and not required:
            said.append("@answer_text")
            first, *rest = map(json.loads, answer.parts)
            self._parts += [{**first, "name": "answer_text"}, *rest]
        think, unthink = self._tokenizer.special("<think>"), self._tokenizer.special("</think>")
        thought = ""
        if think is not None and unthink is not None:
            thought = "thought? "
            self._rules.append(rf"thought: <[{think}]> /(?s:.*)/ <[{unthink}]> /[ \n]*/")
        before, after = self._form.marks(self._tokenizer)
        if self._form.listed:
            more = f" ({_text(', ')} call)*" if parallel else ""
            self._rules.append(f"calls: {before} {_text('[')} call{more} {_text(']')} {after}")
        else:
            self._rules.append(f"block: {before} call {after}")
            more = f" ({_text(LINE)} block)*" if parallel and self._form.before else ""
            self._rules.append(f"calls: block{more}")
        self._rules += [self._call(), f"start: {thought}({' | '.join(said)})"]

    def calls_in_text(self, parallel: bool) -> None:
        """Any text; where a call begins, that call."""
        pieces = [f"loose_{number}" for number in range(len(self._names))]
        if self._form.before:
            pieces.insert(0, self._marked())
        for number, name in enumerate(self._names):
            self._rules.append(f"head_{number}[lazy]: /(?s:.*){call_head(_pattern(json.dumps(name)))}/")
            self._rules.append(f"loose_{number}: head_{number} SPACE arguments_{number} BRACE")
        # Bare or fenced JSON at the very beginning is a call: it must name a tool on offer.
        named = [f"({_text(n + QUOTE)} KEY arguments_{i} BRACE)" for i, n in enumerate(self._names)]
        self._rules += [
            f"opened[lazy]: {_BARE}",
            f"unmarked: opened ({' | '.join(named)})",
            f"piece: {' | '.join(pieces)}",
            self._call(),
            f"KEY: {_KEY}",
            f"SPACE: /{SPACE}/",
            rf"BRACE: /{SPACE}\}}/",
            f"END: /{SPACE}(```)?{SPACE}/",
            r"TEXT: /(?s:.*)/",
        ]
        alone = "unmarked END | piece END | TEXT"
        self._rules.append("start: unmarked? piece* TEXT" if parallel else f"start: {alone}")

    def _marked(self) -> str:
        """A call behind its mark, which is a control token where the tokenizer has one."""
        mark, closing = self._form.before.strip(), self._form.after.strip()
        token, closed = self._tokenizer.special(mark), self._tokenizer.special(closing)
        if token is None:
            self._rules.append(f"marked[lazy]: /(?s:.*){_pattern(mark)}/")
        else:
            self._rules.append(f"marked: TEXT <[{token}]>")
        if self._form.listed:
            return f"marked SPACE {_text('[')} call ({_text(', ')} call)* {_text(']')}"
        return f"marked SPACE call SPACE {_text(closing) if closed is None else f'<[{closed}]>'}"

    def _call(self) -> str:
        """One call in the template's own form."""
        each = []
        for number, name in enumerate(self._names):
            lead = f'{{"name": {json.dumps(name)}, "{self._form.key}": '
            each.append(f"({_text(lead)} arguments_{number} {_text('}')})")
        return f"call: {' | '.join(each)}"


QUOTE, LINE = '"', "\n"


def _text(text: str) -> str:
    return json.dumps(text)


def _pattern(text: str) -> str:
    """A text as it stands in a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")
