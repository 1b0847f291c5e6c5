"""How a worker guesses on: in the target's own tokens, in text, or by asking a server.

One object for one sequence. It knows what the target has said and what it guessed beyond, and takes the
guess back to where the target said otherwise. It knows nothing of processes or pipes.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace

from keystroke.engine.base import GREEDY, Interrupt, Sampling
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.remote.blocking import BlockingModel
from keystroke.engine.remote.wire import StreamItem
from keystroke.engine.speculative.worker_messages import Piece, Told
from keystroke.engine.tokenizer.incremental import IncrementalEncoder
from keystroke.errors import KeystrokeError

ASKED = 32  # tokens that a server is asked for at a time
UNKNOWN = 0.85  # the chance of a piece whose model does not tell it; what comes true is learned


class Guessing(ABC):
    """One sequence: what the target said, and the guess that goes on from there."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.branch = 0
        self.ended = False  # nothing follows on this branch

    @property
    @abstractmethod
    def ahead(self) -> int:
        """Pieces guessed beyond what the target said."""

    @abstractmethod
    def told(self, said: Told) -> None: ...

    @abstractmethod
    def piece(self, sequence: int, interrupt: Interrupt) -> Piece:
        """Guess one piece more. Raises Interrupted, leaving all as it was, and what the engine raises."""

    @abstractmethod
    def close(self) -> None: ...

    def _astray(self) -> None:
        """The target said otherwise: another branch begins."""
        self.branch += 1
        self.ended = False


class TokenGuess(Guessing):
    """For a target with the same vocabulary: chooses with its noise, at its positions."""

    def __init__(self, model: Model, prompt: list[int], sampling: Sampling, room: int) -> None:
        super().__init__(room)
        self._session = model.engine.session()
        self._eos = model.engine.info.eos
        self._sampling = replace(sampling, logprobs=0)
        self._truth, self._prompt = list(prompt), len(prompt)
        self._own: list[int] = []

    @property
    def ahead(self) -> int:
        return len(self._own)

    def told(self, said: Told) -> None:
        new = said.tokens
        if self._own[: len(new)] == new:
            del self._own[: len(new)]
        else:
            self._own = []
            self._astray()
        self._truth += new

    def piece(self, sequence: int, interrupt: Interrupt) -> Piece:
        wanted = [*self._truth, *self._own]
        if self._session.tokens != wanted:
            self._session.extend(wanted, interrupt)
        started = time.perf_counter()
        step = self._session.step((), self._sampling, interrupt)
        seconds = time.perf_counter() - started
        token = step.tokens[0]
        self._own.append(token)
        self.ended = token in self._eos
        at, chance = len(wanted) - self._prompt, math.exp(step.logprobs[0].logprob)
        return Piece(sequence, self.branch, at, token, b"", chance, seconds, self.ended)

    def close(self) -> None:
        self._session.close()


class _Text(Guessing):
    """What guesses of text have in common: the answer so far, and the guess behind it, in bytes."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._truth = b""
        self._text = b""  # the truth, and the guess beyond it
        self._ends: list[int] = []  # where each guessed piece ends

    @property
    def ahead(self) -> int:
        return sum(end > len(self._truth) for end in self._ends)

    def told(self, said: Told) -> None:
        self._truth += said.text
        if not self._text.startswith(self._truth):
            self._astray()
            self._follow()

    @abstractmethod
    def _follow(self) -> None:
        """Take the guess back: `_text` becomes what is whole of the truth."""

    def _guessed(self, sequence: int, text: bytes, chance: float, seconds: float) -> Piece:
        at = len(self._text)
        self._text += text
        self._ends.append(len(self._text))
        return Piece(sequence, self.branch, at, None, text, chance, seconds, self.ended)


class TextGuess(_Text):
    """For a target that cuts text into other tokens. What the target said is cut anew as this model would cut
    it; of a prompt longer than half the context the nearest part is read."""

    def __init__(self, model: Model, before: str, after: str | None, room: int) -> None:
        super().__init__(room)
        self._model = model
        self._session = model.engine.session()
        self._context = model.engine.info.context_length
        self._eos = model.engine.info.eos | (model.fim.stops if model.fim is not None else frozenset())
        self._base = self._prompt(before, after)
        self._cut = 0  # bytes of the truth that have become part of the base
        self._encoder = IncrementalEncoder(model.tokenizer)  # of the truth behind the cut
        self._own: list[int] = []  # tokens behind the base

    def piece(self, sequence: int, interrupt: Interrupt) -> Piece:
        if len(self._base) + len(self._own) + 1 >= self._context:
            self._shift()
        wanted = [*self._base, *self._own]
        if self._session.tokens != wanted:
            self._session.extend(wanted, interrupt)
        started = time.perf_counter()
        step = self._session.step((), replace(GREEDY, logprobs=0), interrupt)
        seconds = time.perf_counter() - started
        token = step.tokens[0]
        self._own.append(token)
        self.ended = token in self._eos
        text, chance = self._model.tokenizer.text_bytes((token,)), math.exp(step.logprobs[0].logprob)
        return self._guessed(sequence, text, chance, seconds)

    def close(self) -> None:
        self._session.close()

    def _follow(self) -> None:
        text = self._truth[self._cut :].decode("utf-8", "ignore")  # half a character is waited for
        known = len(self._encoder)  # it only ever held an earlier beginning of this text
        self._encoder.edit(known, known, text[known:])
        self._own = list(self._encoder.tokens)
        self._text, self._ends = self._truth[: self._cut] + text.encode(), []

    def _shift(self) -> None:
        """Make room: of all that was, the nearest half of a context is left."""
        self._astray()
        self._follow()
        self._base = [*self._base, *self._own][-(self._context // 2) :]
        self._own, self._cut = [], len(self._text)
        self._encoder = IncrementalEncoder(self._model.tokenizer)

    def _prompt(self, before: str, after: str | None) -> list[int]:
        model, half = self._model, self._context // 2
        near = before[-8 * half :]
        if after is not None and model.fim is not None:
            behind = model.tokenizer.encode(after[: 2 * half])[: half // 4]
            ahead = model.tokenizer.encode(near)[-(half - len(behind)) :]
            return model.fim.assemble(model.tokenizer, ahead, behind)
        tokens = model.prompt(near)
        return tokens if len(tokens) <= half else tokens[-half:]


class AddressGuess(_Text):
    """Asks a model behind an address, on another GPU or another machine: a completion a branch."""

    def __init__(self, model: BlockingModel, before: str, after: str | None, room: int) -> None:
        super().__init__(room)
        self._model, self._before, self._after = model, before, after
        self._stream: Iterator[StreamItem] | None = None

    def piece(self, sequence: int, interrupt: Interrupt) -> Piece:
        started = time.perf_counter()
        if self._stream is None:
            prompt = self._before + self._text.decode("utf-8", "ignore")
            params = GenerationParams(max_tokens=ASKED)
            self._stream = self._model.stream_completion(prompt, self._after, params, interrupt)
        try:
            found = next((item for item in self._stream if isinstance(item, Chunk)), None)
        except KeystrokeError:
            self.close()
            raise
        self.ended = found is None or found.finish is not None
        text = found.text if found is not None else ""
        if self.ended:  # of what was asked for; there is more to ask once the target has come so far
            self.close()
        return self._guessed(sequence, text.encode(), UNKNOWN, time.perf_counter() - started)

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()  # type: ignore[attr-defined]

    def _follow(self) -> None:
        self.close()
        self._text, self._ends = self._truth, []
