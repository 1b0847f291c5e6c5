"""The OpenAPI document, from the same types the codec reads and writes.

Nothing is described by hand that a type already says. Every operation lists the errors it can give, so
that generated clients and fuzzers know them.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from keystroke.protocol import chat, requests, response, status, tasks
from keystroke.protocol.schema import components

_TYPES = (
    requests.CreateRequest,
    requests.ChatRequest,
    requests.CompletionRequest,
    requests.InfillRequest,
    response.Response,
    chat.ChatCompletion,
    chat.TextCompletion,
    chat.Infill,
    response.ErrorBody,
    status.LoadRequest,
    status.LoadStep,
    tasks.TaskCreate,
    tasks.TaskSteer,
    tasks.TaskAnswer,
    tasks.TaskApply,
    tasks.TaskResume,
    tasks.Task,
    tasks.TaskList,
    tasks.TaskDiff,
)

_ERRORS = {
    "400": "The request cannot be understood or fulfilled as it stands",
    "401": "A key is needed, or this one is not accepted",
    "403": "The caller may not do this",
    "404": "The model, response, task or folder does not exist",
    "408": "The client stopped reading",
    "409": "A newer request of the same buffer took its place",
    "413": "The body is too large",
    "429": "A limit is reached or the queue is full; retry-after says when to come back",
    "499": "The answer was stopped on request",
    "500": "The engine or the server failed",
    "503": "The model cannot be reached or does not fit",
}


@cache
def document() -> dict[str, Any]:
    _, schemas = components(_TYPES, "#/components/schemas/{name}")
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Keystroke",
            "version": version("keystroke"),
            "description": "OpenAI-compatible endpoints. `GET /v1/responses` also upgrades to a WebSocket.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/": {"get": _get("page", "The playground, for a browser", "text/html")},
            "/play/{name}": {"get": _file("pageFile", "A file of the playground")},
            "/v1/responses": {
                "post": _post("createResponse", "CreateRequest", "Response", "Create a response", stream=True)
            },
            "/v1/responses/{response_id}": {
                "get": _resumable(_by_id("getResponse", "A stored or running response")),
                "delete": _by_id("deleteResponse", "Delete a stored response", schema=None),
            },
            "/v1/responses/{response_id}/cancel": {"post": _by_id("cancelResponse", "Stop a response")},
            "/v1/chat/completions": {
                "post": _post("createChat", "ChatRequest", "ChatCompletion", "Chat", stream=True)
            },
            "/v1/completions": {
                "post": _post(
                    "createCompletion", "CompletionRequest", "TextCompletion", "Complete or fill in",
                    stream=True,
                )
            },
            "/infill": {"post": _post("infill", "InfillRequest", "Infill", "Fill in the middle (llama.vim)")},
            **_task_paths(),
            "/v1/models": {"get": _get("listModels", "Models on offer")},
            "/v1/models/load": {
                "post": _post(
                    "loadModel", "LoadRequest", "LoadStep", "Load a model; lines say how far it has come",
                    media="application/x-ndjson",
                )
            },
            "/v1/status": {"get": _get("status", "What is loaded here")},
            "/health": {"get": _get("health", "Whether the server runs")},
            "/metrics": {"get": _get("metrics", "Prometheus metrics", "text/plain")},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }  # fmt: skip


def _task_paths() -> dict[str, Any]:
    one = "/v1/tasks/{task_id}"
    acts = {
        "steer": ("TaskSteer", "Say something to a task under way"),
        "approve": ("TaskAnswer", "Answer its question with yes"),
        "reject": ("TaskAnswer", "Answer its question with no"),
        "cancel": (None, "Stop it"),
        "apply": ("TaskApply", "Make the change that it proposed"),
        "undo": (None, "Take its change back"),
        "resume": ("TaskResume", "Go on with it"),
    }
    query = {"name": "workspace", "in": "query", "schema": {"type": "string"}}
    after = {"name": "after", "in": "query", "schema": {"type": "integer", "minimum": 0}}
    create = _post("createTask", "TaskCreate", "Task", "Give a task", stream=True)
    paths: dict[str, Any] = {
        "/v1/tasks": {
            "post": create,
            "get": {**_get("listTasks", "One's own tasks", schema="TaskList"), "parameters": [query]},
        },
        one: {"get": _by_id("getTask", "A task", "Task", "task_id")},
        f"{one}/diff": {"get": _by_id("taskDiff", "The change so far", "TaskDiff", "task_id")},
        f"{one}/events": {"get": _by_id("taskEvents", "Its events", None, "task_id")},
    }
    events = paths[f"{one}/events"]["get"]
    events["parameters"].append(after)
    events["responses"]["200"]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    for name, (body, words) in acts.items():
        act = _by_id(f"{name}Task", words, "Task", "task_id")
        if body is not None:
            act["requestBody"] = {"content": {"application/json": {"schema": _ref(body)}}}
        paths[f"{one}/{name}"] = {"post": act}
    return paths


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _errors() -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("ErrorBody")}}
    return {status: {"description": words, "content": content} for status, words in _ERRORS.items()}


def _post(
    operation: str,
    body: str,
    answer: str,
    words: str,
    *,
    stream: bool = False,
    media: str = "application/json",
) -> dict[str, Any]:
    content: dict[str, Any] = {media: {"schema": _ref(answer)}}
    if stream:
        fields = {"event": {"type": "string"}, "data": {"type": "string"}}
        content["text/event-stream"] = {"schema": {"type": "object", "properties": fields}}
    return {
        "operationId": operation,
        "summary": words,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": {"200": {"description": words, "content": content}, **_errors()},
    }


def _resumable(operation: dict[str, Any]) -> dict[str, Any]:
    """With `stream` the events behind one that the client has, as they are made."""
    operation["parameters"] += [
        {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
        {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": -1}},
    ]
    operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return operation


def _by_id(
    operation: str, words: str, schema: str | None = "Response", name: str = "response_id"
) -> dict[str, Any]:
    shape = _ref(schema) if schema else {"type": "object"}
    parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "operationId": operation,
        "summary": words,
        "parameters": [parameter],
        "responses": {
            "200": {"description": words, "content": {"application/json": {"schema": shape}}},
            **_errors(),
        },
    }


def _file(operation: str, words: str) -> dict[str, Any]:
    parameter = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    kinds = ("text/javascript", "text/css", "image/svg+xml")
    content = {kind: {"schema": {"type": "string"}} for kind in kinds}
    answers = {"200": {"description": words, "content": content}, "304": {"description": "As it was"}}
    return {
        "operationId": operation,
        "summary": words,
        "parameters": [parameter],
        "responses": {**answers, **_errors()},
    }


def _get(
    operation: str, words: str, media: str = "application/json", schema: str | None = None
) -> dict[str, Any]:
    plain = {"type": "object"} if media == "application/json" else {"type": "string"}
    shape = _ref(schema) if schema else plain
    return {
        "operationId": operation,
        "summary": words,
        "responses": {"200": {"description": words, "content": {media: {"schema": shape}}}, **_errors()},
    }
