"""A model behind an OpenAI-compatible server, answering like one on this machine.

A redirection is a stream cut and another begun with what was said so far; the server's own prefix
cache makes that cheap. Nothing is sent anywhere but to the endpoint given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keystroke.assist.completion import Ending, trim_text
from keystroke.assist.completion.run import settle
from keystroke.clients.cli.answering import Answer, Facts, Message, Report, Speaker
from keystroke.engine.base import Interrupt
from keystroke.engine.generation import Chunk, Finish, GenerationParams
from keystroke.engine.remote import BlockingModel, Endpoint, RemoteModel, StreamItem, Usage
from keystroke.errors import UnsupportedModel


class RemoteSpeaker(Speaker):
    def __init__(self, name: str, endpoint: Endpoint, model: str) -> None:
        self.name = name
        self.model = BlockingModel(RemoteModel(endpoint, model))

    def chat(
        self,
        messages: Sequence[Message],
        params: GenerationParams,
        interrupt: Interrupt,
        prediction: str | None = None,
    ) -> RemoteAnswer:
        """Servers differ in whether they take a prediction, so none is sent."""
        answer = RemoteAnswer(self, params, interrupt)
        answer.begin(messages)
        return answer

    def generate(self, prompt: str, params: GenerationParams, interrupt: Interrupt) -> RemoteAnswer:
        answer = RemoteAnswer(self, params, interrupt)
        answer.stream = self.model.stream_completion(prompt, None, params, interrupt)
        return answer

    def complete(
        self,
        prefix: str,
        suffix: str,
        lines: int,
        budget: int,
        params: GenerationParams,
        interrupt: Interrupt,
    ) -> tuple[str, Report]:
        before, after = trim_text(prefix, suffix, budget=budget)
        ending = Ending.at(prefix, suffix, lines)
        try:
            return self._completed(before, after or None, ending, params, interrupt)
        except UnsupportedModel:
            if not after:
                raise
            # It cannot fill in the middle: like such a model on this machine, it goes on from what is before.
            return self._completed(before, None, ending, params, interrupt)

    def _completed(
        self, before: str, after: str | None, ending: Ending, params: GenerationParams, interrupt: Interrupt
    ) -> tuple[str, Report]:
        answer = RemoteAnswer(self, params, interrupt)
        answer.stream = self.model.stream_completion(before, after, params, interrupt)
        try:
            text, _ = settle((Chunk(piece) for piece in answer), ending)
        finally:
            answer.cut()
        return text, answer.report()

    @property
    def facts(self) -> Facts:
        remote = self.model.model
        return Facts(f"{remote.endpoint.base_url}#{remote.name}")

    def close(self) -> None:
        self.model.close()


class RemoteAnswer(Answer):
    def __init__(self, speaker: RemoteSpeaker, params: GenerationParams, interrupt: Interrupt) -> None:
        super().__init__()
        self.stream: Iterator[StreamItem] = iter(())
        self._speaker, self._params, self._interrupt = speaker, params, interrupt
        self._usage = Usage(0, 0, 0)

    def begin(self, messages: Sequence[Message]) -> None:
        self.stream = self._speaker.model.stream_chat(messages, self._params, None, self._interrupt)

    def cut(self) -> None:
        """End the stream under way, if there is one."""
        close = getattr(self.stream, "close", None)
        if close is not None:
            close()

    def _pieces(self) -> Iterator[str]:
        # `redirect` puts another stream in place between two pieces, so each pull asks anew.
        while (item := next(self.stream, None)) is not None:
            if isinstance(item, Usage):
                self._usage = item
            elif isinstance(item, Chunk):
                self.finish = item.finish
                yield item.text

    def redirect(self, messages: Sequence[Message], line: str) -> None:
        self.cut()
        self.begin([*messages, {"role": "user", "content": line}])

    def report(self) -> Report:
        tokens = self._usage.completion_tokens
        decode = self.seconds - self.first_text_seconds
        return Report(
            model=self._speaker.name,
            finish=str(self.finish or Finish.STOP),
            prompt_tokens=self._usage.prompt_tokens,
            reused_tokens=self._usage.cached_tokens,
            tokens=tokens,
            first_text_seconds=self.first_text_seconds,
            seconds=self.seconds,
            tokens_per_second=tokens / decode if tokens and decode > 0 else 0.0,
        )
