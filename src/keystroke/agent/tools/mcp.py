"""Tools of the user's own: those of MCP servers, which are programs that the user has installed.

Off unless the user names a server for a task, and only servers of the user's own file can be named.
Their programs run outside the sandbox, so every call is asked for like a command that nothing confines,
whatever the level of approvals. What they say about themselves and return is data: it is cut, shown to the
model as text, and gives nobody any permission.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from keystroke.agent.tools.call import Result, Tool
from keystroke.agent.tools.run import Approve, Command
from keystroke.engine.base import Interrupt
from keystroke.errors import ConfigError, Forbidden, InputError, Interrupted, Unavailable

_START = 30.0  # seconds a server may take to begin
_CALL = 120.0  # seconds a call may take
_LOOK = 0.05
_WORDS = 400  # characters of a tool's own description that a model is shown
_TOOLS = 20  # of one server; more would drown a small context


class McpServer(msgspec.Struct, frozen=True):
    """One entry of the file: the program that is the server."""

    command: str
    args: list[str] = []
    env: dict[str, str] = {}


class _File(msgspec.Struct):
    mcpServers: dict[str, McpServer] = {}  # noqa: N815 - the name that every such file uses


def named_servers(file: Path | None, names: Sequence[str]) -> dict[str, McpServer]:
    """The servers called `names` of the user's file. ConfigError where there is none of that name."""
    if not names:
        return {}
    if file is None:
        raise ConfigError("no MCP servers are set up; name their file as assist.mcp_servers")
    try:
        known = msgspec.json.decode(file.expanduser().read_bytes(), type=_File).mcpServers
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"the MCP servers in {file} cannot be read: {error}") from None
    for name in names:
        if name not in known:
            raise ConfigError(f"{file} has no MCP server {name!r:.40}; it has {', '.join(known) or 'none'}")
    return {name: known[name] for name in names}


class McpTools:
    """The tools of some servers, open from `start` to `close`. Calls come from one thread; the servers are
    talked to on another."""

    def __init__(
        self, servers: Mapping[str, McpServer], approve: Approve, interrupt: Interrupt | None = None
    ) -> None:
        self._servers, self._approve = dict(servers), approve
        self._interrupt = interrupt or Interrupt()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._done = asyncio.Event()
        self._clients: dict[str, Any] = {}
        self._holding: Future[None] | None = None

    def start(self) -> list[Tool]:
        """Start the servers. Unavailable where one does not, InputError where the package is missing."""
        try:
            import mcp  # noqa: F401 - said here, before anything was started
        except ImportError:
            raise InputError("MCP tools need one more package: pip install 'keystroke[mcp]'") from None
        self._thread.start()
        ready: Future[list[Tool]] = Future()
        self._holding = asyncio.run_coroutine_threadsafe(self._hold(ready), self._loop)
        tools: list[Tool] = self._waited(ready, _START, "the MCP servers did not start in time")
        return tools

    def close(self) -> None:
        """End the servers. Idempotent."""
        if self._holding is not None:
            self._loop.call_soon_threadsafe(self._done.set)
            try:
                self._holding.result(10)
            except Exception:
                self._holding.cancel()
            self._holding = None
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def call(self, server: str, tool: str, arguments: dict[str, Any]) -> Result:
        """Make a call, if it is approved. Forbidden, Unavailable, Interrupted."""
        shown = json.dumps(arguments, ensure_ascii=False)
        line = f"{server}: {tool}({shown:.300})"
        if not self._approve(Command(line, confined=False)):
            raise Forbidden(f"{line!r:.120} was not approved; do without it")
        asked = self._clients[server].call_tool(tool, arguments)
        answer = self._waited(self._posted(asked), _CALL, f"{server} did not answer in time")
        text = "\n".join(part.text for part in answer.content if getattr(part, "type", "") == "text")
        return Result(text or "(no text)", failed=bool(answer.is_error))

    # ── on the servers' thread ────────────────────────────────────────────────────────────────

    async def _hold(self, ready: Future[list[Tool]]) -> None:
        """Keep every server open until `close`: what opened them must close them, on the same task."""
        from mcp import Client, StdioServerParameters

        async with AsyncExitStack() as stack:
            try:
                tools: list[Tool] = []
                for name, server in self._servers.items():
                    place = StdioServerParameters(command=server.command, args=server.args, env=server.env)
                    client = self._clients[name] = await stack.enter_async_context(Client(place))
                    listed = await client.list_tools()
                    tools += [McpTool(self, name, known) for known in listed.tools[:_TOOLS]]
            except Exception as error:
                ready.set_exception(Unavailable(f"the MCP server {name} did not start: {error!s:.200}"))
                return
            ready.set_result(tools)
            await self._done.wait()

    def _posted(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _waited(self, future: Future[Any], seconds: float, late: str) -> Any:
        for _ in range(round(seconds / _LOOK)):
            if self._interrupt.is_set:
                future.cancel()
                raise Interrupted("stopped on request")
            try:
                return future.result(_LOOK)
            except LateError:
                if future.done():
                    break
            except (Unavailable, Interrupted):
                raise
            except Exception as error:
                raise Unavailable(f"the MCP server failed: {error!s:.200}") from None
        future.cancel()
        raise Unavailable(late)


class McpTool(Tool):
    """One tool of a server, under a name that cannot be taken for one of ours."""

    arguments: ClassVar[Any] = dict[str, Any]

    def __init__(self, tools: McpTools, server: str, known: Any) -> None:
        self._tools, self._server, self._known = tools, server, known
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{known.name}")[:64]  # type: ignore[misc]
        self.description = f"{known.description or known.name:.{_WORDS}}"  # type: ignore[misc]

    def about(self, arguments: dict[str, Any]) -> str:
        return f"ask {self._server} for {self._known.name}"

    def call(self, arguments: dict[str, Any]) -> Result:
        return self._tools.call(self._server, self._known.name, arguments)

    def specification(self) -> dict[str, Any]:
        schema = dict(self._known.input_schema or {"type": "object"})
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}
