"""How a model writes a call: the form of its chat template, detected from the template's source.

A template without tools gets them described in words, in the form of Hermes, which most models have seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from keystroke.engine.tokenizer import Tokenizer

CALL, CALL_END = "<tool_call>", "</tool_call>"
LIST = "[TOOL_CALLS]"
SPACE = r"[ \t\r\n]*"  # white space as JSON has it


@dataclass(frozen=True, slots=True)
class CallForm:
    """`before` and `after` surround the calls of one answer or, where not `listed`, each of them; `key` is
    what the arguments are called."""

    name: str
    before: str
    after: str
    key: str = "arguments"
    listed: bool = False  # all calls of an answer in one JSON list

    def marks(self, tokenizer: Tokenizer) -> tuple[str, str]:
        """`before` and `after` as terms of a grammar: control tokens where the tokenizer has them."""
        return _term(self.before, tokenizer), _term(self.after, tokenizer)


HERMES = CallForm("hermes", f"{CALL}\n", f"\n{CALL_END}")
LLAMA = CallForm("llama", "", "", key="parameters")
MISTRAL = CallForm("mistral", LIST, "", listed=True)


def call_form(source: str) -> CallForm:
    """The form of a chat template, by its source."""
    if CALL in source:
        return HERMES
    if LIST in source:
        return MISTRAL
    if "parameters" in source and ("ipython" in source or "python_tag" in source):
        return LLAMA
    return HERMES


def call_head(name: str) -> str:
    """The pattern of a JSON call up to its arguments; `name` is the pattern of a JSON string. Grammar and
    parser both read it, so that a call begins for both at the same place."""
    named = rf'\{{{SPACE}"name"{SPACE}:{SPACE}{name}'
    return rf'{named}{SPACE},{SPACE}"(?:arguments|parameters)"{SPACE}:'


def head_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Finds the head of a call of one of `names`, which is its first group, as JSON."""
    return re.compile(call_head(f"({'|'.join(re.escape(json.dumps(name)) for name in names)})"))


def _term(text: str, tokenizer: Tokenizer) -> str:
    for mark in (CALL, CALL_END, LIST):
        token = tokenizer.special(mark)
        if mark in text and token is not None:
            around = text.split(mark)
            parts = [json.dumps(around[0])] if around[0] else []
            parts.append(f"<[{token}]>")
            return " ".join([*parts, json.dumps(around[1])] if around[1] else parts)
    return json.dumps(text) if text else ""
