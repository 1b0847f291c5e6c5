"""What a gateway says about itself and its models.

Shapes only, for the clients of this project: which models are loaded, how far a load has come, how far
an answer is from its first word.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from keystroke.protocol.response import ErrorDetail


class LoadRequest(Struct, kw_only=True):
    """The body of `POST /v1/models/load`: a name or a role."""

    model: Annotated[str, Meta(max_length=4096)] = "auto"


class ModelStatus(Struct, frozen=True, kw_only=True):
    """One model. What only a loaded one has is None for one that is offered or being loaded."""

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
    languages: list[str] | None = None  # those it has learned, where its card says so
    running: int = 0
    waiting: int = 0


class Status(Struct, frozen=True, kw_only=True):
    """The body of `GET /v1/status`."""

    version: str
    pid: int
    models: list[ModelStatus]


class LoadStep(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the answer to a load. The last one is `ready` with the model, or `failed` with why."""

    state: Literal["loading", "ready", "failed"]
    what: str = ""
    done: int = 0
    total: int = 0
    model: ModelStatus | None = None
    error: ErrorDetail | None = None
    status: int = 200


class Waiting(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sign of life in a stream before its first word, sent as a comment to those who ask for it: the place
    in the queue, or how many tokens of the prompt have been read."""

    position: int = 0
    read: int = 0
    prompt: int = 0
