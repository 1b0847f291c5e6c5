"""A model of the gateway that all commands share.

The same request gives the same text as a model in this process. Stopping an answer stops that answer and
nothing else. A gateway that is gone before the first word is found again, or another is started; one that
goes in the middle of an answer ends it with an error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keystroke.agent.chat.model import (
    AnswerOptions,
    AnswerReport,
    CompletionModel,
    ModelAnswer,
    ModelFacts,
    RequestStream,
    WaitState,
)
from keystroke.agent.chat.steering import Message
from keystroke.assist.completion import Ending
from keystroke.assist.completion.run import ConfidenceMeter, read_until_ending, repeated_text
from keystroke.clients.gateway_http import GatewayGone, GatewayHttp
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.errors import KeystrokeError, Unavailable
from keystroke.protocol.chat import ChatChunk, ChatUsage, TextChoice, TextCompletion
from keystroke.protocol.status import ModelStatus, WaitingNotice

if TYPE_CHECKING:
    from keystroke.clients.cli.console import Console
    from keystroke.clients.local_gateway import LocalGateway

_TOKEN_CHARACTERS = 16  # at most, nearly always: text farther from the cursor cannot be in the prompt
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


class NoGateway(Unavailable):
    """No gateway can be reached or started on this machine."""


class GatewayChatModel(CompletionModel):
    def __init__(self, name: str, served_name: str, gateway: LocalGateway, console: Console) -> None:
        """`served_name` is the gateway's name of the model. Raises NoGateway, and what loading the model
        raises."""
        self.name, self.served_name = name, served_name
        self.show_wait = console.waiting
        self._console, self._gateway = console, gateway
        self.http: GatewayHttp
        self.status: ModelStatus
        # A gateway that is registered is asked at once: its answer shows whether it is healthy.
        if (place := gateway.announced_address()) is not None:
            with console.progress() as progress, suppress(GatewayGone):
                self.http = GatewayHttp(place)
                self.status = self.http.load(served_name, progress)
                return
        self.reconnect()

    def reconnect(self) -> None:
        """Find the gateway again, or start another, with the model loaded."""
        with self._console.progress() as progress:
            try:
                place = self._gateway.locate_blocking(on_progress=progress)
            except (KeystrokeError, OSError) as error:
                raise NoGateway(str(error)) from None
            self.http = GatewayHttp(place)
            self.status = self.http.load(self.served_name, progress)

    def answer(self, messages: Sequence[Message], options: AnswerOptions | None = None) -> ModelAnswer:
        options = options or AnswerOptions()
        prediction = {"type": "content", "content": options.prediction}
        body: dict[str, Any] = {"prediction": prediction} if options.prediction else {}
        if options.yields:
            body["service_tier"] = "flex"
        return _GatewayStream(self, "/v1/chat/completions", ChatChunk, body, options, messages)

    def generate(self, prompt: str, options: AnswerOptions) -> ModelAnswer:
        body = {"prompt": prompt, "literal": True, "priority": "chat"}
        return _GatewayStream(self, "/v1/completions", TextCompletion, body, options)

    def complete(
        self, prefix: str, suffix: str, options: AnswerOptions, *, lines: int, budget: int
    ) -> tuple[str, AnswerReport]:
        reach = (budget + 64) * _TOKEN_CHARACTERS
        body = {"prompt": prefix[-reach:], "suffix": suffix[:reach], "context": budget, "lines": lines}
        body["logprobs"] = 0
        stream = _GatewayStream(self, "/v1/completions", TextCompletion, body, options)
        repeated = repeated_text(prefix, suffix, fills_in=self.status.fill_in is not None)
        chunks = (Chunk(piece) for piece in stream)
        text, _ = read_until_ending(chunks, Ending.at(prefix, suffix, lines), repeated=repeated)
        for _ in stream:  # the gateway stops at the same place; its token counts come last
            continue
        report = stream.report()
        # A line is held back until it is certain, so the time of its first text says nothing about the rate.
        rate = report.tokens / report.seconds if report.seconds > 0 else 0.0
        sure = stream.meter.value(repeated, text)
        return text, replace(report, tokens_per_second=rate, confidence=sure)

    @property
    def parallel_attempts(self) -> int:  # type: ignore[override]
        return self.status.parallel

    @property
    def joint_attempts(self) -> int:  # type: ignore[override]
        return self.status.joint

    @property
    def facts(self) -> ModelFacts:
        status = self.status
        return ModelFacts(
            f"{status.path or status.name}:{status.weight_bytes}",
            status.parameters,
            status.path,
            status.chat is not False,
            frozenset(status.languages) if status.languages is not None else None,
        )


class _GatewayStream(RequestStream):
    model: GatewayChatModel

    def __init__(
        self,
        model: GatewayChatModel,
        path: str,
        kind: type[ChatChunk] | type[TextCompletion],
        body: dict[str, Any],
        options: AnswerOptions,
        messages: Sequence[Message] = (),
    ) -> None:
        super().__init__(model, messages, options)
        self._path, self._kind = path, kind
        self._body = {
            **_sampling_fields(options.params),
            **body,
            "model": model.served_name,
            "stream_options": {"include_usage": True},
        }
        self._waiting: WaitingNotice | None = None
        self.meter = ConfidenceMeter()

    def wait_state(self) -> WaitState | None:
        if (state := self._waiting) is None:
            return None
        if state.position:
            return f"waiting, {state.position} in the queue", 0, 0
        return "reading the prompt", state.read, state.prompt

    def _request(self) -> Generator[str]:
        if self._kind is ChatChunk:
            self._body["messages"] = self.messages
        has_text = False
        try:
            for piece in self._send():
                has_text = True
                yield piece
        except Unavailable:
            if has_text:
                raise
            # No text has come yet, so sending the request again changes nothing.
            self.model.reconnect()
            yield from self._send()

    def _send(self) -> Iterator[str]:
        interrupt = self.options.interrupt
        with self.model.http.stream(self._path, self._body, self._kind) as stream:
            interrupt.add_callback(stream.close)
            try:
                for item in stream:
                    if isinstance(item, WaitingNotice):
                        self._waiting = item
                    else:
                        yield from self._read(item)
                if interrupt.is_set:
                    self.finish = Finish.INTERRUPTED
            finally:
                interrupt.remove_callback(stream.close)

    def _read(self, item: ChatChunk | TextCompletion) -> Iterator[str]:
        if isinstance(usage := item.usage, ChatUsage):
            self.prompt_tokens += usage.prompt_tokens
            self.reused_tokens += usage.prompt_tokens_details.cached_tokens
            self.tokens += usage.completion_tokens
            if (details := usage.completion_tokens_details) is not None:
                self.accepted += details.accepted_prediction_tokens
                self.drafted += details.accepted_prediction_tokens + details.rejected_prediction_tokens
        for choice in item.choices:
            text = choice.text if isinstance(choice, TextChoice) else choice.delta.content
            if isinstance(choice, TextChoice) and (logprobs := choice.logprobs) is not None:
                for token, logprob in zip(logprobs.tokens, logprobs.token_logprobs, strict=False):
                    self.meter.add(token, (logprob,))
            if choice.finish_reason is not None:
                self.finish = _FINISHES.get(choice.finish_reason, Finish.STOP)
            elif isinstance(text, str) and text:
                yield text


def _sampling_fields(params: GenerationParams) -> dict[str, Any]:
    sampling = params.sampling
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "max_tokens": params.max_tokens,
        "stop": list(params.stop) or None,
    }
    return {key: value for key, value in fields.items() if value is not None}
