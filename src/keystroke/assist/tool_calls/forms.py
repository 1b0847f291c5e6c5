"""The forms in which models write calls: that of a chat template is detected from the template's source.

Calls are JSON between marks (Hermes, Llama, older Mistral), tags with plain values (Qwen's XML, GLM), a name
and JSON (Mistral), or messages in channels (harmony, the format of gpt-oss). A template without tools gets
them described in words, in the form of Hermes, which most models have seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keystroke.assist.tool_calls.tagged import GLM_TAGS, QWEN_TAGS, Tags
from keystroke.engine.tokenizer import Tokenizer

CALL, CALL_END = "<tool_call>", "</tool_call>"
LIST, ARGS = "[TOOL_CALLS]", "[ARGS]"
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
    tags: Tags | None = None  # of calls whose values stand between tags
    think: tuple[str, str] = ("<think>", "</think>")

    def marks(self, tokenizer: Tokenizer) -> tuple[str, str]:
        """`before` and `after` as terms of a grammar: control tokens where the tokenizer has them."""
        return _term(self.before, tokenizer), _term(self.after, tokenizer)


HERMES = CallForm("hermes", f"{CALL}\n", f"\n{CALL_END}")
LLAMA = CallForm("llama", "", "", key="parameters")
MISTRAL = CallForm("mistral", LIST, "", listed=True)
QWEN = CallForm("qwen", f"{CALL}\n", f"\n{CALL_END}", tags=QWEN_TAGS)
GLM = CallForm("glm", CALL, CALL_END, tags=GLM_TAGS)
NAMED = CallForm("mistral-named", LIST, "", think=("[THINK]", "[/THINK]"))  # [TOOL_CALLS]name[ARGS]{...}
HARMONY = CallForm("harmony", "", "")


def call_form(source: str) -> CallForm:
    """The form of a chat template, by its source."""
    if "<|channel|>" in source and "<|message|>" in source:
        return HARMONY
    if "<function=" in source and "<parameter=" in source:
        return QWEN
    if "<arg_key>" in source:
        return GLM
    if ARGS in source:
        return NAMED
    if CALL in source:
        return HERMES
    if LIST in source:
        return MISTRAL
    if "parameters" in source and ("ipython" in source or "python_tag" in source):
        return LLAMA
    return HERMES


def opens_thought(form: CallForm, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends inside of a thought, as templates of reasoning models let it."""
    think, unthink = map(tokenizer.special, form.think)
    tail = list(prompt[-4:])
    return think is not None and think in tail and unthink not in tail[tail.index(think) :]


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
