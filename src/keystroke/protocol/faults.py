"""Errors of the protocol, and the mapping from any error to the wire's error body.

Each class only adds a wire code (and sometimes a status) that clients know to a class of `errors.py`.
"""

from __future__ import annotations

from keystroke.errors import (
    AccessError,
    EngineError,
    KeystrokeError,
    NotFound,
    ProtocolError,
    RateLimited,
    Unauthorized,
    UsageError,
)
from keystroke.protocol.response import ErrorDetail


class PreviousResponseNotFound(NotFound):
    """Clients react by sending the full input again."""

    code = "previous_response_not_found"
    status = 400


class ResponseNotFound(NotFound):
    code = "response_not_found"


class TaskNotFound(NotFound):
    code = "task_not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class NoSuitableModel(UsageError):
    """No model, or not the named one, can serve the request."""

    code = "model_not_suitable"


class InvalidStreamId(ProtocolError):
    code = "invalid_stream_id"


class StreamLimitReached(ProtocolError):
    code = "websocket_stream_limit_reached"


class ConnectionLimitReached(ProtocolError):
    """The connection reached its maximum lifetime; the client opens a new one."""

    code = "websocket_connection_limit_reached"


class UnknownEvent(ProtocolError):
    code = "unknown_event"


class InvalidJson(ProtocolError):
    code = "invalid_json"


class RequestTooLarge(ProtocolError):
    code = "request_too_large"
    status = 413


class SlowClient(EngineError):
    """The client read too slowly, so its response was stopped."""

    code = "slow_client"
    status = 408


def error_type(error: KeystrokeError) -> str:
    """The OpenAI error type, which SDKs check before the code."""
    if isinstance(error, RateLimited):
        return "rate_limit_error"
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if isinstance(error, AccessError):
        return "permission_error"
    if isinstance(error, (UsageError, ProtocolError)):
        return "invalid_request_error"
    return "server_error"


def error_detail(error: KeystrokeError) -> ErrorDetail:
    return ErrorDetail(type=error_type(error), code=error.code, message=error.message, param=error.param)
