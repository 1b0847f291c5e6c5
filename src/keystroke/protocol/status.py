"""Status messages of the gateway: loaded models, progress of a load, progress before the first token."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from keystroke.protocol.response import ErrorDetail


class LoadRequest(Struct, kw_only=True):
    """The body of `POST /v1/models/load`: a name or a role."""

    model: Annotated[str, Meta(max_length=4096)] = "auto"


class ModelStatus(Struct, frozen=True, kw_only=True):
    """One model. Fields that only a loaded model has are None until it is loaded."""

    name: str
    role: str
    state: Literal["loaded", "loading", "offered", "remote"]
    chat: bool | None = None
    fill_in: str | None = None  # the order of its fill-in-the-middle format
    engine: str | None = None
    architecture: str | None = None
    precision: str | None = None
    parameters: int | None = None
    weight_bytes: int | None = None
    cached_bytes: int | None = None
    context: int | None = None
    path: str | None = None
    languages: list[str] | None = None  # those it was trained on, if its card names them
    running: int = 0
    waiting: int = 0
    parallel: int = 1  # answers that cost about as much as one
    joint: int = 1  # answers that together take about as long as two, or less


class GatewayStatus(Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/status`."""

    version: str
    pid: int
    models: list[ModelStatus]
    sockets: int = 0  # open WebSockets: editors and pages


class LoadStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of progress. The last one is `ready` with the model, or `failed` with the error."""

    state: Literal["loading", "ready", "failed"]
    what: str = ""
    done: int = 0
    total: int = 0
    model: ModelStatus | None = None
    error: ErrorDetail | None = None
    status: int = 200


class WaitingNotice(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Progress before the first token, sent as a comment to clients that request it: the position in the
    queue, or how many tokens of the prompt have been read."""

    position: int = 0
    read: int = 0
    prompt: int = 0
