"""A remote model for code without an event loop, such as the command line and scripts.

Offers the streams of `RemoteModel` as blocking iterators for one thread. Between items nothing runs. An
exception or an early exit closes the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from keystroke.engine.base import Interrupt
from keystroke.engine.generation import GenerationParams
from keystroke.engine.remote.remote_model import Health, ListedModel, RemoteModel
from keystroke.engine.remote.wire import StreamItem

_T = TypeVar("_T")


class BlockingModel:
    """Wraps `model`, which must not have been used yet. Call it from one thread at a time."""

    def __init__(self, model: RemoteModel) -> None:
        self.model = model
        self._loop = asyncio.new_event_loop()

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: GenerationParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        interrupt: Interrupt | None = None,
    ) -> Iterator[StreamItem]:
        return self._pull(self.model.stream_chat(messages, params, tools, interrupt))

    def stream_completion(
        self,
        prompt: str,
        suffix: str | None = None,
        params: GenerationParams | None = None,
        interrupt: Interrupt | None = None,
    ) -> Iterator[StreamItem]:
        return self._pull(self.model.stream_completion(prompt, suffix, params, interrupt))

    def models(self) -> tuple[ListedModel, ...]:
        return self._run(self.model.models())

    def probe(self) -> Health:
        return self._run(self.model.probe())

    def close(self) -> None:
        if not self._loop.is_closed():
            self._run(self.model.aclose())
            self._run(self._loop.shutdown_asyncgens())
            self._loop.close()

    def __enter__(self) -> BlockingModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pull(self, items: AsyncGenerator[StreamItem, None]) -> Iterator[StreamItem]:
        try:
            while (item := self._run(_next(items))) is not None:
                yield item
        finally:
            self._run(_end(items))

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` to completion. On an exception such as Ctrl-C it is cancelled and awaited first."""
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise


async def _next(items: AsyncGenerator[StreamItem, None]) -> StreamItem | None:
    return await anext(items, None)


async def _end(items: AsyncGenerator[StreamItem, None]) -> None:
    await items.aclose()
