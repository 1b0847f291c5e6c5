"""The exception tree.

An error has a wire code, an HTTP status, whether a retry helps, and a message of one sentence that says
what is wrong and what to do.

KeystrokeError
├── UsageError               the request cannot be fulfilled
│   ├── ConfigError          a setting is unknown, malformed or out of range
│   ├── InputError           text, a file or a position is not usable
│   │   └── GrammarError     a schema, grammar or pattern is not supported
│   ├── ContextOverflow      the prompt does not fit the model's context
│   └── NotFound             a named thing (model, response, file) does not exist
├── ModelError               a model cannot be used on this machine
│   ├── ModelDamaged         a file is truncated, corrupt or inconsistent
│   ├── UnsupportedModel     the architecture or quantisation cannot be converted
│   ├── NotEnoughMemory      weights or KV cache exceed what the machine or the budget has
│   └── NotEnoughDisk        a download does not fit the disk
├── EngineError              the engine failed while working
│   ├── Interrupted          stopped on request; the session stays usable
│   ├── SessionClosed        used after close()
│   └── Unavailable          a remote engine or the gateway cannot be reached
│       └── Restarting       the server starts again; a turn can be resumed by its id afterwards
├── AccessError              the caller may not do this now
│   ├── Unauthorized         no key, or a wrong one
│   ├── Forbidden            outside the workspace, or not approved
│   ├── RateLimited          over a limit; carries retry_after
│   └── QueueFull            too many requests are waiting
└── ProtocolError            an invalid frame or event
"""

from __future__ import annotations

from typing import Any, ClassVar


class KeystrokeError(Exception):
    """Base of the tree. `str(error)` is the sentence for the user."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error with all attributes, so that it can be raised again in another process."""
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[KeystrokeError], args: tuple[Any, ...], state: dict[str, Any]) -> KeystrokeError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(KeystrokeError):
    code = "invalid_request"
    status = 400
    exit_code = 2


class ConfigError(UsageError):
    code = "invalid_configuration"


class InputError(UsageError):
    code = "invalid_input"


class GrammarError(InputError):
    code = "invalid_grammar"

    @classmethod
    def of(cls, origin: str, what: str) -> GrammarError:
        """`what` is said of the field `origin` of a request."""
        return cls(f"{origin} {what}", param=origin)


class ContextOverflow(UsageError):
    code = "context_length_exceeded"


class NotFound(UsageError):
    code = "not_found"
    status = 404


class ModelError(KeystrokeError):
    code = "model_error"


class ModelDamaged(ModelError):
    code = "model_damaged"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class NotEnoughMemory(ModelError):
    code = "not_enough_memory"
    status = 503


class NotEnoughDisk(ModelError):
    code = "not_enough_disk"
    status = 507


class EngineError(KeystrokeError):
    code = "engine_error"


class Interrupted(EngineError):
    code = "interrupted"
    status = 499
    exit_code = 130  # as Ctrl-C


class SessionClosed(EngineError):
    code = "session_closed"


class Unavailable(EngineError):
    code = "unavailable"
    status = 503
    retryable = True


class Restarting(Unavailable):
    code = "server_restarting"


class AccessError(KeystrokeError):
    code = "access_denied"
    status = 403


class Unauthorized(AccessError):
    code = "invalid_api_key"
    status = 401


class Forbidden(AccessError):
    code = "forbidden"


class RateLimited(AccessError):
    code = "rate_limit_exceeded"
    status = 429
    retryable = True

    def __init__(self, message: str, *, retry_after: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after = retry_after


class QueueFull(RateLimited):
    code = "queue_full"


class ProtocolError(KeystrokeError):
    code = "protocol_error"
    status = 400
