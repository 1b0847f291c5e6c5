"""The same answer for different clients: Responses events, chat chunks, completion chunks.

A serializer turns what happened into the typed messages its clients read, in order, and keeps what a
plain (not streamed) body needs. It knows no socket and no engine, and has one terminal message.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from keystroke.assist.tool_calls.tools import Offered
from keystroke.gateway.work.receipts import usage
from keystroke.gateway.work.work import Outcome
from keystroke.protocol import chat
from keystroke.protocol.faults import detail
from keystroke.protocol.items import ChosenToken
from keystroke.protocol.response import ErrorBody, Incomplete, Receipt, Response, Routing, Shortened
from keystroke.protocol.stream import ResponseStream


class Serializer(ABC):
    id: str

    def began(self) -> list[Any]:
        return []

    def queued(self, position: int) -> list[Any]:
        return []

    def started(self) -> list[Any]:
        return []

    @abstractmethod
    def text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]: ...

    @abstractmethod
    def thought(self, delta: str) -> list[Any]: ...

    @abstractmethod
    def call(self, tool: Offered) -> list[Any]:
        """A call begins; what it is called with follows, piece by piece, and then its end."""

    @abstractmethod
    def call_delta(self, delta: str) -> list[Any]: ...

    def call_done(self) -> list[Any]:
        return []

    @abstractmethod
    def ended(self, outcome: Outcome) -> list[Any]: ...


class ResponseSerializer(Serializer):
    """Responses API events."""

    def __init__(self, response: Response, stream_id: str | None = None) -> None:
        self.id = response.id
        self.stream = ResponseStream(response, stream_id)

    @property
    def response(self) -> Response:
        return self.stream.response

    def began(self) -> list[Any]:
        return list(self.stream.created())

    def queued(self, position: int) -> list[Any]:
        return list(self.stream.queued(position))

    def started(self) -> list[Any]:
        return list(self.stream.in_progress())

    def text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]:
        return self.stream.text(delta, logprobs)

    def thought(self, delta: str) -> list[Any]:
        return list(self.stream.reasoning(delta))

    def call(self, tool: Offered) -> list[Any]:
        return list(self.stream.call(tool.name, custom=tool.custom, namespace=tool.namespace))

    def call_delta(self, delta: str) -> list[Any]:
        return list(self.stream.call_delta(delta))

    def call_done(self) -> list[Any]:
        return list(self.stream.call_done())

    def ended(self, outcome: Outcome) -> list[Any]:
        paid = outcome.receipt
        spent = usage(paid)
        if outcome.status == "completed":
            return list(self.stream.completed(spent, paid))
        if outcome.status == "incomplete":
            reason = {"steered": "steered", "grammar": "grammar"}.get(outcome.finish, "max_output_tokens")
            return list(self.stream.incomplete(Incomplete(reason=reason), spent, paid))  # type: ignore[arg-type]
        if outcome.status == "cancelled":
            return list(self.stream.cancelled(spent, paid))
        assert outcome.error is not None
        return list(self.stream.failed(outcome.error, spent, paid))


def chat_usage(paid: Receipt) -> chat.ChatUsage:
    return chat.ChatUsage(
        prompt_tokens=paid.input_tokens,
        completion_tokens=paid.output_tokens,
        total_tokens=paid.input_tokens + paid.output_tokens,
        prompt_tokens_details=chat.PromptTokenDetails(cached_tokens=paid.reused_tokens),
        completion_tokens_details=chat.CompletionTokenDetails(
            accepted_prediction_tokens=paid.accepted_tokens,
            rejected_prediction_tokens=paid.drafted_tokens - paid.accepted_tokens,
        ),
    )


class ChatSerializer(Serializer):
    """chat.completion.chunk objects; `body` is the whole once it ended."""

    def __init__(
        self,
        identity: str,
        model: str,
        routing: Routing,
        *,
        include_usage: bool,
        shortened: Shortened | UnsetType = UNSET,
    ) -> None:
        self.id = identity
        self.model = model
        self.routing = routing
        self.shortened = shortened
        self.body: chat.ChatCompletion | None = None
        self._created = int(time.time())
        self._include_usage = include_usage
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[chat.ToolCall] = []
        self._logprobs: list[ChosenToken] = []

    def began(self) -> list[Any]:
        first = self._chunk(chat.Delta(role="assistant", content=""))
        first.shortened = self.shortened
        return [first]

    def text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]:
        self._text.append(delta)
        self._logprobs += logprobs
        chosen = chat.ChatLogprobs(list(logprobs)) if logprobs else None
        return [self._chunk(chat.Delta(content=delta), logprobs=chosen)]

    def thought(self, delta: str) -> list[Any]:
        self._thoughts.append(delta)
        return [self._chunk(chat.Delta(reasoning_content=delta))]

    def call(self, tool: Offered) -> list[Any]:
        index = len(self._calls)
        identity = f"call_{self.id.removeprefix('chatcmpl-')}_{index}"
        self._calls.append(chat.ToolCall(identity, chat.FunctionPiece(tool.name)))
        piece = chat.FunctionPiece(tool.name)
        said = chat.ToolCallPiece(index=index, id=identity, type="function", function=piece)
        return [self._chunk(chat.Delta(tool_calls=[said]))]

    def call_delta(self, delta: str) -> list[Any]:
        begun = self._calls[-1]
        piece = chat.FunctionPiece(begun.function.name, begun.function.arguments + delta)
        self._calls[-1] = chat.ToolCall(begun.id, piece)
        said = chat.ToolCallPiece(index=len(self._calls) - 1, function=chat.FunctionPiece(arguments=delta))
        return [self._chunk(chat.Delta(tool_calls=[said]))]

    def ended(self, outcome: Outcome) -> list[Any]:
        finish = "tool_calls" if self._calls and outcome.finish == "stop" else _reason(outcome)
        spent = chat_usage(outcome.receipt)
        message = chat.AssistantMessage(content="".join(self._text) or (None if self._calls else ""))
        if self._calls:
            message = chat.AssistantMessage(content=message.content, tool_calls=self._calls)
        if self._thoughts:
            message = chat.AssistantMessage(
                content=message.content,
                tool_calls=message.tool_calls,
                reasoning_content="".join(self._thoughts),
            )
        logprobs = chat.ChatLogprobs(self._logprobs) if self._logprobs else None
        self.body = chat.ChatCompletion(
            id=self.id,
            created=self._created,
            model=self.model,
            choices=[chat.ChatChoice(message=message, finish_reason=finish, logprobs=logprobs)],
            usage=spent,
            service_tier=outcome.receipt.service_tier,
            receipt=outcome.receipt,
            routing=self.routing,
            shortened=self.shortened,
        )
        if outcome.error is not None:
            return [ErrorBody(detail(outcome.error))]
        said: list[Any] = [self._chunk(chat.Delta(), finish)]
        if self._include_usage:
            said.append(chat.ChatChunk(self.id, self._created, self.model, [], usage=spent))
        return said

    def _chunk(
        self, delta: chat.Delta, finish: str | None = None, logprobs: chat.ChatLogprobs | None = None
    ) -> chat.ChatChunk:
        choice = chat.ChunkChoice(delta, finish, 0, logprobs)
        return chat.ChatChunk(self.id, self._created, self.model, [choice])


class CompletionSerializer(Serializer):
    """text_completion objects; calls and thoughts do not exist here, all text is text."""

    def __init__(
        self, identity: str, model: str, routing: Routing, *, include_usage: bool, echo: str = ""
    ) -> None:
        self.id = identity
        self.model = model
        self.routing = routing
        self.body: chat.TextCompletion | None = None
        self._created = int(time.time())
        self._include_usage = include_usage
        self._echo = echo
        self._text: list[str] = []
        self._logprobs: list[ChosenToken] = []

    def started(self) -> list[Any]:
        return self.text(self._echo, ()) if self._echo else []

    def text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]:
        self._text.append(delta)
        self._logprobs += logprobs
        choice = chat.TextChoice(delta, logprobs=_text_logprobs(logprobs) if logprobs else None)
        return [chat.TextCompletion(self.id, self._created, self.model, [choice])]

    def thought(self, delta: str) -> list[Any]:
        return self.text(delta, ())

    def call(self, tool: Offered) -> list[Any]:
        return []

    def call_delta(self, delta: str) -> list[Any]:
        return self.text(delta, ())

    def ended(self, outcome: Outcome) -> list[Any]:
        spent = chat_usage(outcome.receipt)
        logprobs = _text_logprobs(self._logprobs) if self._logprobs else None
        whole = chat.TextChoice("".join(self._text), _reason(outcome), logprobs=logprobs)
        self.body = chat.TextCompletion(
            self.id,
            self._created,
            self.model,
            [whole],
            usage=spent,
            receipt=outcome.receipt,
            routing=self.routing,
        )
        if outcome.error is not None:
            return [ErrorBody(detail(outcome.error))]
        last = chat.TextChoice("", _reason(outcome))
        said: list[Any] = [chat.TextCompletion(self.id, self._created, self.model, [last])]
        if self._include_usage:
            said.append(chat.TextCompletion(self.id, self._created, self.model, [], usage=spent))
        return said

    @property
    def whole(self) -> str:
        return "".join(self._text)


def _reason(outcome: Outcome) -> str:
    """A grammar that could not go on is, to these clients, an answer cut short."""
    return "length" if outcome.finish == "grammar" else outcome.finish


def _text_logprobs(chosen: Sequence[ChosenToken]) -> chat.TextLogprobs:
    offsets, at = [], 0
    for token in chosen:
        offsets.append(at)
        at += len(token.token)
    return chat.TextLogprobs(
        tokens=[t.token for t in chosen],
        token_logprobs=[t.logprob for t in chosen],
        top_logprobs=[{c.token: c.logprob for c in t.top_logprobs} for t in chosen],
        text_offset=offsets,
    )
