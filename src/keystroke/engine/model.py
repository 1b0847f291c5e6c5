"""A model as the rest of the program uses it: an engine with the text side that belongs to it.

Text is turned into prompt tokens here. Text that looks like a special token stays text unless the caller
asks for special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not needed to use a remote model
    from keystroke.engine.base import Engine
    from keystroke.engine.templates import ChatTemplate, FimTemplate
    from keystroke.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """An engine with its tokenizer and templates. Whoever loads it closes it."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    fim: FimTemplate | None = None
    path: Path | None = None  # the GGUF file or folder
    draft: Engine | None = None  # a smaller model of the same vocabulary that drafts for `engine`
    languages: frozenset[str] | None = None  # those it was trained on, from its card; None: not stated
    adapter_facts: Mapping[str, str] = field(default_factory=dict)  # metadata of its adapter
    # Languages in which it is surer than right: only what it is very sure of is shown. One of them that it
    # has not learned is followed all the same, where the project's own text is at hand.
    conservative_languages: frozenset[str] = frozenset()

    def close(self) -> None:
        """Close the engine, and that of the drafts. Idempotent."""
        self.engine.close()
        if self.draft is not None:
            self.draft.close()

    def supports_language(self, language: str | None) -> bool:
        """Whether the model was trained on a language. True if either is unknown."""
        return self.languages is None or language is None or language in self.languages

    def prompt(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of `text` at the start of a sequence, after the model's first token if it has one."""
        lead = " " if self.tokenizer.starts_with_space and text and not text.startswith(" ") else ""
        tokens = self.tokenizer.encode(lead + text, special=special)
        first = self.tokenizer.bos
        return tokens if first is None or tokens[:1] == [first] else [first, *tokens]
