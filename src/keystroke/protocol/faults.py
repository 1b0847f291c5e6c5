"""Errors only the wire knows, each a leaf of the common tree.

A fault adds a wire code (and sometimes a status) that clients already understand to an error class
that exists; it adds no behaviour. The mapping from any error to the wire's error body lives here too.
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
    """Clients answer this one by sending the full input again."""

    code = "previous_response_not_found"
    status = 400


class ResponseNotFound(NotFound):
    code = "response_not_found"


class TaskNotFound(NotFound):
    code = "task_not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class NoSuitableModel(UsageError):
    """No model here, or not the named one, can do what was asked."""

    code = "model_not_suitable"


class InvalidStreamId(ProtocolError):
    code = "invalid_stream_id"


class StreamLimitReached(ProtocolError):
    code = "websocket_stream_limit_reached"


class ConnectionLimitReached(ProtocolError):
    """The connection lived as long as one may; the client opens the next."""

    code = "websocket_connection_limit_reached"


class UnknownEvent(ProtocolError):
    code = "unknown_event"


class InvalidJson(ProtocolError):
    code = "invalid_json"


class TooLarge(ProtocolError):
    code = "request_too_large"
    status = 413


class SlowClient(EngineError):
    """The reader stood still for so long that its answer was stopped."""

    code = "slow_client"
    status = 408


def error_type(error: KeystrokeError) -> str:
    """The OpenAI family of an error: what SDKs switch on before they look at the code."""
    if isinstance(error, RateLimited):
        return "rate_limit_error"
    if isinstance(error, Unauthorized):
        return "authentication_error"
    if isinstance(error, AccessError):
        return "permission_error"
    if isinstance(error, (UsageError, ProtocolError)):
        return "invalid_request_error"
    return "server_error"


def detail(error: KeystrokeError) -> ErrorDetail:
    return ErrorDetail(type=error_type(error), code=error.code, message=error.message, param=error.param)
