"""Answers `initialize` before the language server's imports are loaded, so that editors start quickly.

The reply equals the server's own, which a test checks. The server then handles the same message and its
reply is dropped. Any first message that is not a valid `initialize` is left to the server.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from keystroke.clients.lsp.commands import ACTION_KINDS, COMMANDS

ENCODINGS = ("utf-8", "utf-16", "utf-32")


@dataclass(frozen=True, slots=True)
class FirstMessage:
    """The first message. `answered_id` is its id if it was answered here, with `reply`."""

    body: bytes
    answered_id: int | str | None = None
    reply: bytes = b""


def answer_initialize(body: bytes, version: str) -> FirstMessage:
    """Build the reply to the first message if it is an `initialize`."""
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
    """The server's capabilities for a client with these capabilities."""
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
