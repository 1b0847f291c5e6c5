"""Generates attempts with the server's scheduler: one job per attempt.

The prompt is read once and every attempt finds it in the cache; the scheduler batches the jobs with its
other work. The output of all attempts comes through one queue; a closed stream is stopped within a step
and its output dropped.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from keystroke.agent.attempts import AttemptChunk, AttemptStream, Decoder
from keystroke.agent.chat.sampling import SamplingRequest
from keystroke.engine.base import GREEDY, Interrupt, Sampling
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.errors import Interrupted
from keystroke.gateway.tasks.bridge import SchedulerBridge, WorkHandle
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import TicketEnded, TicketItem, TicketMoved, TicketSteered
from keystroke.protocol.items import ContentPart
from keystroke.protocol.requests import Prediction


class ServedAttemptStream(AttemptStream):
    def __init__(self, decoder: ServedDecoder, prompt: Sequence[int], sampling: Sampling) -> None:
        self._decoder, self.prompt, self._sampling = decoder, prompt, sampling
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._redirections: list[Sequence[int]] = []  # not yet part of the session
        self._handle: WorkHandle | None = None
        self.closed = False

    def submit(self) -> None:
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

    def redirect(self, tokens: Sequence[int]) -> None:
        self._redirections.append(tokens)
        if self._handle is not None:
            self._handle.redirect(tokens)

    def handle_item(self, item: TicketItem) -> AttemptChunk | None:
        """The text that an item adds. Raises the error of the work."""
        if isinstance(item, Chunk):
            self._tokens.extend(item.tokens)
            if self._redirections:
                return None  # of an answer that is about to be redirected
            self._parts.append(item.text)
            return self, item.text, item.finish
        if isinstance(item, TicketSteered) and self._redirections:
            self._restart([*item.tokens, *self._redirections.pop(0)])
        elif isinstance(item, TicketEnded):
            if item.error is not None:
                raise item.error
            if self._redirections:  # it ended before the redirection: a new job continues it
                spliced = [token for turn in self._redirections for token in turn]
                self._redirections.clear()
                self._restart([*item.tokens, *spliced])
                self.submit()
        return None

    def _restart(self, prompt: list[int]) -> None:
        self.prompt, self.redirected_at = prompt, len(self._tokens)
        self._parts.clear()

    def close(self) -> None:
        self.closed = True
        if self._handle is not None:
            self._handle.finish()


class ServedDecoder(Decoder):
    def __init__(
        self,
        bridge: SchedulerBridge,
        entry: ServedModel,
        request: SamplingRequest,
        on_position: Callable[[int], None],
    ) -> None:
        assert entry.model is not None
        self._bridge, self._model, self._position = bridge, entry.name, on_position
        self.width = max(1, min(entry.model.engine.max_batch, entry.scheduler.concurrent))
        self.slows = entry.model.engine.batch_slows
        self.context = entry.model.engine.info.context_length
        self._params = GenerationParams(request.max_tokens, stop=request.stop)
        content = [ContentPart(type="text", text=request.prediction)]
        self._prediction = Prediction(content) if request.prediction else None
        self._items: queue.SimpleQueue[tuple[ServedAttemptStream | None, TicketItem]] = queue.SimpleQueue()
        self._interrupt = Interrupt()
        self._alone = False
        self._next: tuple[ServedAttemptStream | None, TicketItem] | None = (
            None  # arrived too early for the last step
        )

    def prefill(self, prompt: Sequence[int], interrupt: Interrupt) -> int:
        self._interrupt = interrupt
        interrupt.add_callback(self._wake)
        warm = Job(prompt, GenerationParams(1, GREEDY), warm=True)
        read: queue.SimpleQueue[TicketItem | None] = queue.SimpleQueue()
        wake = lambda: read.put(None)  # noqa: E731
        interrupt.add_callback(wake)
        try:
            handle = self._bridge.submit(self._model, lambda entry: warm, read.put, interrupt)
            while not isinstance(item := read.get(), TicketEnded):
                if item is None:
                    handle.cancel()
                    raise Interrupted("stopped on request")
                if isinstance(item, TicketMoved):
                    self._position(item.position)
        finally:
            interrupt.remove_callback(wake)
        if item.error is not None:
            raise item.error
        return handle.work.ticket.stats.reused

    def start(self, prompt: Sequence[int], sampling: Sampling, *, alone: bool) -> ServedAttemptStream:
        self._alone = alone
        stream = ServedAttemptStream(self, prompt, sampling)
        stream.submit()
        return stream

    def submit(self, stream: ServedAttemptStream) -> WorkHandle:
        params = replace(self._params, sampling=stream.sampling)
        prompt, items = stream.prompt, self._items

        def make(entry: ServedModel) -> Job:
            assert entry.model is not None
            service = self._bridge.service
            draft = service.make_drafter(entry.model, self._prediction, len(prompt)) if self._alone else None
            return Job(prompt, params, draft)

        return self._bridge.submit(self._model, make, lambda item: items.put((stream, item)), self._interrupt)

    def step(self, streams: Sequence[AttemptStream], timeout: float | None) -> Iterable[AttemptChunk]:
        """At most one piece per stream, so that each is checked before the next is read."""
        pieces: dict[ServedAttemptStream, AttemptChunk] = {}
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                stream, item = self._next or self._items.get(not pieces, left)
            except queue.Empty:
                return list(pieces.values())
            self._next = None
            self._interrupt.check()
            if stream is None or stream.closed:
                continue
            if stream in pieces:
                self._next = stream, item
                return list(pieces.values())
            if isinstance(item, TicketMoved):
                self._position(item.position)
            elif (piece := stream.handle_item(item)) is not None:
                pieces[stream] = piece

    def _wake(self) -> None:
        self._items.put((None, None))

    def close(self) -> None:
        self._interrupt.remove_callback(self._wake)
