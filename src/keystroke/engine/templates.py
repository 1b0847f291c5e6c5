"""How a model wants to be spoken to: its chat template. (`engine/fim.py` has its other format.)

Law: templates come with the weights and are not trusted: they run in a sandbox, and whatever they do wrong
becomes one sentence. What users write goes between control tokens, never into them: text that looks like a
control token stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from keystroke.engine.checkpoint.gguf_header import Array, open_header
from keystroke.engine.fim import FimTemplate, detect_fim
from keystroke.engine.tokenizer.base import Tokenizer
from keystroke.engine.tokenizer.huggingface import read_json
from keystroke.errors import InputError, ModelDamaged

__all__ = ["ChatTemplate", "FimTemplate", "detect_chat", "detect_fim"]

Messages = Sequence[Mapping[str, Any]]

_LARGEST_TEMPLATE = 1 << 20  # characters; real ones are a few thousand


class ChatTemplate:
    """A jinja2 chat template, in a sandbox."""

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", clock: Callable[[], datetime] = datetime.now
    ) -> None:
        if len(source) > _LARGEST_TEMPLATE:
            raise ModelDamaged(
                f"the chat template is {len(source):,} characters long; that is no chat template"
            )
        from keystroke.engine.sandbox import compiled  # here: a model that only completes needs no jinja2

        self.source = source
        self._names = {"bos_token": bos, "eos_token": eos}
        helpers = {"raise_exception": _refuse, "strftime_now": lambda form: clock().strftime(form)}
        self._template = compiled(source, {"tojson": _tojson}, helpers)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as one text, control tokens included. Raises InputError where the template
        refuses the messages. To make a prompt use `tokens`, which keeps users' text out of the controls."""
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=[dict(t) for t in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                **self._names,
                **variables,
            )
        except RefusalError as refusal:
            raise InputError(
                f"the model's chat template refuses these messages: {refusal}", param="messages"
            ) from None
        except ModelDamaged:
            raise
        except Exception as error:  # a template is foreign code: it can raise anything
            raise InputError(
                f"the model's chat template cannot render these messages ({type(error).__name__}: {error})",
                param="messages",
            ) from error

    def tokens(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """The conversation as tokens. Control tokens come from the template alone: where a message holds
        the text of one, that text is encoded as text."""
        veil = _Veil(tokenizer, (messages, tools, variables))
        text = self.render(
            veil.cover(messages),
            tools=veil.cover(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **veil.cover(variables),
        )
        return veil.encode(text)


class RefusalError(Exception):
    """Raised by a template through `raise_exception`."""


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


class _Veil:
    """Keeps control-token look-alikes in messages from becoming control tokens: each is swapped for a marker
    of private-use characters that no message holds, and put back as plain text when encoding."""

    def __init__(self, tokenizer: Tokenizer, values: object) -> None:
        self._tokenizer = tokenizer
        self._hidden: list[str] = []
        self._pattern = tokenizer.special_pattern
        used = set(_characters(values))
        free = (c for c in map(chr, range(0xE000, 0xF8FF)) if c not in used)
        self._open, self._close = next(free), next(free)

    def cover(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._hide, value) if self._pattern is not None else value
        if isinstance(value, Mapping):
            return {self.cover(k): self.cover(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.cover(v) for v in value]
        return value

    def encode(self, text: str) -> list[int]:
        if not self._hidden:
            return self._tokenizer.encode(text, special=True)
        assert self._pattern is not None  # something was hidden
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


def detect_chat(path: Path) -> ChatTemplate | None:
    """The chat template that comes with a model's folder or GGUF file, or None."""
    if path.is_file() and path.suffix != ".json":
        table = open_header(path).metadata
        return _chat(
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
    return _chat(source, _token_text(config.get("bos_token")), _token_text(config.get("eos_token")))


def _chat(source: object, bos: str, eos: str) -> ChatTemplate | None:
    return ChatTemplate(source, bos=bos, eos=eos) if isinstance(source, str) and source else None


def _piece(table: Mapping[str, object], key: str) -> str:
    pieces, token = table.get("tokenizer.ggml.tokens"), table.get(f"tokenizer.ggml.{key}")
    if isinstance(pieces, Array) and isinstance(token, int) and 0 <= token < len(pieces):
        return pieces.text(token)
    return ""


def _token_text(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""
