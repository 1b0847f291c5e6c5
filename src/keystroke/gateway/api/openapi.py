"""The OpenAPI document, made from the table of routes and the types the codec reads and writes.

Every operation lists the errors it can return, so that generated clients and fuzzers know them.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, get_args, get_origin

from starlette.responses import Response as HttpResponse

from keystroke.gateway.access.security import Access
from keystroke.protocol.response import ErrorBody
from keystroke.protocol.schema import components

JSON = "application/json"

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


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One route. `operation` is its OpenAPI name; `handler` gets the endpoints and the request. Without a
    `reply` type the reply is any object or text; `stream`: it may also come as server-sent events."""

    method: str
    path: str
    handler: Callable[[Any, Any], Awaitable[HttpResponse]]
    operation: str
    summary: str
    access: Access = Access.KEY
    body: type | None = None
    body_optional: bool = False
    reply: Any = None
    media: tuple[str, ...] = (JSON,)
    stream: bool = False
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cached: bool = False  # may be answered with 304
    failure: type = ErrorBody  # the body of an error


def document(routes: Sequence[RouteSpec]) -> dict[str, Any]:
    types = {k: None for spec in routes for k in (spec.body, spec.reply, spec.failure) if k is not None}
    _, schemas = components(tuple(types), "#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for spec in routes:
        paths.setdefault(spec.path, {})[spec.method.lower()] = _operation(spec)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Keystroke",
            "version": version("keystroke"),
            "description": "OpenAI-compatible endpoints. `GET /v1/responses` also upgrades to a WebSocket.",
        },
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(spec: RouteSpec) -> dict[str, Any]:
    content = {media: {"schema": _reply_schema(spec, media)} for media in spec.media}
    if spec.stream:
        fields = {"event": {"type": "string"}, "data": {"type": "string"}}
        events = {"type": "object", "properties": fields} if spec.body is not None else {"type": "string"}
        content["text/event-stream"] = {"schema": events}
    replies: dict[str, Any] = {"200": {"description": spec.summary, "content": content}}
    if spec.cached:
        replies["304"] = {"description": "Not modified"}
    failure = {JSON: {"schema": _ref(spec.failure)}}
    replies |= {code: {"description": text, "content": failure} for code, text in _ERRORS.items()}
    operation: dict[str, Any] = {
        "operationId": spec.operation,
        "summary": spec.summary,
        "responses": replies,
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", spec.path)
    ] + [{"name": name, "in": "query", "schema": schema} for name, schema in spec.query.items()]
    if parameters:
        operation["parameters"] = parameters
    if spec.body is not None:
        body: dict[str, Any] = {"content": {JSON: {"schema": _ref(spec.body)}}}
        operation["requestBody"] = body if spec.body_optional else {"required": True} | body
    return operation


def _reply_schema(spec: RouteSpec, media: str) -> dict[str, Any]:
    if spec.reply is not None:
        return _ref(spec.reply)
    return {"type": "object" if media == JSON else "string"}


def _ref(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is list:
        return {"type": "array", "items": _ref(*get_args(kind))}
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
