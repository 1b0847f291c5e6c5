"""Something that answers, and its answer: a model on this machine or one behind a server.

Law: commands ask and read text; they never see which kind it is. An answer is pulled piece by piece by one
thread, may be stopped from any, and may be redirected between two pieces: what was said stays said.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from keystroke.engine.base import Interrupt
    from keystroke.engine.generation import Finish, GenerationParams

Message = dict[str, Any]


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


class Answer(ABC):
    """Iterate for the pieces of text; `report` is complete afterwards."""

    def __init__(self) -> None:
        self.finish: Finish | None = None
        self._began = time.perf_counter()
        self._first: float | None = None
        self._ended = self._began

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces():
            self._ended = time.perf_counter()
            if piece:
                if self._first is None:
                    self._first = self._ended
                yield piece

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
    def chat(self, messages: Sequence[Message], params: GenerationParams, interrupt: Interrupt) -> Answer: ...

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

    def check_language(self, language: str | None) -> None:  # noqa: B027 - most know them all
        """Raise UnsupportedModel if this one has not learned the language."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
