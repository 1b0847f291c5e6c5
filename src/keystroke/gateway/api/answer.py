"""One answer in progress: turns the items of its work into the serializer's messages.

Runs in callbacks on the event loop, without a task of its own. It parses tool calls and reasoning out of the
text and passes the messages to a sink; it does not know the transport.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from keystroke.assist.tool_calls.file_edits import SegmentSource, edits_files
from keystroke.assist.tool_calls.segments import (
    ReasoningSegment,
    Segment,
    TextSegment,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallSegment,
    ToolCallStart,
)
from keystroke.assist.tool_calls.tools import OfferedTool, Toolset
from keystroke.engine.base import TokenLogprob
from keystroke.engine.generation import Chunk, Finish
from keystroke.engine.remote.wire import RemoteReasoning
from keystroke.engine.remote.wire import ToolCallDelta as RemoteToolCallDelta
from keystroke.engine.tokenizer import Tokenizer
from keystroke.errors import EngineError, KeystrokeError
from keystroke.gateway.api.client_edits import ClientEdits
from keystroke.gateway.api.serializers import Serializer
from keystroke.gateway.work.ticket import TicketEnded, TicketItem, TicketMoved, TicketStarted, TicketSteered
from keystroke.gateway.work.work import Work, WorkOutcome
from keystroke.protocol.items import ChosenToken, TokenChoice

log = logging.getLogger("keystroke.answer")

Sink = Callable[[list[Any]], None]
_LONGEST_STOP = 256  # tokens


class RunningAnswer:
    """`parser` makes the parser of each response's text; without it all output is text. `on_end` is called
    once per response with its outcome and the item that ended it. `should_stop` gets plain text as it comes,
    and returns True to stop generating."""

    def __init__(
        self,
        work: Work,
        serializer: Serializer,
        sink: Sink,
        *,
        tokenizer: Tokenizer | None,
        toolset: Toolset = Toolset(),  # noqa: B008 - immutable
        parser: Callable[[], SegmentSource] | None = None,
        should_stop: Callable[[str], bool] | None = None,
        edits: ClientEdits | None = None,
        on_end: Callable[[RunningAnswer, WorkOutcome, TicketEnded | TicketSteered], None],
        on_steered: Callable[[RunningAnswer, TicketSteered], Serializer] | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> None:
        self.work = work
        self.serializer = serializer
        self.sink = sink
        self.outcome: WorkOutcome | None = None
        self.timed_out = False
        # The first messages wait for the first item, which comes within a step: one write, not two.
        self._prelude = serializer.on_created()
        self._tokenizer = tokenizer
        self._should_stop = should_stop
        self._edits = edits
        self._waiting: list[Segment] = []  # a call that changes a file, and what follows it
        self._completing: asyncio.Task[None] | None = None
        self._toolset = toolset
        self._new_parser = parser
        self._parser = None if parser is None else parser()
        self._stops: tuple[str, ...] = work.ticket.job.params.stop
        self._last_tokens: list[int] = []
        self._calls: dict[int, tuple[str, list[str]]] = {}  # a remote server's calls, by index
        self._on_end = on_end
        self._on_steered = on_steered
        self._on_done = on_done  # called when the last message has gone to the sink
        work.subscribe(self.receive)

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    def limit_time(self, seconds: float) -> None:
        """Stop after so many seconds with what was generated."""

        def stop() -> None:
            if not self.ended:
                self.timed_out = True
                self.work.cancel()

        asyncio.get_running_loop().call_later(seconds, stop)

    def receive(self, items: list[TicketItem]) -> None:
        out, self._prelude = self._prelude, []
        try:
            for item in items:
                if type(item) is Chunk:
                    self._handle_chunk(item, out)
                elif isinstance(item, TicketEnded):
                    self._end_or_complete(item, out)
                else:
                    self._handle_item(item, out)
        except Exception as error:
            self._fail(error, out)
        self._deliver(out)

    def _deliver(self, out: list[Any]) -> None:
        if out:
            self.sink(out)
        if self.ended and self._on_done is not None:
            self._on_done()

    def _handle_chunk(self, chunk: Chunk, out: list[Any]) -> None:
        logprobs = [self._chosen_token(c) for c in chunk.logprobs] if chunk.logprobs else ()
        if len(self._stops) > 1:
            self._last_tokens = [*self._last_tokens[-_LONGEST_STOP:], *chunk.tokens]
        if self._parser is None:
            if chunk.text or logprobs:
                out += self.serializer.on_text(chunk.text, logprobs)
            if self._should_stop is not None and chunk.finish is None and self._should_stop(chunk.text):
                self.work.stop_early()
            return
        segments = self._parser.feed(chunk.text) if chunk.text else []
        if logprobs and not (segments and isinstance(segments[0], TextSegment)):
            segments = [TextSegment(""), *segments]
        for segment in segments:
            if type(segment) is TextSegment and not self._waiting:  # nearly every token
                out += self.serializer.on_text(segment.text, logprobs)
            else:
                self._emit(segment, logprobs, out)
            logprobs = ()

    def _end_or_complete(self, item: TicketEnded, out: list[Any]) -> None:
        """End the answer, after its calls that change files were checked and, for a small model, made."""
        self._flush(out)
        if self._waiting and item.error is None:
            self._completing = asyncio.create_task(self._complete(item))
        else:
            self._end(item, out)

    async def _complete(self, item: TicketEnded) -> None:
        out: list[Any] = []
        try:
            assert self._edits is not None
            waiting, self._waiting = self._waiting, []
            for segment in waiting:
                for edited in await self._edits.make(segment):
                    self._send_segment(edited, (), out)
            self._end(item, out)
        except Exception as error:
            self._fail(error, out)
        self._deliver(out)

    def _emit(self, segment: Segment, logprobs: Sequence[ChosenToken], out: list[Any]) -> None:
        """Send a segment, or keep it for `_complete`."""
        changes = isinstance(segment, ToolCallSegment) and edits_files(segment.tool)
        if self._waiting or (changes and self._edits is not None):
            self._waiting.append(segment)
        else:
            self._send_segment(segment, logprobs, out)

    def _send_waiting(self, out: list[Any]) -> None:
        """Send what waits, its calls checked but not made anew."""
        waiting, self._waiting = self._waiting, []
        for segment in waiting:
            assert self._edits is not None
            self._send_segment(self._edits.check(segment), (), out)

    def _send_segment(self, segment: Segment, logprobs: Sequence[ChosenToken], out: list[Any]) -> None:
        if isinstance(segment, TextSegment):
            out += self.serializer.on_text(segment.text, logprobs)
        elif isinstance(segment, ReasoningSegment):
            out += self.serializer.on_reasoning(segment.text)
        elif isinstance(segment, ToolCallSegment):
            out += self.serializer.on_call(segment.tool)
            out += self.serializer.on_call_delta(segment.payload)
            out += self.serializer.on_call_done()
        elif isinstance(segment, ToolCallStart):
            out += self.serializer.on_call(segment.tool)
        elif isinstance(segment, ToolArgumentsDelta):
            out += self.serializer.on_call_delta(segment.payload)
        elif isinstance(segment, ToolCallEnd):
            out += self.serializer.on_call_done()

    def _handle_item(self, item: TicketItem, out: list[Any]) -> None:
        if isinstance(item, TicketMoved):
            out += self.serializer.on_queued(item.position)
        elif isinstance(item, TicketStarted):
            out += self.serializer.on_started()
        elif isinstance(item, TicketSteered):
            self._steer(item, out)
        elif isinstance(item, RemoteReasoning):
            out += self.serializer.on_reasoning(item.text)
        elif isinstance(item, RemoteToolCallDelta):
            name, pieces = self._calls.setdefault(item.index, (item.name or "", []))
            if item.name and not name:
                self._calls[item.index] = (item.name, pieces)
            pieces.append(item.arguments)

    def _steer(self, item: TicketSteered, out: list[Any]) -> None:
        """End the response so far; its successor continues over the same session."""
        assert self._on_steered is not None
        self._flush(out)
        self._send_waiting(out)
        outcome = self.work.end_steered_span(item)
        out += self.serializer.on_end(outcome)
        self._on_end(self, outcome, item)
        self._parser = None if self._new_parser is None else self._new_parser()
        self.serializer = self._on_steered(self, item)
        self.work.id = self.serializer.id
        out += self.serializer.on_created()
        out += self.serializer.on_started()

    def _end(self, item: TicketEnded, out: list[Any]) -> None:
        self._send_waiting(out)
        outcome = self.work.final_outcome(item)
        if self.work.ticket.finish is Finish.STOP_STRING and outcome.error is None:
            outcome = replace(outcome, stop_string=self._find_stop_string())
        self.outcome = outcome
        out += self.serializer.on_end(outcome)
        # Storing waits until the client has its answer.
        asyncio.get_running_loop().call_soon(self._on_end, self, outcome, item)

    def _find_stop_string(self) -> str | None:
        """The stop string that ended the answer; its tokens are the last ones."""
        if self._tokenizer is None or len(self._stops) < 2:
            return next(iter(self._stops), None)
        return max(self._stops, key=self._tokenizer.decode(self._last_tokens).rfind)

    def _flush(self, out: list[Any]) -> None:
        for segment in self._parser.finish() if self._parser is not None else ():
            self._emit(segment, (), out)
        for name, pieces in self._calls.values():
            shown = self._toolset.find(name)
            tool = OfferedTool(name) if shown is None else shown.tool
            self._emit(ToolCallSegment(tool, _payload(tool, "".join(pieces))), (), out)
        self._calls = {}

    def _fail(self, error: Exception, out: list[Any]) -> None:
        """An error of this server must still end the response, once."""
        log.exception("an answer failed", exc_info=error)
        failure = (
            error if isinstance(error, KeystrokeError) else EngineError("The server failed on this answer.")
        )
        outcome = self.work.fail(failure)
        if self.outcome is None:
            self.outcome = outcome
            out += self.serializer.on_end(outcome)
            self._on_end(self, outcome, TicketEnded(failure))

    def _chosen_token(self, chosen: TokenLogprob) -> ChosenToken:
        text, raw = self._token_text(chosen.token)
        return ChosenToken(
            token=text,
            logprob=chosen.logprob,
            bytes=raw,
            top_logprobs=[self._token_choice(token, value) for token, value in chosen.top],
        )

    def _token_choice(self, token: int, logprob: float) -> TokenChoice:
        text, raw = self._token_text(token)
        return TokenChoice(text, logprob, raw)

    def _token_text(self, token: int) -> tuple[str, list[int]]:
        raw = self._tokenizer.token_bytes(token) if self._tokenizer is not None and token >= 0 else b""
        return raw.decode("utf-8", "replace"), list(raw)


def _payload(tool: OfferedTool, arguments: str) -> str:
    """A custom tool was offered to the remote server as a function of one `input`; unwrap it."""
    if not tool.custom:
        return arguments
    try:
        fields = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    return fields["input"] if isinstance(fields, dict) and isinstance(fields.get("input"), str) else arguments
