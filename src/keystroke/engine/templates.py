"""Renders a model's chat template. (`engine/fim.py` has the format for filling in the middle.)

Templates come with the weights and are not trusted: they run in a sandbox, in another process. Text in
messages that looks like a control token is encoded as plain text.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from keystroke.engine.checkpoint.gguf_header import GGUFArray, open_header
from keystroke.engine.fim import FimTemplate, detect_fim
from keystroke.engine.tokenizer.base import Tokenizer
from keystroke.engine.tokenizer.huggingface import read_json
from keystroke.errors import InputError, ModelDamaged
from keystroke.isolation import IsolatedFunction, LimitExceeded

__all__ = ["ChatTemplate", "FimTemplate", "detect_chat", "detect_fim", "reasoning_variables"]

Messages = Sequence[Mapping[str, Any]]

_LARGEST_TEMPLATE = 1 << 20  # characters; real ones are a few thousand
SECONDS = 5.0  # time limit of a foreign template; real ones take milliseconds
MEMORY = 512 << 20  # memory limit in bytes; the longest conversations take some tens of megabytes
_RENDER = "keystroke.engine.sandbox:render_foreign"


class ChatTemplate:
    """A jinja2 chat template in a sandbox. `foreign`: it came with a model, so that it also runs in another
    process; rendering blocks on that process, so do not call it on the event loop."""

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        clock: Callable[[], datetime] = datetime.now,
        foreign: bool = False,
    ) -> None:
        if len(source) > _LARGEST_TEMPLATE:
            raise ModelDamaged(
                f"the chat template is {len(source):,} characters long, too long for a chat template"
            )
        from keystroke.engine import sandbox  # imported here: completion needs no jinja2

        self.source = source
        self.foreign = foreign
        self._names = {"bos_token": bos, "eos_token": eos}
        self._write: Callable[[dict[str, Any]], tuple[str, str]]
        if foreign:
            sandbox.check_syntax(source)
            elsewhere = IsolatedFunction(_RENDER, seconds=SECONDS, memory=MEMORY)
            weakref.finalize(self, elsewhere.close)
            self._write = lambda variables: elsewhere.call(source, variables)
        else:
            template = sandbox.compile_template(source, clock)
            self._write = lambda variables: sandbox.render_template(template, variables)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the source, not the compiled template."""
        bos, eos = self._names["bos_token"], self._names["eos_token"]
        return partial(ChatTemplate, bos=bos, eos=eos, foreign=self.foreign), (self.source,)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text with control tokens. Raises InputError if the template refuses the
        messages, ModelDamaged if it is unsafe. For a prompt use `tokens`, which keeps messages from
        injecting control tokens."""
        values = {
            "messages": [dict(m) for m in messages],
            "tools": [dict(t) for t in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
            **self._names,
            **variables,
        }
        try:
            kind, text = self._write(values)
        except LimitExceeded:
            raise ModelDamaged(
                f"the model's chat template takes more than {SECONDS:g} s or {MEMORY >> 20} MB; "
                "use another model"
            ) from None
        if kind == "text":
            return text
        if kind == "damaged":
            raise ModelDamaged(text)
        refused = f"refuses these messages: {text}"
        wrong = f"cannot render these messages ({text})"
        raise InputError(
            f"the model's chat template {refused if kind == 'refused' else wrong}", param="messages"
        )

    def tokens(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The conversation as tokens. Control tokens only come from the template; in messages their text is
        encoded as plain text."""
        escaper = _ControlTokenEscaper(tokenizer, (messages, tools, variables))
        text = self.render(
            escaper.escape(messages),
            tools=escaper.escape(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **escaper.escape(variables),
        )
        return escaper.encode(text)

    def direct_tokens(self, tokenizer: Tokenizer, messages: Messages) -> list[int]:
        """The conversation as tokens, so that a model that can reason answers at once."""
        prompt = self.tokens(tokenizer, messages, **reasoning_variables(self.source, "none"))
        return self.without_thought(tokenizer, prompt)

    def without_thought(self, tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
        """The prompt with an empty thought, where a model that can reason would begin one."""
        think, unthink = tokenizer.special("<think>"), tokenizer.special("</think>")
        tail = prompt[-4:]
        if think is not None and unthink is not None:
            gap = tokenizer.encode("\n\n")
            if think in tail and unthink not in tail:
                return [*prompt, unthink, *gap]
            if think not in tail and "enable_thinking" in self.source:
                return [*prompt, think, *gap, unthink, *gap]
        if "<|channel|>" in self.source and tokenizer.special("<|channel|>") is not None:
            return prompt + tokenizer.encode("<|channel|>final<|message|>", special=True)
        return prompt


def reasoning_variables(source: str, effort: str | None) -> dict[str, Any]:
    """The template variables that set how much to reason; none for one that has no such choice.
    `effort`: none, minimal, low, medium, high or xhigh; None: as the template has it."""
    variables: dict[str, Any] = {}
    if effort is not None and "enable_thinking" in source:
        variables["enable_thinking"] = effort != "none"
    if effort is not None and "reasoning_effort" in source:
        known = {"medium": "medium", "high": "high", "xhigh": "high"}
        variables["reasoning_effort"] = known.get(effort, "low")
    return variables


class _ControlTokenEscaper:
    """Keeps text in messages from becoming control tokens: each look-alike is replaced by a marker of
    private-use characters that no message contains, and restored as plain text when encoding."""

    def __init__(self, tokenizer: Tokenizer, values: object) -> None:
        self._tokenizer = tokenizer
        self._hidden: list[str] = []
        self._pattern = tokenizer.special_pattern
        used = set(_characters(values))
        free = (c for c in map(chr, range(0xE000, 0xF8FF)) if c not in used)
        self._open, self._close = next(free), next(free)

    def escape(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._hide, value) if self._pattern is not None else value
        if isinstance(value, Mapping):
            return {self.escape(k): self.escape(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape(v) for v in value]
        return value

    def encode(self, text: str) -> list[int]:
        if not self._hidden:
            return self._tokenizer.encode(text, special=True)
        assert self._pattern is not None  # something was replaced
        tokens: list[int] = []
        for part in self._pattern.split(text):
            control = self._tokenizer.special(part)
            if control is not None:
                tokens.append(control)
            elif part:
                tokens.extend(self._tokenizer.encode(self._reveal(part)))
        return tokens

    def _hide(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return f"{self._open}{len(self._hidden) - 1}{self._close}"

    def _reveal(self, text: str) -> str:
        marker = f"{self._open}([0-9]+){self._close}"
        return re.sub(marker, lambda m: self._hidden[int(m[1])], text)


def _characters(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "".join(map(_characters, (*value, *value.values())))
    if isinstance(value, (list, tuple)):
        return "".join(map(_characters, value))
    return ""


# Qwen2.5-Coder's template shows a call with doubled braces by mistake, and small models copy them.
_DOUBLED = re.compile(r'\{(\{\\?"name\\?": <function-name>, \\?"arguments\\?": <args-json-object>\})\}')


def detect_chat(path: Path) -> ChatTemplate | None:
    """The chat template of a model's folder or GGUF file; None if it has none."""
    if path.is_file() and path.suffix != ".json":
        table = open_header(path).metadata
        return _make_template(
            table.get("tokenizer.chat_template"), _piece(table, "bos_token_id"), _piece(table, "eos_token_id")
        )
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "tokenizer_config.json")
    source: object = config.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelDamaged(f"{file} cannot be read; fetch it again") from error
    if isinstance(source, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return _make_template(source, _token_text(config.get("bos_token")), _token_text(config.get("eos_token")))


def _make_template(source: object, bos: str, eos: str) -> ChatTemplate | None:
    if not isinstance(source, str) or not source:
        return None
    return ChatTemplate(_DOUBLED.sub(r"\1", source), bos=bos, eos=eos, foreign=True)


def _piece(table: Mapping[str, object], key: str) -> str:
    pieces, token = table.get("tokenizer.ggml.tokens"), table.get(f"tokenizer.ggml.{key}")
    if isinstance(pieces, GGUFArray) and isinstance(token, int) and 0 <= token < len(pieces):
        return pieces.text(token)
    return ""


def _token_text(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""
