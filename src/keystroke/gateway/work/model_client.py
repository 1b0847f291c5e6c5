"""Short internal requests to a model: tokens in, tokens and their log-probabilities out.

A request goes through the model's queue like all work; cancelling the awaiting task cancels it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keystroke.assist.next_edit import EngineAnswer
from keystroke.engine.base import TokenLogprob
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.engine.speculative import Drafter
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """A served model together with the caller on whose budget it is used."""

    service: Service
    entry: ServedModel
    caller: Caller


class ModelClient:
    """Requests of one caller to one model, with the sum of their tokens."""

    def __init__(self, service: Service, entry: ServedModel, caller: Caller, affinity: str) -> None:
        self.service, self.entry, self.caller = service, entry, caller
        self._affinity = affinity
        self.input_tokens = self.output_tokens = 0

    async def __call__(
        self, tokens: Sequence[int], params: GenerationParams, drafter: Drafter | None = None
    ) -> EngineAnswer:
        """The whole answer. Raises KeystrokeError where the queue or the engine refuses."""
        generated: list[int] = []
        logprobs: list[TokenLogprob] = []

        def collect(chunk: Chunk) -> bool:
            generated.extend(chunk.tokens)
            logprobs.extend(chunk.logprobs)
            return False

        await self.stream(tokens, params, drafter, collect)
        return EngineAnswer(tuple(generated), tuple(logprobs))

    async def stream(
        self,
        tokens: Sequence[int],
        params: GenerationParams,
        drafter: Drafter | None,
        should_stop: Callable[[Chunk], bool],
    ) -> None:
        """Pass each chunk of the answer to `should_stop`; stop generating once it returns True."""
        service, entry = self.service, self.entry
        job = Job(tokens, params, drafter if service.speculation else None, affinity=self._affinity)
        work = await service.enqueue(entry, job, self.caller, priority=Priority.NEXT_EDIT, live=True)
        self.input_tokens += len(tokens)

        def count_tokens(chunk: Chunk) -> bool:
            self.output_tokens += len(chunk.tokens)
            return should_stop(chunk)

        await work.read_chunks(count_tokens)
