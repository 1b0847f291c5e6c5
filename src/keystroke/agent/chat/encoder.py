"""Conversations as tokens of a local model: whole prompts, and a line inserted in mid-answer.

The model's own chat template decides what stands between messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keystroke.agent.chat.model import no_chat_template
from keystroke.agent.chat.steering import Message
from keystroke.engine.model import Model
from keystroke.errors import UnsupportedModel

# Markers that no conversation contains: they show where a template puts the texts around a line.
_ANSWER, _LINE = "\ue3f0\ue3f1", "\ue3f2\ue3f3"


class ConversationEncoder:
    """Raises UnsupportedModel where the model has no chat template."""

    def __init__(self, model: Model) -> None:
        if model.chat is None:
            raise UnsupportedModel(no_chat_template(model.name))
        self._model, self._template = model, model.chat

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), opening: str = ""
    ) -> list[int]:
        """A conversation up to where the answer begins, followed by the answer's `opening`."""
        tokenizer = self._model.tokenizer
        tokens = self._template.tokens(tokenizer, messages, tools=list(tools) or None)
        return [*tokens, *tokenizer.encode(opening)] if opening else tokens

    def encode_interjection(self, line: str, opening: str = "") -> list[int]:
        """The tokens that end the current answer, add `line` as a user message, and open the next answer."""
        messages = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": _LINE},
        ]
        _, _, after = self._template.render(messages).rpartition(_ANSWER)
        before, found, behind = after.partition(_LINE)
        if not found:
            raise UnsupportedModel(
                f"the chat template of {self._model.name} cannot take a line in mid-answer; stop it first"
            )
        encode = self._model.tokenizer.encode
        return [*encode(before, special=True), *encode(line), *encode(behind, special=True), *encode(opening)]
