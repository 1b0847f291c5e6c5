"""JSON Schema of the wire, generated from the types: `python -m keystroke.protocol.schema schema/`.

The files under `schema/` are written by this module only; a test compares them with the types.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from keystroke.protocol import chat, events, llama_server, messages, ollama, requests, response, status, tasks
from keystroke.protocol import live_messages as live

DOCUMENTS: dict[str, tuple[Any, ...]] = {
    "client_events": (requests.ResponseCreate, requests.ResponseSteer, requests.ResponseCancel),
    "server_events": (events.Event,),
    "live_requests": (live.LiveRequest,),
    "live_events": (live.LiveEvent,),
    "requests": (
        requests.CreateRequest,
        requests.ChatRequest,
        requests.CompletionRequest,
        requests.InfillRequest,
        messages.MessagesRequest,
        messages.MessagesPrompt,
        ollama.OllamaChatRequest,
        ollama.OllamaGenerateRequest,
        ollama.OllamaModelRequest,
        llama_server.TokenizeRequest,
        llama_server.DetokenizeRequest,
        llama_server.TemplateRequest,
        status.LoadRequest,
    ),
    "bodies": (
        response.Response,
        response.CompactedConversation,
        response.InputTokens,
        chat.ChatCompletion,
        chat.ChatChunk,
        chat.TextCompletion,
        chat.Infill,
        messages.MessagesReply,
        messages.MessagesTokenCount,
        messages.MessagesError,
        ollama.OllamaChatReply,
        ollama.OllamaGenerateReply,
        ollama.OllamaModels,
        ollama.OllamaShown,
        ollama.OllamaVersion,
        ollama.OllamaStatus,
        ollama.OllamaError,
        llama_server.TokenizeReply,
        llama_server.DetokenizeReply,
        llama_server.TemplateReply,
        llama_server.ServerProps,
        llama_server.ServerSlot,
        response.ErrorBody,
        status.GatewayStatus,
        status.LoadStep,
        status.WaitingNotice,
    ),
    "message_events": (messages.MessagesEvent,),
    "task_requests": (
        tasks.TaskCreate,
        tasks.TaskSteer,
        tasks.TaskAnswer,
        tasks.TaskApply,
        tasks.TaskResume,
    ),
    "task_bodies": (tasks.Task, tasks.TaskList, tasks.TaskDiff),
    "task_events": (tasks.TaskEvent,),
}


def components(types: tuple[Any, ...], template: str = "#/$defs/{name}") -> tuple[list[Any], dict[str, Any]]:
    schemas, definitions = msgspec.json.schema_components(types, ref_template=template)
    return list(schemas), definitions


def document(name: str) -> dict[str, Any]:
    schemas, definitions = components(DOCUMENTS[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Keystroke {name.replace('_', ' ')}",
        "anyOf": schemas,
        "$defs": dict(sorted(definitions.items())),
    }


def render(name: str) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document(name)), indent=2) + b"\n"


def main(folder: str) -> None:
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name in DOCUMENTS:
        (target / f"{name}.json").write_bytes(render(name))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "schema")
