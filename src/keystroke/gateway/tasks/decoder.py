"""Attempts written by the server's scheduler: as many pieces of work as there are attempts.

The prompt is read once and found in the cache by every attempt; the scheduler batches them with whatever
else it has, better priorities first. What an attempt wrote comes through one queue; one that is closed is
stopped within a step and what it still says is dropped.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from keystroke.agent.attempts import Decoder, Piece, Writer
from keystroke.agent.chat import Asked
from keystroke.engine.base import GREEDY, Interrupt, Sampling
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.errors import Interrupted
from keystroke.gateway.tasks.bridge import Bridge, Handle
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import Ended, Item, Moved, Steered
from keystroke.protocol.items import Part
from keystroke.protocol.requests import Prediction


class ServedWriter(Writer):
    def __init__(self, decoder: ServedDecoder, prompt: Sequence[int], sampling: Sampling) -> None:
        self._decoder, self.prompt, self._sampling = decoder, prompt, sampling
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._turns: list[Sequence[int]] = []  # said, and not yet part of the session
        self._handle: Handle | None = None
        self.closed = False

    def begin(self) -> None:
        self._handle = self._decoder.submit(self)

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @property
    def sampling(self) -> Sampling:
        return self._sampling

    def turn(self, tokens: Sequence[int]) -> None:
        self._turns.append(tokens)
        if self._handle is not None:
            self._handle.redirect(tokens)

    def take(self, item: Item) -> Piece | None:
        """What an item adds. Raises what the work failed with."""
        if isinstance(item, Chunk):
            self._tokens.extend(item.tokens)
            if self._turns:
                return None  # of an answer that is about to begin anew
            self._parts.append(item.text)
            return self, item.text, item.finish
        if isinstance(item, Steered) and self._turns:
            self._anew([*item.tokens, *self._turns.pop(0)])
        elif isinstance(item, Ended):
            if item.error is not None:
                raise item.error
            if self._turns:  # it ended before it could be turned: another goes on behind it
                spliced = [token for turn in self._turns for token in turn]
                self._turns.clear()
                self._anew([*item.tokens, *spliced])
                self.begin()
        return None

    def _anew(self, prompt: list[int]) -> None:
        self.prompt, self.begins = prompt, len(self._tokens)
        self._parts.clear()

    def close(self) -> None:
        self.closed = True
        if self._handle is not None:
            self._handle.enough()


class ServedDecoder(Decoder):
    def __init__(
        self, bridge: Bridge, entry: ServedModel, asked: Asked, on_position: Callable[[int], None]
    ) -> None:
        assert entry.model is not None
        self._bridge, self._model, self._position = bridge, entry.name, on_position
        self.width = max(1, min(entry.model.engine.max_batch, entry.scheduler.concurrent))
        self.context = entry.model.engine.info.context_length
        self._params = GenerationParams(asked.max_tokens, stop=asked.stop)
        content = [Part(type="text", text=asked.prediction)]
        self._prediction = Prediction(content) if asked.prediction else None
        self._items: queue.SimpleQueue[tuple[ServedWriter | None, Item]] = queue.SimpleQueue()
        self._interrupt = Interrupt()
        self._alone = False
        self._next: tuple[ServedWriter | None, Item] | None = None  # came too early for the last step

    def read(self, prompt: Sequence[int], interrupt: Interrupt) -> int:
        self._interrupt = interrupt
        interrupt.add_callback(self._wake)
        warm = Job(prompt, GenerationParams(1, GREEDY), warm=True)
        read: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        wake = lambda: read.put(None)  # noqa: E731
        interrupt.add_callback(wake)
        try:
            handle = self._bridge.submit(self._model, lambda entry: warm, read.put, interrupt)
            while not isinstance(item := read.get(), Ended):
                if item is None:
                    handle.cancel()
                    raise Interrupted("stopped on request")
                if isinstance(item, Moved):
                    self._position(item.position)
        finally:
            interrupt.remove_callback(wake)
        if item.error is not None:
            raise item.error
        return handle.work.ticket.stats.reused

    def begin(self, prompt: Sequence[int], sampling: Sampling, *, alone: bool) -> ServedWriter:
        self._alone = alone
        writer = ServedWriter(self, prompt, sampling)
        writer.begin()
        return writer

    def submit(self, writer: ServedWriter) -> Handle:
        params = replace(self._params, sampling=writer.sampling)
        prompt, items = writer.prompt, self._items

        def make(entry: ServedModel) -> Job:
            assert entry.model is not None
            service = self._bridge.service
            draft = service.draft(entry.model, self._prediction, len(prompt)) if self._alone else None
            return Job(prompt, params, draft)

        return self._bridge.submit(self._model, make, lambda item: items.put((writer, item)), self._interrupt)

    def step(self, writers: Sequence[Writer], patience: float | None) -> Iterable[Piece]:
        """At most one piece a writer, so that each is looked at before the next."""
        pieces: dict[ServedWriter, Piece] = {}
        end = None if patience is None else time.monotonic() + patience
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                writer, item = self._next or self._items.get(not pieces, left)
            except queue.Empty:
                return list(pieces.values())
            self._next = None
            self._interrupt.check()
            if writer is None or writer.closed:
                continue
            if writer in pieces:
                self._next = writer, item
                return list(pieces.values())
            if isinstance(item, Moved):
                self._position(item.position)
            elif (piece := writer.take(item)) is not None:
                pieces[writer] = piece

    def _wake(self) -> None:
        self._items.put((None, None))

    def close(self) -> None:
        self._interrupt.remove_callback(self._wake)
