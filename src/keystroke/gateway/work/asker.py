"""One short question to a model, awaited whole: tokens in, tokens and their chances out.

The question goes through the model's queue like everybody's work; cancelling the awaiting task cancels
it. What the answer means is the asker's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing

from keystroke.assist.next_edit import Said
from keystroke.engine.base import TokenLogprob
from keystroke.engine.generation import Chunk, GenerationParams
from keystroke.engine.speculative import Drafter
from keystroke.gateway.access.keys import Caller
from keystroke.gateway.work.priority import Priority
from keystroke.gateway.work.registry import ServedModel
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.service import Service


class Asker:
    """Questions of one caller to one model. `read` and `written` count their tokens."""

    def __init__(self, service: Service, entry: ServedModel, caller: Caller, affinity: str) -> None:
        self.service, self.entry, self.caller = service, entry, caller
        self._affinity = affinity
        self.read = self.written = 0

    async def __call__(
        self, tokens: Sequence[int], params: GenerationParams, drafter: Drafter | None = None
    ) -> Said:
        """Raises KeystrokeError where the queue or the engine refuses."""
        said: list[int] = []
        chances: list[TokenLogprob] = []

        def take(chunk: Chunk) -> bool:
            said.extend(chunk.tokens)
            chances.extend(chunk.logprobs)
            return False

        await self.read_out(tokens, params, drafter, take)
        return Said(tuple(said), tuple(chances))

    async def read_out(
        self,
        tokens: Sequence[int],
        params: GenerationParams,
        drafter: Drafter | None,
        enough: Callable[[Chunk], bool],
    ) -> None:
        """Give each piece of the answer to `enough`, until it says so; the rest is not made."""
        service, entry = self.service, self.entry
        job = Job(tokens, params, drafter if service.speculation else None, affinity=self._affinity)
        permit = await service.admitted(entry, job, self.caller)
        work = service.submit(entry, job, self.caller, priority=Priority.NEXT_EDIT, live=True, permit=permit)
        self.read += len(tokens)
        async with aclosing(work.items()) as items:
            async for item in items:
                if isinstance(item, Chunk):
                    self.written += len(item.tokens)
                    if enough(item):
                        work.enough()
                        return
