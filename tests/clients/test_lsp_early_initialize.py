"""The first answer: given before the server is loaded, and the same as the server's own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from lsprotocol import converters, types
from pytest_lsp import client_capabilities

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.lsp.early_initialize import answer_initialize, capabilities
from keystroke.clients.lsp.features import register
from keystroke.clients.lsp.server import KeystrokeServer
from keystroke.config import AssistSettings

CONVERTER = converters.get_converter()
PULLS = {
    "textDocument": {"diagnostic": {}, "rename": {"prepareSupport": True}},
    "workspace": {"diagnostics": {"refreshSupport": True}},
}
CLIENTS = [
    {},
    PULLS,
    {"textDocument": {"diagnostic": {}}},
    {"general": {"positionEncodings": ["utf-7", "utf-32", "utf-8"]}},
    {"general": {"positionEncodings": []}},
    *(CONVERTER.unstructure(client_capabilities(name)) for name in ("emacs", "neovim", "visual_studio_code")),
]


def request(offered: Any) -> dict[str, Any]:
    params = {"processId": None, "rootUri": None, "capabilities": offered}
    return {"jsonrpc": "2.0", "id": 7, "method": "initialize", "params": params}


async def said_by_the_server(offered: Any) -> Any:
    async def locate() -> GatewayAddress:
        raise AssertionError("nobody connects before `initialized`")

    server = KeystrokeServer(AssistSettings(), locate, "1.2")
    register(server)
    written: list[bytes] = []

    class Writer:
        def write(self, data: bytes) -> None:
            written.append(data)

        def close(self) -> None:
            pass

    server.protocol.set_writer(Writer())
    server.protocol.handle_message(server.protocol.structure_message(request(offered)))
    await asyncio.sleep(0)
    return json.loads(written[0].partition(b"\r\n\r\n")[2])["result"]


def without_no(value: Any) -> Any:
    """What is said to be false may as well not be said."""
    if isinstance(value, dict):
        return {key: without_no(item) for key, item in value.items() if item is not False}
    return value


@pytest.mark.parametrize("offered", CLIENTS, ids=range(len(CLIENTS)))
async def test_the_first_answer_is_the_servers_own(offered: Any) -> None:
    greeting = answer_initialize(json.dumps(request(offered)).encode(), "1.2")
    assert greeting.answered_id == 7
    ours = json.loads(greeting.reply)
    assert ours["id"] == 7
    theirs = await said_by_the_server(offered)
    assert without_no(ours["result"]) == without_no(theirs)
    CONVERTER.structure(ours["result"], types.InitializeResult)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"jsonrpc":"2.0","method":"initialized","params":{}}',
        b'{"jsonrpc":"2.0","id":1,"method":"shutdown"}',
        b'{"jsonrpc":"2.0","id":[1],"method":"initialize","params":{"capabilities":{}}}',
        b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}',
        b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"capabilities":[]}}',
        b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"capabilities":{"general":7}}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_sound_request_is_left_to_the_server(body: bytes) -> None:
    greeting = answer_initialize(body, "1")
    assert (greeting.body, greeting.answered_id, greeting.reply) == (body, None, b"")


def test_nothing_heavy_is_loaded_for_the_first_answer() -> None:
    """The protocol library, and what the channel needs, wait until the editor was answered."""
    heavy = ("pygls", "lsprotocol", "numpy", "websockets", "msgspec", "onnxruntime")
    code = (
        "import sys\n"
        "from keystroke.clients import gateway_address\n"
        "from keystroke.clients.lsp import early_initialize, frames\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_client_that_says_nothing_gets_the_defaults() -> None:
    found = capabilities({})
    assert found["positionEncoding"] == "utf-16"
    assert "diagnosticProvider" not in found
