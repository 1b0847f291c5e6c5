"""Conversations as tokens of a model of this machine: whole prompts, and a line said in mid-answer.

The model's own template decides; no text is put between messages here. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keystroke.agent.chat.chat import Message
from keystroke.engine.model import Model
from keystroke.errors import UnsupportedModel

# Marks that no conversation holds: they show where a template puts the texts around a line.
_SAID, _LINE = "\ue3f0\ue3f1", "\ue3f2\ue3f3"


class Wording:
    """UnsupportedModel where a model has no chat template."""

    def __init__(self, model: Model) -> None:
        if model.chat is None:
            raise UnsupportedModel(
                f"{model.name} has no chat template, so it follows no instructions; choose another model"
            )
        self._model, self._template = model, model.chat

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), opening: str = ""
    ) -> list[int]:
        """A conversation up to where the answer begins, with the answer's own opening."""
        tokenizer = self._model.tokenizer
        tokens = self._template.tokens(tokenizer, messages, tools=list(tools) or None)
        return [*tokens, *tokenizer.encode(opening)] if opening else tokens

    def splice(self, line: str, opening: str = "") -> list[int]:
        """The tokens that end the answer under way, say `line`, and open the next answer."""
        shown = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _SAID},
            {"role": "user", "content": _LINE},
        ]
        _, _, after = self._template.render(shown).rpartition(_SAID)
        before, found, behind = after.partition(_LINE)
        if not found:
            raise UnsupportedModel(
                f"the chat template of {self._model.name} cannot take a line in mid-answer; stop it first"
            )
        encode = self._model.tokenizer.encode
        return [*encode(before, special=True), *encode(line), *encode(behind, special=True), *encode(opening)]
