"""Several answers to one prompt (`n`), as the choices of one completion.

Each choice is a run of its own, so all limits and receipts apply to each; the prompt is read once, because
the runs share it in the prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from keystroke.errors import KeystrokeError
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.api.answer import Sink
from keystroke.gateway.api.completions import TextRun
from keystroke.protocol.chat import ChatChunk, ChatUsage, TextCompletion
from keystroke.protocol.requests import ChatRequest, CompletionRequest

StartRun = Callable[..., Awaitable[TextRun]]


class Choices:
    """The running choices of one request; has what a `TextRun` has. `work` is that of the first."""

    def __init__(self, sink: Sink, on_done: Callable[[], None] | None, count: int) -> None:
        self.over = asyncio.Event()
        self.work: Any = None  # its Work; None until every choice was started
        self._sink, self._on_done = sink, on_done
        self._runs: list[TextRun] = []
        self._count = self._left = count
        self._usages: list[ChatUsage] = []
        self._identity = ""

    @property
    def serializer(self) -> Choices:
        return self

    @property
    def error(self) -> KeystrokeError | None:
        return next((run.error for run in self._runs if run.error is not None), None)

    @property
    def body(self) -> Any:
        """The whole completion."""
        bodies = [run.serializer.body for run in self._runs]
        choices = [replace(body.choices[0], index=at) for at, body in enumerate(bodies)]
        return replace(bodies[0], choices=choices, usage=_sum_usages([body.usage for body in bodies]))

    async def start(self, start: StartRun, request: ChatRequest | CompletionRequest, caller: Caller) -> None:
        """Start every choice. Raises what starting one raises; then none runs."""
        try:
            for index in range(self._count):
                seed = None if request.seed is None else request.seed + index
                one = replace(request, n=None, seed=seed)
                run = await start(one, caller, self._choice_sink(index), on_done=self._on_run_done)
                self._runs.append(run)
        except BaseException:
            for run in self._runs:
                run.cancel()
            raise
        self.work = self._runs[0].work
        self._check_over()

    def pause(self) -> None:
        for run in self._runs:
            run.pause()

    def resume(self) -> None:
        for run in self._runs:
            run.resume()

    def cancel(self, reason: KeystrokeError | None = None) -> None:
        for run in self._runs:
            run.cancel(reason)

    def disconnect(self, _sink: Sink, reason: KeystrokeError) -> None:
        self.cancel(reason)

    def _choice_sink(self, index: int) -> Sink:
        def sink(messages: list[Any]) -> None:
            self._sink([made for m in messages if (made := self._as_choice(m, index)) is not None])

        return sink

    def _as_choice(self, message: Any, index: int) -> Any:
        """A message of one run as one of the whole completion; its usage waits for the others."""
        if not isinstance(message, ChatChunk | TextCompletion):
            return message
        self._identity = self._identity or message.id
        if isinstance(message.usage, ChatUsage):
            self._usages.append(message.usage)
            if len(self._usages) < self._count:
                return None
            return replace(message, id=self._identity, usage=_sum_usages(self._usages))
        choices: Any = [replace(choice, index=index) for choice in message.choices]
        return replace(message, id=self._identity, choices=choices, usage=UNSET)

    def _on_run_done(self) -> None:
        self._left -= 1
        self._check_over()

    def _check_over(self) -> None:
        if self._left == 0 and self.work is not None and not self.over.is_set():
            self.over.set()
            if self._on_done is not None:
                self._on_done()


def _sum_usages(usages: list[ChatUsage]) -> ChatUsage:
    written = sum(usage.completion_tokens for usage in usages)
    first = usages[0]
    return replace(first, completion_tokens=written, total_tokens=first.prompt_tokens + written)


def starting_choices(start: StartRun, count: int) -> Callable[..., Awaitable[Choices]]:
    """`start`, which starts one answer, for `count` of them."""

    async def begin(
        request: Any, caller: Caller, sink: Sink, *, on_done: Callable[[], None] | None = None
    ) -> Choices:
        choices = Choices(sink, on_done, count)
        await choices.start(start, request, caller)
        return choices

    return begin
