"""A model on an OpenAI-compatible server.

The server holds no session for us, so a redirection sends the longer conversation again; its prefix cache
makes that cheap. Tool calls are the server's own. Nothing is sent anywhere but to the endpoint given.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

from keystroke.agent.chat.model import (
    AnswerOptions,
    AnswerReport,
    CompletionModel,
    ModelAnswer,
    ModelFacts,
    RequestStream,
)
from keystroke.agent.chat.receipt import Price
from keystroke.agent.chat.steering import Message
from keystroke.assist.completion import Ending, trim_text
from keystroke.assist.completion.run import read_until_ending
from keystroke.engine.generation import Chunk
from keystroke.engine.remote import BlockingModel, StreamItem, ToolCallDelta, Usage
from keystroke.errors import UnsupportedModel


class RemoteChatModel(CompletionModel):
    """`close` closes `server`, too. `name` is what users call the model; by default the server's own name."""

    def __init__(self, server: BlockingModel, *, name: str = "", price: Price | None = None) -> None:
        self.server, self.name = server, name or server.model.name
        self.price = price or Price()

    def answer(self, messages: Sequence[Message], options: AnswerOptions | None = None) -> ModelAnswer:
        """Servers differ in whether they take a prediction, so none is sent."""
        options = options or AnswerOptions()
        return _RemoteStream(
            self,
            messages,
            options,
            lambda messages: self.server.stream_chat(
                messages, options.params, options.tools or None, options.interrupt
            ),
        )

    def generate(self, prompt: str, options: AnswerOptions) -> ModelAnswer:
        return self._continue(prompt, None, options)

    def _continue(self, before: str, after: str | None, options: AnswerOptions) -> ModelAnswer:
        return _RemoteStream(
            self,
            (),
            options,
            lambda _: self.server.stream_completion(before, after, options.params, options.interrupt),
        )

    def complete(
        self, prefix: str, suffix: str, options: AnswerOptions, *, lines: int, budget: int
    ) -> tuple[str, AnswerReport]:
        before, after = trim_text(prefix, suffix, budget=budget)
        ending = Ending.at(prefix, suffix, lines)
        try:
            return self._complete_text(before, after or None, ending, options)
        except UnsupportedModel:
            if not after:
                raise
            # It cannot fill in the middle: like such a model on this machine, it continues what is before.
            return self._complete_text(before, None, ending, options)

    def _complete_text(
        self, before: str, after: str | None, ending: Ending, options: AnswerOptions
    ) -> tuple[str, AnswerReport]:
        with self._continue(before, after, options) as stream:
            text, _ = read_until_ending((Chunk(piece) for piece in stream), ending)
        return text, stream.report()

    @property
    def facts(self) -> ModelFacts:
        remote = self.server.model
        return ModelFacts(f"{remote.endpoint.base_url}#{remote.name}")

    def close(self) -> None:
        self.server.close()


class _RemoteStream(RequestStream):
    def __init__(
        self,
        model: RemoteChatModel,
        messages: Sequence[Message],
        options: AnswerOptions,
        send: Callable[[Sequence[Message]], Iterator[StreamItem]],
    ) -> None:
        super().__init__(model, messages, options)
        self._send = send

    def _request(self) -> Generator[str]:
        with closing(self._send(self.messages)) as items:  # type: ignore[type-var]  # it is a generator
            for item in items:
                if isinstance(item, Chunk):
                    self.finish = item.finish
                    yield item.text
                elif isinstance(item, ToolCallDelta):
                    self._add_call_delta(item)
                    yield ""
                elif isinstance(item, Usage):
                    self.prompt_tokens += item.prompt_tokens
                    self.reused_tokens += item.cached_tokens
                    self.tokens += item.completion_tokens
