"""The table of HTTP routes: it makes the Starlette routes and the OpenAPI document.

Each route declares its path, method, handler, who may call it, and the types of its body and reply. A route
without a declared access requires a key. Access is checked, then the body read and decoded, before any
handler runs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from keystroke.gateway.access.security import Access, AccessControl
from keystroke.gateway.api.endpoints import ApiRequest, Endpoints
from keystroke.gateway.api.llama_server import (
    apply_template,
    detokenize,
    server_props,
    server_slots,
    tokenize,
)
from keystroke.gateway.api.messages import count_message_tokens, create_message
from keystroke.gateway.api.ollama import (
    list_loaded_ollama_models,
    list_ollama_models,
    ollama_chat,
    ollama_generate,
    ollama_version,
    pull_ollama_model,
    refuse,
    show_ollama_model,
)
from keystroke.gateway.api.openapi import RouteSpec, document
from keystroke.gateway.api.tasks import create_task, list_tasks, task_events, task_handler
from keystroke.gateway.tasks.manager import TaskManager
from keystroke.gateway.transport.http import json_response, read_body
from keystroke.protocol import chat, llama_server, messages, ollama, requests, response, status
from keystroke.protocol import tasks as wire
from keystroke.protocol.codec import body_decoder


async def _openapi(_api: Endpoints, _call: ApiRequest[None]) -> HttpResponse:
    return json_response(openapi_document())


_INTEGER, _STRING = {"type": "integer", "minimum": 0}, {"type": "string"}
_RESUME: dict[str, dict[str, Any]] = {
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": -1},
}
_RESPONSE, _TASK = "/v1/responses/{response_id}", "/v1/tasks/{task_id}"
_ASSETS = ("text/javascript", "text/css", "image/svg+xml")


def _task_action(name: str, act: Any, summary: str, body: type | None = None) -> RouteSpec:
    types: dict[str, Any] = {"body": body, "body_optional": True, "reply": wire.Task}
    handler = task_handler(act)
    return RouteSpec("POST", f"{_TASK}/{name}", handler, f"{name}Task", summary, Access.FILES, **types)


def _ollama_routes() -> list[RouteSpec]:
    error: dict[str, Any] = {"failure": ollama.OllamaError}
    lines = ("application/json", "application/x-ndjson")
    # fmt: off
    served = [
        RouteSpec("POST", "/api/chat", ollama_chat, "ollamaChat", "Chat, as Ollama's clients ask",
                  body=ollama.OllamaChatRequest, reply=ollama.OllamaChatReply, media=lines, **error),
        RouteSpec("POST", "/api/generate", ollama_generate, "ollamaGenerate", "Answer, complete or fill in",
                  body=ollama.OllamaGenerateRequest, reply=ollama.OllamaGenerateReply, media=lines, **error),
        RouteSpec("GET", "/api/tags", list_ollama_models, "ollamaTags", "Models on offer",
                  reply=ollama.OllamaModels, **error),
        RouteSpec("GET", "/api/ps", list_loaded_ollama_models, "ollamaPs", "Models that are loaded",
                  reply=ollama.OllamaModels, **error),
        RouteSpec("POST", "/api/show", show_ollama_model, "ollamaShow", "A model's properties",
                  body=ollama.OllamaModelRequest, reply=ollama.OllamaShown, **error),
        RouteSpec("POST", "/api/pull", pull_ollama_model, "ollamaPull", "Check that a model is served",
                  body=ollama.OllamaModelRequest, reply=ollama.OllamaStatus, media=lines, **error),
        RouteSpec("GET", "/api/version", ollama_version, "ollamaVersion", "The version of this API",
                  reply=ollama.OllamaVersion, **error),
    ]
    # fmt: on
    embeddings = "Embeddings are not made here: no model of this server has them."
    manage = "Models are not managed through this API; use `keystroke models`."
    refused = {
        "embed": ("POST", embeddings),
        "embeddings": ("POST", embeddings),
        "create": ("POST", manage),
        "copy": ("POST", manage),
        "push": ("POST", manage),
        "delete": ("DELETE", manage),
    }
    return served + [
        RouteSpec(method, f"/api/{name}", refuse(why), f"ollama{name.title()}", f"Refused: {why}", **error)
        for name, (method, why) in refused.items()
    ]


# fmt: off
ROUTES = (
    RouteSpec("GET", "/", Endpoints.page, "page", "The playground, for a browser", Access.HOST,
              media=("text/html",)),
    RouteSpec("GET", "/play/{name}", Endpoints.page_file, "pageFile", "A file of the playground",
              Access.PUBLIC, media=_ASSETS, cached=True),
    RouteSpec("POST", "/v1/responses", Endpoints.create_response, "createResponse", "Create a response",
              body=requests.CreateRequest, reply=response.Response, stream=True),
    RouteSpec("POST", "/v1/responses/compact", Endpoints.compact, "compactConversation",
              "Summarise a conversation", body=requests.CreateRequest, reply=response.CompactedConversation),
    RouteSpec("POST", "/v1/responses/input_tokens", Endpoints.count_input_tokens, "countInputTokens",
              "Count the tokens of a prompt", body=requests.CreateRequest, reply=response.InputTokens),
    RouteSpec("POST", "/v1/embeddings", Endpoints.refuse_embeddings, "createEmbedding",
              "Not served; refused with a reason"),
    RouteSpec("GET", _RESPONSE, Endpoints.fetch_response, "getResponse", "A stored or running response",
              reply=response.Response, stream=True, query=_RESUME),
    RouteSpec("DELETE", _RESPONSE, Endpoints.delete_response, "deleteResponse", "Delete a stored response"),
    RouteSpec("POST", f"{_RESPONSE}/cancel", Endpoints.cancel_response, "cancelResponse", "Stop a response",
              reply=response.Response),
    RouteSpec("POST", "/v1/chat/completions", Endpoints.chat, "createChat", "Chat",
              body=requests.ChatRequest, reply=chat.ChatCompletion, stream=True),
    RouteSpec("POST", "/v1/completions", Endpoints.completions, "createCompletion", "Complete or fill in",
              body=requests.CompletionRequest, reply=chat.TextCompletion, stream=True),
    RouteSpec("POST", "/infill", Endpoints.infill, "infill", "Fill in the middle (llama.vim)",
              body=requests.InfillRequest, reply=chat.Infill),
    RouteSpec("POST", "/v1/messages", create_message, "createMessage", "Chat, as Anthropic's clients ask",
              body=messages.MessagesRequest, reply=messages.MessagesReply, stream=True,
              failure=messages.MessagesError),
    RouteSpec("POST", "/v1/messages/count_tokens", count_message_tokens, "countMessageTokens",
              "The length of a prompt", body=messages.MessagesPrompt, reply=messages.MessagesTokenCount,
              failure=messages.MessagesError),
    *_ollama_routes(),
    RouteSpec("POST", "/tokenize", tokenize, "tokenize", "The tokens of a text (llama.cpp)",
              body=llama_server.TokenizeRequest, reply=llama_server.TokenizeReply),
    RouteSpec("POST", "/detokenize", detokenize, "detokenize", "The text of tokens (llama.cpp)",
              body=llama_server.DetokenizeRequest, reply=llama_server.DetokenizeReply),
    RouteSpec("POST", "/apply-template", apply_template, "applyTemplate", "The prompt of a chat (llama.cpp)",
              body=llama_server.TemplateRequest, reply=llama_server.TemplateReply),
    RouteSpec("GET", "/props", server_props, "props", "The default model's properties (llama.cpp)",
              reply=llama_server.ServerProps, query={"model": _STRING}),
    RouteSpec("GET", "/slots", server_slots, "slots", "Places of the models and their use (llama.cpp)",
              reply=list[llama_server.ServerSlot]),
    RouteSpec("GET", "/v1/models", Endpoints.models, "listModels", "Models on offer", cached=True),
    RouteSpec("GET", "/v1/models/{model}", Endpoints.model, "getModel", "One of them"),
    RouteSpec("POST", "/v1/models/load", Endpoints.load, "loadModel",
              "Load a model; lines report its progress", body=status.LoadRequest, reply=status.LoadStep,
              media=("application/x-ndjson",)),
    RouteSpec("GET", "/v1/status", Endpoints.status, "status", "The loaded models and their load"),
    RouteSpec("GET", "/health", Endpoints.health, "health", "Whether the server runs", Access.OPTIONAL),
    RouteSpec("GET", "/metrics", Endpoints.metrics, "metrics", "Prometheus metrics", media=("text/plain",)),
    RouteSpec("GET", "/openapi.json", _openapi, "openapi", "This document", Access.PUBLIC),
    RouteSpec("POST", "/v1/tasks", create_task, "createTask", "Start a task", Access.FILES,
              body=wire.TaskCreate, reply=wire.Task, stream=True),
    RouteSpec("GET", "/v1/tasks", list_tasks, "listTasks", "The caller's tasks", Access.FILES,
              reply=wire.TaskList, query={"workspace": _STRING}),
    RouteSpec("GET", _TASK, task_handler(TaskManager.get), "getTask", "A task", Access.FILES,
              reply=wire.Task),
    RouteSpec("GET", f"{_TASK}/events", task_events, "taskEvents", "Its events", Access.FILES,
              media=("text/event-stream",), query={"after": _INTEGER}),
    RouteSpec("GET", f"{_TASK}/diff", task_handler(TaskManager.diff), "taskDiff", "The change so far",
              Access.FILES, reply=wire.TaskDiff),
    _task_action("steer", TaskManager.steer, "Send input to a running task", wire.TaskSteer),
    _task_action("approve", TaskManager.approve, "Approve the action it asks about", wire.TaskAnswer),
    _task_action("reject", TaskManager.reject, "Reject the action it asks about", wire.TaskAnswer),
    _task_action("cancel", TaskManager.cancel, "Stop it"),
    _task_action("apply", TaskManager.apply, "Apply the change that it proposed", wire.TaskApply),
    _task_action("undo", TaskManager.undo, "Undo its change"),
    _task_action("resume", TaskManager.resume, "Continue it", wire.TaskResume),
)
# fmt: on


@cache
def openapi_document() -> dict[str, Any]:
    return document([spec for spec in ROUTES if spec.path != "/openapi.json"])


def starlette_routes(api: Endpoints, access: AccessControl, max_body: int) -> list[Route]:
    """The routes as Starlette serves them; a body larger than `max_body` bytes is refused."""
    return [_route(spec, api, access, max_body) for spec in ROUTES]


def _route(spec: RouteSpec, api: Endpoints, access: AccessControl, max_body: int) -> Route:
    decode = None if spec.body is None else body_decoder(spec.body)

    async def endpoint(request: Request) -> HttpResponse:
        caller = access.check(spec.access, request.headers)
        body: Any = None
        if decode is not None:
            data = await read_body(request, max_body)
            body = decode(data or b"{}" if spec.body_optional else data)
        return await spec.handler(api, ApiRequest(request, caller, body))

    return Route(spec.path, endpoint, methods=[spec.method])
