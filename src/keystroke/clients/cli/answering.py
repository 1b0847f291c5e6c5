"""Something that answers, and its answer: a model on this machine or one behind a server.

Commands ask and read text; they never see which kind it is. An answer is pulled piece by piece by one
thread, may be stopped from any, and may be redirected between two pieces: what was said stays said.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from keystroke.errors import UnsupportedModel

if TYPE_CHECKING:
    from keystroke.clients.cli.console import Console
    from keystroke.engine.base import Interrupt
    from keystroke.engine.generation import Finish, GenerationParams

Message = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Report:
    """What an answer cost. A server may not say how many tokens it spent: then they are 0."""

    model: str
    finish: str
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    first_text_seconds: float = 0.0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a model that answers. `name` tells its weights from others'."""

    name: str
    parameters: int | None = None
    path: str | None = None
    chat: bool = True
    languages: frozenset[str] | None = None  # those it has learned, where its card says so


class Answer(ABC):
    """Iterate for the pieces of text; `report` is complete afterwards. Until the first piece comes, `console`
    shows what it is waiting for."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console
        self.finish: Finish | None = None
        self._began = time.perf_counter()
        self._first: float | None = None
        self._ended = self._began

    def __iter__(self) -> Iterator[str]:
        for piece in self.shown(self._pieces()):
            if piece:
                yield piece

    def shown(self, pieces: Iterator[T]) -> Iterator[T]:
        """The same pieces, with their times noted; while the first of them is awaited, how far it is."""
        if self.console is not None:
            with self.console.waiting(self.waiting):
                first = next(pieces, None)
            if first is None:
                return
            self._timed(first)
            yield first
        for piece in pieces:
            self._timed(piece)
            yield piece

    def _timed(self, piece: object) -> None:
        self._ended = time.perf_counter()
        text = getattr(piece, "text", None)  # of an engine's chunk; else the piece is text itself
        if self._first is None and (piece if text is None else text):
            self._first = self._ended

    def waiting(self) -> tuple[str, int, int] | None:
        """What the first piece waits for, how much of that is done, and of how much (0: unknown)."""
        return None

    @abstractmethod
    def _pieces(self) -> Iterator[str]: ...

    @abstractmethod
    def redirect(self, messages: Sequence[Message], line: str) -> None:
        """Go on with `line` as the next thing the user said. `messages` is the conversation so far, the part
        of this answer already given included. Called by the thread that iterates."""

    def cut(self) -> None:  # noqa: B027 - what is merely not pulled any further needs no end
        """No more will be asked of this answer."""

    @abstractmethod
    def report(self) -> Report: ...

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    @property
    def first_text_seconds(self) -> float:
        return (self._first or self._ended) - self._began


class Speaker(ABC):
    name: str

    @abstractmethod
    def chat(
        self,
        messages: Sequence[Message],
        params: GenerationParams,
        interrupt: Interrupt,
        prediction: str | None = None,
    ) -> Answer:
        """The next turn of a conversation. `prediction` is text it will probably repeat; it may make the
        answer faster and never changes it."""

    @abstractmethod
    def generate(self, prompt: str, params: GenerationParams, interrupt: Interrupt) -> Answer: ...

    @abstractmethod
    def complete(
        self,
        prefix: str,
        suffix: str,
        lines: int,
        budget: int,
        params: GenerationParams,
        interrupt: Interrupt,
    ) -> tuple[str, Report]:
        """The text to insert between `prefix` and `suffix`."""

    def check_chat(self) -> None:  # noqa: B027 - most can
        """Raise UnsupportedModel if this one cannot hold a conversation."""

    @property
    def facts(self) -> Facts:
        return Facts(self.name)

    def check_language(self, language: str | None) -> None:
        """Raise UnsupportedModel if the model's card says that it has not learned the language."""
        learned = self.facts.languages
        if learned is not None and language is not None and language not in learned:
            from keystroke.analysis.syntax import spelled  # here: trees take time to load

            known = ", ".join(sorted({spelled(name) for name in learned}))
            raise UnsupportedModel(
                f"{self.name} has learned {known} and would only babble in {language}; "
                "name another model with --model, for example one that `keystroke models add coder` brings"
            )

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
