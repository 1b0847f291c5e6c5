"""A model as the rest of the program uses it: an engine with the text side that belongs to it.

A value that holds things together; it opens and closes nothing. Text becomes a prompt here, and
nowhere is the text of a special token taken for the token itself unless the caller asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # whoever only asks a model elsewhere needs none of this
    from keystroke.engine.base import Engine
    from keystroke.engine.templates import ChatTemplate, FimTemplate
    from keystroke.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """An engine with everything that turns text into its tokens and back. Closing the engine ends it."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    fim: FimTemplate | None = None
    path: Path | None = None  # where it lies; what else it has learned is said there
    draft: Engine | None = None  # a smaller model of the same vocabulary that drafts for `engine`
    languages: frozenset[str] | None = None  # those it has learned, as its card says; None: it does not say
    learned: Mapping[str, str] = field(default_factory=dict)  # what an adapter adds: see `engine.adapter`
    # Languages in which it is surer than right: only what it is very sure of is shown. One of them that it
    # has not learned is followed all the same, where the project's own text is at hand.
    conservative_languages: frozenset[str] = frozenset()

    def knows(self, language: str | None) -> bool:
        """Whether the model has learned a language; a text of no known language is taken to be one it has."""
        return self.languages is None or language is None or language in self.languages

    def prompt(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of `text` at the start of a sequence, after the model's first token if it has one."""
        lead = " " if self.tokenizer.starts_with_space and text and not text.startswith(" ") else ""
        tokens = self.tokenizer.encode(lead + text, special=special)
        first = self.tokenizer.bos
        return tokens if first is None or tokens[:1] == [first] else [first, *tokens]
