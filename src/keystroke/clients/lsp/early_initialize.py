"""The answer to `initialize`, given before anything heavy is loaded.

Plain values only. It says exactly what the server itself would say, and a test compares the two; the
server then gets the same message, with its own answer left out. Whatever is not a sound `initialize` is left
to the server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from keystroke.clients.lsp.commands import ACTION_KINDS, COMMANDS

ENCODINGS = ("utf-8", "utf-16", "utf-32")


@dataclass(frozen=True, slots=True)
class FirstMessage:
    """The first message as it came; `answered` is its id where it was answered here, as `reply`."""

    body: bytes
    answered_id: int | str | None = None
    reply: bytes = b""


def answer_initialize(body: bytes, version: str) -> FirstMessage:
    """Answer the first message if it is an `initialize`."""
    try:
        message = json.loads(body)
        name = message["id"]
        if (
            message["method"] != "initialize"
            or message["jsonrpc"] != "2.0"
            or not isinstance(name, (int, str))
        ):
            return FirstMessage(body)
        offered = message["params"]["capabilities"]
        result = {
            "capabilities": capabilities(offered),
            "serverInfo": {"name": "keystroke", "version": version},
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return FirstMessage(body)
    reply = json.dumps({"jsonrpc": "2.0", "id": name, "result": result}, separators=(",", ":"))
    return FirstMessage(body, name, reply.encode())


def capabilities(client: dict[str, Any]) -> dict[str, Any]:
    """What this server can do for a client that says this about itself."""
    wanted = _field(client, "general", "positionEncodings") or []
    renames = _field(client, "textDocument", "rename", "prepareSupport")
    found: dict[str, Any] = {
        "positionEncoding": next((one for one in wanted if one in ENCODINGS), "utf-16"),
        "textDocumentSync": {"openClose": True, "change": 2, "save": True},
        "codeActionProvider": {"codeActionKinds": list(ACTION_KINDS), "resolveProvider": True},
        "renameProvider": {"prepareProvider": True} if renames else True,
        "executeCommandProvider": {"commands": list(COMMANDS)},
        "inlineCompletionProvider": {},
        "workspace": {
            "workspaceFolders": {"supported": True, "changeNotifications": True},
            "fileOperations": {},
        },
    }
    pulls = _field(client, "textDocument", "diagnostic") is not None
    if pulls and _field(client, "workspace", "diagnostics", "refreshSupport"):
        found["diagnosticProvider"] = {"interFileDependencies": True, "workspaceDiagnostics": False}
    return found


def _field(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if value is not None else None
    return value
