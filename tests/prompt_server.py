"""A uvicorn server in a thread that ends as soon as it is told to.

uvicorn looks ten times a second whether it should end, and then waits a tenth of a second for connections
that may be open: hundreds of tests start a server of their own and would spend most of their time on that.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import uvicorn


class PromptServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """End in order; called from any thread."""
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it ended by itself, and its loop with it
                self._loop.call_soon_threadsafe(self._stop.set)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in tuple(state.connections):
            connection.shutdown()
        for _ in range(20):
            if not state.connections and not state.tasks:
                await self.lifespan.shutdown()
                return
            await asyncio.sleep(0.005)
        await super().shutdown(sockets)  # what is still open gets the time that uvicorn gives it
