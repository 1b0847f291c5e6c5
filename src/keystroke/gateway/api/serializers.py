"""The messages of one answer for each API: Responses events, chat chunks, completion chunks.

A serializer turns what happened into typed messages, in order, and collects what a body that is not streamed
needs. It knows no socket and no engine, and produces one final message.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from keystroke.assist.tool_calls.tools import OfferedTool
from keystroke.gateway.work.work import WorkOutcome, usage
from keystroke.protocol import chat
from keystroke.protocol.faults import error_detail
from keystroke.protocol.items import ChosenToken, CompactionItem
from keystroke.protocol.response import (
    Compacted,
    ErrorBody,
    Incomplete,
    Receipt,
    Response,
    Routing,
    Shortened,
)
from keystroke.protocol.stream import ResponseStream


class Serializer(ABC):
    id: str

    def on_created(self) -> list[Any]:
        return []

    def on_queued(self, position: int) -> list[Any]:
        return []

    def on_started(self) -> list[Any]:
        return []

    @abstractmethod
    def on_text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]: ...

    @abstractmethod
    def on_reasoning(self, delta: str) -> list[Any]: ...

    @abstractmethod
    def on_call(self, tool: OfferedTool) -> list[Any]:
        """A tool call begins; its arguments follow in deltas, then its end."""

    @abstractmethod
    def on_call_delta(self, delta: str) -> list[Any]: ...

    def on_call_done(self) -> list[Any]:
        return []

    @abstractmethod
    def on_end(self, outcome: WorkOutcome) -> list[Any]: ...


class ResponseSerializer(ResponseStream, Serializer):
    """Responses API events. `opening`: items before those of the model. Calls after the first `max_calls` are
    left out."""

    def __init__(
        self,
        response: Response,
        stream_id: str | None = None,
        *,
        opening: Sequence[CompactionItem] = (),
        max_calls: int | None = None,
    ) -> None:
        super().__init__(response, stream_id)
        self._opening = opening
        self._calls_left = max_calls
        self._leaving_out = False

    def on_started(self) -> list[Any]:
        started: list[Any] = super().on_started()
        for item in self._opening:
            started += self.add_compaction(item)
        self._opening = ()
        return started

    def on_call(self, tool: OfferedTool) -> list[Any]:
        if self._calls_left is not None:
            self._leaving_out = self._calls_left <= 0
            self._calls_left -= 1
        if self._leaving_out:
            return []
        return self.begin_call(tool.name, custom=tool.custom, namespace=tool.namespace)

    def on_call_delta(self, delta: str) -> list[Any]:
        return [] if self._leaving_out else super().on_call_delta(delta)

    def on_end(self, outcome: WorkOutcome) -> list[Any]:
        incomplete = None
        if outcome.status == "incomplete":
            reason = {"steered": "steered", "grammar": "grammar"}.get(outcome.finish, "max_output_tokens")
            incomplete = Incomplete(reason=reason)  # type: ignore[arg-type]
        error = outcome.error if outcome.status == "failed" else None
        receipt = outcome.receipt
        return self.end(outcome.status, usage(receipt), receipt, incomplete=incomplete, error=error)


def chat_usage(receipt: Receipt) -> chat.ChatUsage:
    return chat.ChatUsage(
        prompt_tokens=receipt.input_tokens,
        completion_tokens=receipt.output_tokens,
        total_tokens=receipt.input_tokens + receipt.output_tokens,
        prompt_tokens_details=chat.PromptTokenDetails(cached_tokens=receipt.reused_tokens),
        completion_tokens_details=chat.CompletionTokenDetails(
            accepted_prediction_tokens=receipt.accepted_tokens,
            rejected_prediction_tokens=receipt.drafted_tokens - receipt.accepted_tokens,
        ),
    )


class TextSerializer(Serializer):
    """What the APIs without stored responses share; `body` is the whole answer once it ended, `input_tokens`
    the length of the prompt (0: a remote server counts it), `marked_tokens` that of the longest prefix that
    the request marks."""

    input_tokens = marked_tokens = 0

    def __init__(
        self,
        identity: str,
        model: str,
        routing: Routing,
        *,
        include_usage: bool,
        shortened: Shortened | UnsetType = UNSET,
        echo: str = "",
    ) -> None:
        self.id, self.model, self.routing = identity, model, routing
        self.body: Any = None
        self.compacted: Compacted | UnsetType = UNSET
        self.notes: list[str] = []  # on fields of the request that are ignored
        self.tier = "default"
        self._include_usage, self._shortened, self._echo = include_usage, shortened, echo
        self._created = int(time.time())
        self._text: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[chat.ToolCall] = []
        self._logprobs: list[ChosenToken] = []


class ChatSerializer(TextSerializer):
    """chat.completion.chunk objects."""

    def on_created(self) -> list[Any]:
        first = self._chunk(chat.ChatDelta(role="assistant", content=""))
        first.shortened, first.compacted = self._shortened, self.compacted
        first.notes = self.notes or UNSET
        return [first]

    def on_text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]:
        self._text.append(delta)
        self._logprobs += logprobs
        chosen = chat.ChatLogprobs(list(logprobs)) if logprobs else None
        return [self._chunk(chat.ChatDelta(content=delta), logprobs=chosen)]

    def on_reasoning(self, delta: str) -> list[Any]:
        self._thoughts.append(delta)
        return [self._chunk(chat.ChatDelta(reasoning_content=delta))]

    def on_call(self, tool: OfferedTool) -> list[Any]:
        index = len(self._calls)
        identity = f"call_{self.id.removeprefix('chatcmpl_')}_{index}"
        piece = chat.FunctionPiece(tool.name)
        self._calls.append(chat.ToolCall(identity, piece))
        delta_call = chat.ToolCallPiece(index=index, id=identity, type="function", function=piece)
        return [self._chunk(chat.ChatDelta(tool_calls=[delta_call]))]

    def on_call_delta(self, delta: str) -> list[Any]:
        begun = self._calls[-1]
        piece = chat.FunctionPiece(begun.function.name, begun.function.arguments + delta)
        self._calls[-1] = chat.ToolCall(begun.id, piece)
        delta_call = chat.ToolCallPiece(
            index=len(self._calls) - 1, function=chat.FunctionPiece(arguments=delta)
        )
        return [self._chunk(chat.ChatDelta(tool_calls=[delta_call]))]

    def on_end(self, outcome: WorkOutcome) -> list[Any]:
        finish = "tool_calls" if self._calls and outcome.finish == "stop" else _finish_reason(outcome)
        spent = chat_usage(outcome.receipt)
        message = chat.AssistantMessage(
            content="".join(self._text) or (None if self._calls else ""),
            tool_calls=self._calls or UNSET,
            reasoning_content="".join(self._thoughts) if self._thoughts else UNSET,
        )
        logprobs = chat.ChatLogprobs(self._logprobs) if self._logprobs else None
        self.body = chat.ChatCompletion(
            id=self.id,
            created=self._created,
            model=self.model,
            choices=[chat.ChatChoice(message=message, finish_reason=finish, logprobs=logprobs)],
            usage=spent,
            service_tier=self.tier,
            receipt=outcome.receipt,
            routing=self.routing,
            shortened=self._shortened,
            compacted=self.compacted,
            notes=self.notes or UNSET,
        )
        if outcome.error is not None:
            return [ErrorBody(error_detail(outcome.error))]
        messages: list[Any] = [self._chunk(chat.ChatDelta(), finish)]
        if self._include_usage:
            messages.append(chat.ChatChunk(self.id, self._created, self.model, [], usage=spent))
        return messages

    def _chunk(
        self, delta: chat.ChatDelta, finish: str | None = None, logprobs: chat.ChatLogprobs | None = None
    ) -> chat.ChatChunk:
        choice = chat.ChunkChoice(delta, finish, 0, logprobs)
        return chat.ChatChunk(self.id, self._created, self.model, [choice])


class CompletionSerializer(TextSerializer):
    """text_completion objects; tool calls and reasoning are plain text."""

    def on_started(self) -> list[Any]:
        return self.on_text(self._echo, ()) if self._echo else []

    def on_text(self, delta: str, logprobs: Sequence[ChosenToken]) -> list[Any]:
        at = sum(map(len, self._text)) if logprobs else 0
        self._text.append(delta)
        self._logprobs += logprobs
        choice = chat.TextChoice(delta, logprobs=_text_logprobs(logprobs, at) if logprobs else None)
        return [chat.TextCompletion(self.id, self._created, self.model, [choice])]

    def on_reasoning(self, delta: str) -> list[Any]:
        return self.on_text(delta, ())

    def on_call(self, tool: OfferedTool) -> list[Any]:
        return []

    def on_call_delta(self, delta: str) -> list[Any]:
        return self.on_text(delta, ())

    def on_end(self, outcome: WorkOutcome) -> list[Any]:
        spent = chat_usage(outcome.receipt)
        logprobs = _text_logprobs(self._logprobs, len(self._echo)) if self._logprobs else None
        complete = chat.TextChoice("".join(self._text), _finish_reason(outcome), logprobs=logprobs)
        self.body = self._completion([complete], usage=spent, receipt=outcome.receipt, routing=self.routing)
        if outcome.error is not None:
            return [ErrorBody(error_detail(outcome.error))]
        last = chat.TextChoice("", _finish_reason(outcome))
        messages: list[Any] = [self._completion([last])]
        if self._include_usage:
            messages.append(self._completion([], usage=spent))
        return messages

    def _completion(self, choices: list[chat.TextChoice], **more: Any) -> chat.TextCompletion:
        return chat.TextCompletion(self.id, self._created, self.model, choices, **more)

    @property
    def text(self) -> str:
        return "".join(self._text)


def _finish_reason(outcome: WorkOutcome) -> str:
    """These APIs have no reason for a grammar that could not continue: report a length limit."""
    return "length" if outcome.finish == "grammar" else outcome.finish


def _text_logprobs(chosen: Sequence[ChosenToken], at: int) -> chat.TextLogprobs:
    """`at`: where the first of the tokens is in the text."""
    offsets = []
    for token in chosen:
        offsets.append(at)
        at += len(token.token)
    return chat.TextLogprobs(
        tokens=[t.token for t in chosen],
        token_logprobs=[t.logprob for t in chosen],
        top_logprobs=[{c.token: c.logprob for c in t.top_logprobs} for t in chosen],
        text_offset=offsets,
    )
