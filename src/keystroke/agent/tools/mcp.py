"""Tools of MCP servers that the user has installed.

Used only where the user names a server for a task; it must be listed in the user's own file. Servers run
outside the sandbox, so every call needs approval, like a command without a sandbox. Descriptions and
results are data: they are truncated, shown to the model as text, and grant no permission.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from keystroke.agent.tools import mcp_relay
from keystroke.agent.tools.call import AgentTool, ToolResult
from keystroke.agent.tools.run import ApproveCommand, CommandRequest
from keystroke.engine.base import Interrupt
from keystroke.errors import ConfigError, Forbidden, InputError, Interrupted, Unavailable

_START = 30.0  # seconds a server may take to start
_CALL = 120.0  # seconds a call may take
_CLOSE = 10.0  # seconds for servers to end by themselves
_KILL = 60.0  # seconds until servers that were cancelled are killed and reaped; six on an idle machine
_MESSAGE = 16 << 20  # bytes of one message of a server
_POLL_SECONDS = 0.05
_DESCRIPTION = 400  # characters of a tool's description shown to the model
_TOOLS = 20  # of one server; more would fill a small context


class McpServer(msgspec.Struct, frozen=True):
    """One entry of the file."""

    command: str
    args: list[str] = []
    env: dict[str, str] = {}


class _File(msgspec.Struct):
    mcpServers: dict[str, McpServer] = {}  # noqa: N815 - the name that every such file uses


def load_servers(file: Path | None, names: Sequence[str]) -> dict[str, McpServer]:
    """The servers called `names` in the user's file. ConfigError where one is missing."""
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
    """The tools of some servers, connected from `start` to `close`. Calls come from one thread; the
    connections run on another."""

    def __init__(
        self, servers: Mapping[str, McpServer], approve: ApproveCommand, interrupt: Interrupt | None = None
    ) -> None:
        self._servers, self._approve = dict(servers), approve
        self._interrupt = interrupt or Interrupt()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._done = asyncio.Event()
        self._clients: dict[str, Any] = {}
        self._holding: Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = threading.Event()

    def start(self) -> list[AgentTool]:
        """Start the servers. Unavailable where one fails, InputError where the package is missing."""
        try:
            import mcp  # noqa: F401 - checked before anything is started
        except ImportError:
            raise InputError("MCP tools need one more package: pip install 'keystroke[mcp]'") from None
        self._thread.start()
        ready: Future[list[AgentTool]] = Future()
        self._holding = asyncio.run_coroutine_threadsafe(self._hold(ready), self._loop)
        try:
            tools: list[AgentTool] = self._wait(ready, _START, "the MCP servers did not start in time")
        except BaseException:
            self.close()
            raise
        return tools

    def close(self) -> None:
        """End the servers, also those that do not answer. Idempotent."""
        if self._holding is not None:
            self._loop.call_soon_threadsafe(self._done.set)
            if not self._ended.wait(_CLOSE) and self._task is not None:
                # The task waits for an answer. When cancelled, it ends the servers' processes; wait for that.
                self._loop.call_soon_threadsafe(self._task.cancel)
                self._ended.wait(_KILL)
            self._holding = None
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)

    def call(self, server: str, tool: str, arguments: dict[str, Any]) -> ToolResult:
        """Make an approved call. Forbidden, Unavailable, Interrupted."""
        shown = json.dumps(arguments, ensure_ascii=False)
        line = f"{server}: {tool}({shown:.300})"
        if not self._approve(CommandRequest(line, confined=False)):
            raise Forbidden(f"{line!r:.120} was not approved; do without it")
        asked = self._clients[server].call_tool(tool, arguments)
        answer = self._wait(
            asyncio.run_coroutine_threadsafe(asked, self._loop), _CALL, f"{server} did not answer in time"
        )
        text = "\n".join(part.text for part in answer.content if getattr(part, "type", "") == "text")
        return ToolResult(text or "(no text)", failed=bool(answer.is_error))

    async def _hold(self, ready: Future[list[AgentTool]]) -> None:
        """Keep every server open until `close`: the task that opens a server must close it."""
        self._task = asyncio.current_task()
        try:
            await self._hold_servers(ready)
        finally:
            self._ended.set()

    async def _hold_servers(self, ready: Future[list[AgentTool]]) -> None:
        from mcp import Client, StdioServerParameters

        async with AsyncExitStack() as stack:
            try:
                tools: list[AgentTool] = []
                for name, server in self._servers.items():
                    relay = ["-I", "-S", mcp_relay.__file__, str(_MESSAGE), server.command, *server.args]
                    place = StdioServerParameters(command=sys.executable, args=relay, env=server.env)
                    client = self._clients[name] = await stack.enter_async_context(Client(place))
                    listed = await client.list_tools()
                    tools += [McpTool(self, name, known) for known in listed.tools[:_TOOLS]]
            except Exception as error:
                ready.set_exception(Unavailable(f"the MCP server {name} did not start: {error!s:.200}"))
                return
            ready.set_result(tools)
            await self._done.wait()

    def _wait(self, future: Future[Any], seconds: float, late: str) -> Any:
        for _ in range(round(seconds / _POLL_SECONDS)):
            if self._interrupt.is_set:
                future.cancel()
                raise Interrupted("stopped on request")
            try:
                return future.result(_POLL_SECONDS)
            except LateError:
                if future.done():
                    break
            except (Unavailable, Interrupted):
                raise
            except Exception as error:
                raise Unavailable(f"the MCP server failed: {error!s:.200}") from None
        future.cancel()
        raise Unavailable(late)


class McpTool(AgentTool):
    """One tool of a server, under a name that no built-in tool has."""

    arguments: ClassVar[Any] = dict[str, Any]

    def __init__(self, tools: McpTools, server: str, spec: Any) -> None:
        self._tools, self._server, self._spec = tools, server, spec
        self.name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}__{spec.name}")[:64]  # type: ignore[misc]
        self.description = f"{spec.description or spec.name:.{_DESCRIPTION}}"  # type: ignore[misc]

    def describe(self, arguments: dict[str, Any]) -> str:
        return f"ask {self._server} for {self._spec.name}"

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        return self._tools.call(self._server, self._spec.name, arguments)

    def specification(self) -> dict[str, Any]:
        schema = dict(self._spec.input_schema or {"type": "object"})
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}
