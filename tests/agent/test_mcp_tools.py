"""Tools of the user's own MCP servers: named for a task, asked for each time, and what they say is data."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from keystroke.agent.tools import CommandRequest, Toolbox, ToolInvocation, mcp, mcp_relay
from keystroke.agent.tools.mcp import McpServer, McpTools, load_servers
from keystroke.engine.base import Interrupt
from keystroke.errors import ConfigError, Interrupted, Unavailable

SERVER = McpServer(sys.executable, [str(Path(__file__).with_name("mcp_server.py"))])


class User:
    def __init__(self) -> None:
        self.asked: list[CommandRequest] = []
        self.says = True

    def approve(self, command: CommandRequest) -> bool:
        self.asked.append(command)
        return self.says


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[McpTools, Toolbox, User, list[Interrupt]]]:
    """One server for all tests of this file: starting it takes a second."""
    user, interrupt = User(), Interrupt()
    tools = McpTools({"tracker": SERVER}, user.approve, interrupt)
    yield tools, Toolbox(tools.start()), user, [interrupt]
    tools.close()
    tools.close()


def test_tools_have_the_server_s_name_and_its_own_schema(
    shared: tuple[McpTools, Toolbox, User, list[Interrupt]],
) -> None:
    _, box, _, _ = shared
    assert box.names == ("tracker__issue", "tracker__write", "tracker__wait")
    first = box.specifications()[0]["function"]
    assert first["description"] == "What an issue says."
    assert first["parameters"]["properties"]["number"]["type"] == "integer"


def test_a_call_is_asked_for_as_one_that_nothing_confines(
    shared: tuple[McpTools, Toolbox, User, list[Interrupt]], tmp_path: Path
) -> None:
    _, box, user, _ = shared
    user.asked.clear()
    result = box.invoke(ToolInvocation("tracker__issue", '{"number": 7}'))
    assert "issue 7: add must add" in result.text
    assert [(asked.line, asked.confined) for asked in user.asked] == [
        ('tracker: issue({"number": 7})', False)
    ]
    user.says = False
    target = tmp_path / "made"
    refused = box.invoke(ToolInvocation("tracker__write", json.dumps({"path": str(target), "text": "x"})))
    user.says = True
    assert refused.refused
    assert not target.exists()


def test_a_bad_call_is_the_tool_s_own_failure(
    shared: tuple[McpTools, Toolbox, User, list[Interrupt]],
) -> None:
    _, box, _, _ = shared
    assert box.invoke(ToolInvocation("tracker__issue", '{"number": "many"}')).failed
    assert box.invoke(ToolInvocation("tracker__issue", "[]")).failed


def test_an_interrupt_ends_a_call_that_never_answers(
    shared: tuple[McpTools, Toolbox, User, list[Interrupt]],
) -> None:
    tools, box, _, (interrupt,) = shared
    threading.Timer(0.2, interrupt.set).start()
    with pytest.raises(Interrupted):
        box.invoke(ToolInvocation("tracker__wait", "{}"))
    tools._interrupt = Interrupt()


def test_a_server_that_does_not_start_is_named() -> None:
    tools = McpTools({"gone": McpServer("/no/such/program")}, lambda command: True)
    with pytest.raises(Unavailable, match="MCP server gone did not start"):
        tools.start()
    tools.close()


def test_only_servers_of_the_user_s_file_can_be_named(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text('{"mcpServers": {"tracker": {"command": "tracker-mcp", "args": ["--quiet"]}}}')
    assert load_servers(file, ["tracker"]) == {"tracker": McpServer("tracker-mcp", ["--quiet"])}
    assert load_servers(None, []) == {}
    for path, name in ((file, "other"), (None, "tracker"), (tmp_path / "none.json", "tracker")):
        with pytest.raises(ConfigError):
            load_servers(path, [name])


HOSTILE = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    if asked["method"] == sys.argv[1] and sys.argv[2] == "silent":
        time.sleep(3600)
    text = "A" * (40_000_000 if asked["method"] == sys.argv[1] else 10)
    results = {
        "initialize": {"protocolVersion": "2025-03-26", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "x", "version": "1"}},
        "tools/list": {"tools": [{"name": "t", "description": text, "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": text}]},
    }
    answer = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] in results:
        answer["result"] = results[asked["method"]]
    else:
        answer["error"] = {"code": -32601, "message": "unknown"}
    print(json.dumps(answer), flush=True)
"""


def hostile(method: str, how: str, mark: str) -> McpTools:
    server = McpServer(sys.executable, ["-c", HOSTILE, method, how, mark])
    return McpTools({"x": server}, User().approve)


def marked(mark: str) -> list[int]:
    """The processes with `mark` among their arguments, wherever they were moved to."""
    running = psutil.process_iter(["cmdline"])
    return [process.pid for process in running if mark in (process.info["cmdline"] or ())]


def assert_ended(mark: str) -> None:
    """Nothing is left; a killed process may still be ending on a busy machine."""
    deadline = time.monotonic() + 60
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not marked(mark)


@pytest.mark.parametrize("method", ["initialize", "tools/list"])
def test_a_server_that_never_answers_is_ended(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_START", 2.0)
    monkeypatch.setattr(mcp, "_CLOSE", 0.1)
    mark = uuid4().hex
    tools = hostile(method, "silent", mark)
    with pytest.raises(Unavailable, match="in time"):
        tools.start()
    assert not tools._thread.is_alive()
    assert_ended(mark)


@pytest.mark.parametrize("method", ["tools/list", "tools/call"])
def test_a_message_without_end_is_cut(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "_CLOSE", 2.0)
    mark = uuid4().hex
    tools = hostile(method, "huge", mark)

    try:
        if method == "tools/call":
            assert [tool.name for tool in tools.start()] == ["x__t"]
        with pytest.raises(Unavailable):
            _ = tools.call("x", "t", {}) if method == "tools/call" else tools.start()
    finally:
        tools.close()
    assert_ended(mark)


@pytest.mark.parametrize("how", ["silent", "huge"])
def test_a_server_ends_with_a_program_that_is_killed(how: str) -> None:
    server = [sys.executable, "-c", HOSTILE.replace("for line", "print(flush=True)\nfor line"), "none", how]
    mark = uuid4().hex
    relay = [sys.executable, "-I", "-S", mcp_relay.__file__, "1000", *server, mark]
    user = subprocess.Popen(relay, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert user.stdin is not None
    assert user.stdout is not None
    assert user.stdout.readline() == b"\n"  # the server runs; its input stays open
    assert len(marked(mark)) == 2
    user.stdout.close()
    assert user.wait() != 0
    user.stdin.close()
    assert not marked(mark)
