"""A model of the gateway that all commands share, answering like one loaded here.

The same questions give the same text as a model in this process; only who loaded it differs. Stopping an
answer stops that answer and nothing else. A gateway that is gone before the first word is found again, or
another is started; one that goes in the middle of an answer ends it with one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keystroke.assist.completion import Ending
from keystroke.assist.completion.run import held_before, settle
from keystroke.clients.cli.answering import Answer, Facts, Message, Report, Speaker
from keystroke.clients.gateway_http import GatewayHttp, Gone
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.errors import KeystrokeError, Unavailable, UnsupportedModel
from keystroke.protocol.chat import ChatChunk, ChatUsage, TextChoice, TextCompletion
from keystroke.protocol.status import ModelStatus, Waiting

if TYPE_CHECKING:
    from keystroke.clients.cli.console import Console
    from keystroke.clients.local_gateway import LocalGateway

_NEAR = 16  # characters a token may have: what is farther from the cursor cannot be in the prompt
_FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH}


class NoGateway(Unavailable):
    """No gateway can be had on this machine."""


class GatewaySpeaker(Speaker):
    def __init__(self, name: str, asked: str, gateway: LocalGateway, console: Console) -> None:
        """`asked` is what the gateway knows the model by. Raises NoGateway, and what loading the model
        raises."""
        self.name = name
        self.console = console
        self._asked, self._gateway = asked, gateway
        self.http: GatewayHttp
        self.status: ModelStatus
        # One that says it runs is asked at once: whether it is well is seen from whether it answers.
        if (place := gateway.said()) is not None:
            with console.progress() as progress, suppress(Gone):
                self.http = GatewayHttp(place)
                self.status = self.http.load(asked, progress)
                return
        self.again()

    def again(self) -> None:
        """Find the gateway again, or start another, with the model loaded."""
        with self.console.progress() as progress:
            try:
                place = self._gateway.locate_now(watch=progress)
            except (KeystrokeError, OSError) as error:
                raise NoGateway(str(error)) from None
            self.http = GatewayHttp(place)
            self.status = self.http.load(self._asked, progress)

    def chat(
        self,
        messages: Sequence[Message],
        params: GenerationParams,
        interrupt: Interrupt,
        prediction: str | None = None,
    ) -> GatewayAnswer:
        body: dict[str, Any] = {"messages": list(messages)}
        if prediction:
            body["prediction"] = {"type": "content", "content": prediction}
        return GatewayAnswer(self, "/v1/chat/completions", ChatChunk, body, params, interrupt)

    def generate(self, prompt: str, params: GenerationParams, interrupt: Interrupt) -> GatewayAnswer:
        body = {"prompt": prompt, "literal": True, "priority": "chat"}
        return GatewayAnswer(self, "/v1/completions", TextCompletion, body, params, interrupt)

    def complete(
        self,
        prefix: str,
        suffix: str,
        lines: int,
        budget: int,
        params: GenerationParams,
        interrupt: Interrupt,
    ) -> tuple[str, Report]:
        reach = (budget + 64) * _NEAR
        body = {"prompt": prefix[-reach:], "suffix": suffix[:reach], "context": budget, "lines": lines}
        answer = GatewayAnswer(self, "/v1/completions", TextCompletion, body, params, interrupt)
        held = held_before(prefix, suffix, fills_in=self.status.fill_in is not None)
        chunks = answer.shown(answer.chunks())
        text, _ = settle(chunks, Ending.at(prefix, suffix, lines), held=held)
        for _ in chunks:  # the gateway knows as soon as we do; what it counted comes last
            continue
        report = answer.report()
        # Where a line is held back until it is sure, when its first text came says nothing about the pace.
        pace = report.tokens / report.seconds if report.seconds > 0 else 0.0
        return text, replace(report, tokens_per_second=pace)

    def check_chat(self) -> None:
        if self.status.chat is False:
            raise UnsupportedModel(
                f"{self.name} has no chat template; use `keystroke generate` or another model"
            )

    @property
    def facts(self) -> Facts:
        known = self.status
        return Facts(
            f"{known.path or known.name}:{known.weight_bytes}",
            known.parameters,
            known.path,
            bool(known.chat),
            frozenset(known.languages) if known.languages is not None else None,
        )

    def close(self) -> None:
        """Nothing is held here: the model stays loaded for the next command."""


class GatewayAnswer(Answer):
    def __init__(
        self,
        speaker: GatewaySpeaker,
        path: str,
        kind: type[ChatChunk] | type[TextCompletion],
        body: dict[str, Any],
        params: GenerationParams,
        interrupt: Interrupt,
    ) -> None:
        super().__init__(speaker.console)
        self._speaker, self._path, self._kind, self._interrupt = speaker, path, kind, interrupt
        self._body = {
            **_wish(params),
            **body,
            "model": speaker._asked,
            "stream_options": {"include_usage": True},
        }
        self._usage: ChatUsage | None = None
        self._waiting: Waiting | None = None
        self._redirected: list[Message] | None = None

    def waiting(self) -> tuple[str, int, int] | None:
        if (sign := self._waiting) is None:
            return None
        if sign.position:
            return f"waiting, {sign.position} in the queue", 0, 0
        return "reading the prompt", sign.read, sign.prompt

    def _pieces(self) -> Iterator[str]:
        for chunk in self.chunks():
            yield chunk.text

    def chunks(self) -> Iterator[Chunk]:
        """The answer as an engine here would give it."""
        spoke = retried = False
        while True:
            try:
                for chunk in self._once():
                    spoke = spoke or bool(chunk.text)
                    yield chunk
            except Unavailable:
                # Nothing was said yet, so asking again changes nothing: it left, or is about to.
                if spoke or retried:
                    raise
                retried = True
                self._speaker.again()
                continue
            if self._redirected is None:
                return
            self._body["messages"], self._redirected = self._redirected, None
            spoke = retried = False

    def _once(self) -> Iterator[Chunk]:
        with self._speaker.http.stream(self._path, self._body, self._kind) as stream:
            self._interrupt.add_callback(stream.close)
            try:
                for item in stream:
                    if isinstance(item, Waiting):
                        self._waiting = item
                        continue
                    yield from self._read(item)
                    if self._redirected is not None:
                        return
                if self._interrupt.is_set:
                    self.finish = Finish.INTERRUPTED
                    yield Chunk("", finish=self.finish)
            finally:
                self._interrupt.remove_callback(stream.close)

    def _read(self, item: ChatChunk | TextCompletion) -> Iterator[Chunk]:
        if isinstance(item.usage, ChatUsage):
            self._usage = item.usage
        for choice in item.choices:
            said = choice.text if isinstance(choice, TextChoice) else choice.delta.content
            if choice.finish_reason is not None:
                self.finish = _FINISHES.get(choice.finish_reason, Finish.STOP)
            elif isinstance(said, str) and said:
                yield Chunk(said)

    def redirect(self, messages: Sequence[Message], line: str) -> None:
        self._redirected = [*messages, {"role": "user", "content": line}]

    def report(self) -> Report:
        usage = self._usage
        tokens = usage.completion_tokens if usage is not None else 0
        details = usage.completion_tokens_details if usage is not None else None
        accepted = details.accepted_prediction_tokens if details is not None else 0
        rejected = details.rejected_prediction_tokens if details is not None else 0
        decode = self.seconds - self.first_text_seconds
        return Report(
            model=self._speaker.name,
            finish=str(self.finish or Finish.STOP),
            prompt_tokens=usage.prompt_tokens if usage is not None else 0,
            reused_tokens=usage.prompt_tokens_details.cached_tokens if usage is not None else 0,
            tokens=tokens,
            first_text_seconds=self.first_text_seconds,
            seconds=self.seconds,
            tokens_per_second=tokens / decode if tokens and decode > 0 else 0.0,
            drafted=accepted + rejected,
            accepted=accepted,
        )


def _wish(params: GenerationParams) -> dict[str, Any]:
    sampling = params.sampling
    wish: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "max_tokens": params.max_tokens,
    }
    if params.stop:
        wish["stop"] = list(params.stop)
    return {key: value for key, value in wish.items() if value is not None}
