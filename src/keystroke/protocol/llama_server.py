"""Bodies of the endpoints that llama.cpp's clients use beside completion: tokens, templates and slots."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from keystroke.protocol.requests import ChatMessage, ChatTool, Name


class TokenizeRequest(Struct, kw_only=True):
    """The body of `POST /tokenize`."""

    content: str
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: Name | None = None


class TokenPiece(Struct, frozen=True):
    """A token with its text, or with its bytes where they are not valid UTF-8."""

    id: int
    piece: str | list[int]


class TokenizeReply(Struct, frozen=True):
    tokens: list[int | TokenPiece]


class DetokenizeRequest(Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]]
    model: Name | None = None


class DetokenizeReply(Struct, frozen=True):
    content: str


class TemplateRequest(Struct, kw_only=True):
    """The body of `POST /apply-template`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: list[ChatTool] | None = None
    model: Name | None = None


class TemplateReply(Struct, frozen=True):
    prompt: str


class ServerProps(Struct, frozen=True, kw_only=True):
    """The reply of `GET /props`."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str


class ServerSlot(Struct, frozen=True, kw_only=True):
    """One place of a model in the reply of `GET /slots`."""

    id: int
    model: str
    n_ctx: int
    is_processing: bool
    speculative: bool
    id_task: int | UnsetType = UNSET
