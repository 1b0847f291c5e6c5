"""One answer under way: items of its work in, the serializer's messages out.

Runs in callbacks on the event loop, with no task of its own. It interprets text (calls, thoughts) and
feeds the serializer; what it costs is the work's affair. It never touches a socket: whoever made it gave a
sink.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from keystroke.assist.tool_calls.parser import (
    AnswerParser,
    Call,
    CallBegun,
    CallDelta,
    CallEnded,
    Segment,
    Text,
    Thought,
)
from keystroke.assist.tool_calls.tools import Offered, Toolset
from keystroke.engine.base import TokenLogprob
from keystroke.engine.generation import Chunk
from keystroke.engine.remote.wire import Reasoning, ToolCallDelta
from keystroke.engine.tokenizer import Tokenizer
from keystroke.errors import EngineError, KeystrokeError
from keystroke.gateway.api.serializers import Serializer
from keystroke.gateway.work.ticket import Ended, Item, Moved, Started, Steered
from keystroke.gateway.work.work import Outcome, Work
from keystroke.protocol.items import ChosenToken, TokenChoice

log = logging.getLogger("keystroke.answer")

Sink = Callable[[list[Any]], None]


class Answer:
    """`parser` makes what reads each response's text; without it all is text. `on_end` is called once per
    response with its outcome and the item that ended it. `decided` is given plain text as it comes, and says
    when enough has."""

    def __init__(
        self,
        work: Work,
        serializer: Serializer,
        sink: Sink,
        *,
        tokenizer: Tokenizer | None,
        toolset: Toolset = Toolset(),  # noqa: B008 - immutable
        parser: Callable[[], AnswerParser] | None = None,
        decided: Callable[[str], bool] | None = None,
        on_end: Callable[[Answer, Outcome, Ended | Steered], None],
        on_steered: Callable[[Answer, Steered], Serializer] | None = None,
    ) -> None:
        self.work = work
        self.serializer = serializer
        self.sink = sink
        self.outcome: Outcome | None = None
        self.timed_out = False
        self.after: Callable[[], None] | None = None  # called when the last message has gone to the sink
        # The first words wait for the engine's first sign, which comes within a step: one write, not two.
        self._prelude = serializer.began()
        self._tokenizer = tokenizer
        self._decided = decided
        self._toolset = toolset
        self._new_parser = parser
        self._parser = None if parser is None else parser()
        self._calls: dict[int, tuple[str, list[str]]] = {}  # a remote server's calls, by index
        self._on_end = on_end
        self._on_steered = on_steered
        work.follow(self.receive)

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        self.work.cancel(reason)

    def limit_time(self, seconds: float) -> None:
        """Stop after so long with what there is; for clients that would rather have less, soon."""

        def stop() -> None:
            if not self.ended:
                self.timed_out = True
                self.cancel()

        asyncio.get_running_loop().call_later(seconds, stop)

    def receive(self, items: list[Item]) -> None:
        out, self._prelude = self._prelude, []
        try:
            for item in items:
                if type(item) is Chunk:
                    self._chunk(item, out)
                elif isinstance(item, Ended):
                    self._end(item, out)
                else:
                    self._other(item, out)
        except Exception as error:
            self._broke(error, out)
        if out:
            self.sink(out)
        if self.ended and self.after is not None:
            self.after()

    def _chunk(self, chunk: Chunk, out: list[Any]) -> None:
        logprobs = self._logprobs(chunk.logprobs) if chunk.logprobs else ()
        if self._parser is None:
            if chunk.text or logprobs:
                out += self.serializer.text(chunk.text, logprobs)
            if self._decided is not None and chunk.finish is None and self._decided(chunk.text):
                self.work.enough()
            return
        segments = self._parser.feed(chunk.text) if chunk.text else []
        if logprobs and not (segments and isinstance(segments[0], Text)):
            segments = [Text(""), *segments]
        for segment in segments:
            self._say(segment, logprobs, out)
            logprobs = ()

    def _say(self, segment: Segment, logprobs: Sequence[ChosenToken], out: list[Any]) -> None:
        if isinstance(segment, Text):
            out += self.serializer.text(segment.text, logprobs)
        elif isinstance(segment, Thought):
            out += self.serializer.thought(segment.text)
        elif isinstance(segment, Call):
            out += self.serializer.call(segment.tool)
            out += self.serializer.call_delta(segment.payload)
            out += self.serializer.call_done()
        elif isinstance(segment, CallBegun):
            out += self.serializer.call(segment.tool)
        elif isinstance(segment, CallDelta):
            out += self.serializer.call_delta(segment.payload)
        elif isinstance(segment, CallEnded):
            out += self.serializer.call_done()

    def _other(self, item: Item, out: list[Any]) -> None:
        if isinstance(item, Moved):
            out += self.serializer.queued(item.position)
        elif isinstance(item, Started):
            out += self.serializer.started()
        elif isinstance(item, Steered):
            self._steer(item, out)
        elif isinstance(item, Reasoning):
            out += self.serializer.thought(item.text)
        elif isinstance(item, ToolCallDelta):
            name, pieces = self._calls.setdefault(item.index, (item.name or "", []))
            if item.name and not name:
                self._calls[item.index] = (item.name, pieces)
            pieces.append(item.arguments)

    def _steer(self, item: Steered, out: list[Any]) -> None:
        """The response so far ends here; its successor goes on over the same session."""
        assert self._on_steered is not None
        self._flush(out)
        outcome = self.work.steered(item)
        out += self.serializer.ended(outcome)
        self._on_end(self, outcome, item)
        self._parser = None if self._new_parser is None else self._new_parser()
        self.serializer = self._on_steered(self, item)
        self.work.id = self.serializer.id
        out += self.serializer.began()
        out += self.serializer.started()

    def _end(self, item: Ended, out: list[Any]) -> None:
        self._flush(out)
        outcome = self.outcome = self.work.ended(item)
        out += self.serializer.ended(outcome)
        # What is kept of it can wait until the client has its answer.
        asyncio.get_running_loop().call_soon(self._on_end, self, outcome, item)

    def _flush(self, out: list[Any]) -> None:
        for segment in self._parser.finish() if self._parser is not None else ():
            self._say(segment, (), out)
        for name, pieces in self._calls.values():
            shown = self._toolset.find(name)
            tool = Offered(name) if shown is None else shown.tool
            self._say(Call(tool, _payload(tool, "".join(pieces))), (), out)
        self._calls = {}

    def _broke(self, error: Exception, out: list[Any]) -> None:
        """A fault of ours must still end the response, once."""
        log.exception("an answer broke", exc_info=error)
        failure = (
            error if isinstance(error, KeystrokeError) else EngineError("The server failed on this answer.")
        )
        outcome = self.work.broke(failure)
        if self.outcome is None:
            self.outcome = outcome
            out += self.serializer.ended(outcome)
            self._on_end(self, outcome, Ended(failure))

    def _logprobs(self, chosen: Sequence[TokenLogprob]) -> list[ChosenToken]:
        return [self._chosen(c) for c in chosen]

    def _chosen(self, chosen: TokenLogprob) -> ChosenToken:
        text, raw = self._token(chosen.token)
        return ChosenToken(
            token=text,
            logprob=chosen.logprob,
            bytes=raw,
            top_logprobs=[TokenChoice(*self._spread(token, value)) for token, value in chosen.top],
        )

    def _spread(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        text, raw = self._token(token)
        return text, logprob, raw

    def _token(self, token: int) -> tuple[str, list[int]]:
        raw = self._tokenizer.token_bytes(token) if self._tokenizer is not None and token >= 0 else b""
        return raw.decode("utf-8", "replace"), list(raw)


def _payload(tool: Offered, arguments: str) -> str:
    """A custom tool was offered to the remote server as a function of one `input`; unwrap it."""
    if not tool.custom:
        return arguments
    try:
        said = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    return said["input"] if isinstance(said, dict) and isinstance(said.get("input"), str) else arguments
