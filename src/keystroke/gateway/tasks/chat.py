"""A model of this server, for tasks: every answer is a job in the model's queue.

A line that the user adds during an answer is inserted into the running session; where the answer ended first,
or the model is remote, the longer conversation is submitted again. Nothing here touches an engine.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Sequence

from keystroke.agent.chat.calls import call_grammar
from keystroke.agent.chat.encoder import ConversationEncoder
from keystroke.agent.chat.model import SMALL_MODEL, AnswerOptions, ChatModel, ModelAnswer
from keystroke.agent.chat.sampling import SamplingRequest, SamplingResult, run_race
from keystroke.agent.chat.steering import Message
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.engine.remote.wire import ToolCallDelta
from keystroke.gateway.tasks.bridge import SchedulerBridge, WorkHandle
from keystroke.gateway.tasks.decoder import ServedDecoder
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.remote import RemoteJob
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import TicketEnded, TicketItem, TicketMoved, TicketSteered

_POLL_SECONDS = 0.02  # between two checks for steering while the model writes nothing


class ServedChatModel(ChatModel):
    """`on_position` is called with an answer's position in the queue; 0: it no longer waits."""

    def __init__(
        self, bridge: SchedulerBridge, entry: ServedModel, on_position: Callable[[int], None] | None = None
    ) -> None:
        self.bridge, self._entry = bridge, entry
        self.name = entry.name
        self.is_small = entry.model is not None and entry.parameters < SMALL_MODEL
        self.price = entry.price
        self.encoder = ConversationEncoder(entry.model) if entry.model is not None else None
        self.probe_tools = entry.model is not None
        if entry.model is not None:
            engine, most = entry.model.engine, entry.scheduler.concurrent
            self.parallel_attempts = max(1, min(engine.free_batch, most))
            self.joint_attempts = max(1, min(engine.max_batch, most))
        self.on_position = on_position or (lambda position: None)

    def answer(self, messages: Sequence[Message], options: AnswerOptions | None = None) -> ModelAnswer:
        return _ServedStream(self, messages, options or AnswerOptions())

    def sample(self, request: SamplingRequest) -> SamplingResult:
        if self.encoder is None:
            return super().sample(request)
        decoder = ServedDecoder(self.bridge, self._entry, request, self.on_position)
        return run_race(request, decoder, self.encoder, self.name, self.price)


class _ServedStream(ModelAnswer):
    model: ServedChatModel
    _handle: WorkHandle

    def __init__(self, model: ServedChatModel, messages: Sequence[Message], options: AnswerOptions) -> None:
        super().__init__(model, messages, options)
        self._items: queue.SimpleQueue[TicketItem] = queue.SimpleQueue()
        self._resubmit = True

    def _pieces(self) -> Generator[str]:
        interrupt = self.options.interrupt
        while self._resubmit:
            self._resubmit = False
            handle = self._handle = self._submit()
            interrupt.add_callback(handle.cancel)
            try:
                yield from self._read()
            except BaseException:
                handle.cancel()
                raise
            finally:
                interrupt.remove_callback(handle.cancel)
                stats = handle.work.ticket.stats
                self.prompt_tokens += stats.prompt_tokens
                self.reused_tokens += stats.reused
                self.tokens += stats.tokens

    def _submit(self) -> WorkHandle:
        model, options, messages = self.model, self.options, list(self.messages)
        if model.encoder is None:
            job = RemoteJob(options.params, messages, options.tools or None)
            return model.bridge.submit(model.name, lambda entry: job, self._items.put, options.interrupt)
        prompt = model.encoder.encode(messages, options.tools)
        params = GenerationParams(
            options.params.max_tokens, constraint=call_grammar(options.tools) if options.tools else None
        )

        def make(entry: ServedModel) -> Job:
            assert entry.model is not None
            return Job(prompt, params, model.bridge.service.make_drafter(entry.model, None, len(prompt)))

        return model.bridge.submit(model.name, make, self._items.put, options.interrupt)

    def _read(self) -> Generator[str]:
        while not self._resubmit:
            try:
                item = self._items.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                yield ""
                continue
            if isinstance(item, TicketEnded):
                self.options.interrupt.check()
                if item.error is not None:
                    raise item.error
                return
            yield self._text_of(item)

    def _interject(self, line: str) -> None:
        """Wait until the line is part of the session, or until the answer has ended without it."""
        if self.model.encoder is None:
            self._handle.finish()
        else:
            self._handle.redirect(self.model.encoder.encode_interjection(line))
        while not isinstance(item := self._items.get(), TicketSteered):
            if isinstance(item, TicketEnded):
                self.options.interrupt.check()
                self._resubmit = True
                return
            self.text += self._text_of(item)

    def _text_of(self, item: TicketItem) -> str:
        if isinstance(item, Chunk):
            self.finish = item.finish or self.finish
            return item.text
        if isinstance(item, TicketMoved):
            self.model.on_position(item.position)
        elif isinstance(item, ToolCallDelta):
            self._add_call_delta(item)
        return ""
