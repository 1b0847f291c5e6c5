"""The prompt for a completion: as much text around the cursor as fits, cut between lines.

Text before the cursor comes first, then text after it; what is farthest from the cursor is dropped first. A
model that can fill in the middle gets both sides, any other only the text before the cursor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from keystroke.engine.model import Model
from keystroke.engine.tokenizer import Tokenizer
from keystroke.errors import ContextOverflow, InputError

AFTER_SHARE = 4  # at most one token in four is for the text after the cursor, unless there is room left
CONTROL_TOKENS = 8  # room for the format's control tokens
LONGEST_TOKEN = 16  # characters; avoids encoding a whole large file
CHARACTERS_PER_TOKEN = 3  # of code, where there is no tokenizer


@dataclass(frozen=True, slots=True)
class CompletionPrompt:
    """`repeated`: white space left of the cursor that is not in the prompt; the model writes it again."""

    tokens: tuple[int, ...]
    stops: frozenset[int]
    repeated: str
    trimmed: bool


def build_prompt(model: Model, prefix: str, suffix: str, *, budget: int, max_tokens: int) -> CompletionPrompt:
    """At most `budget` tokens around the cursor, and never more than leaves `max_tokens` of the context.
    ContextOverflow if nothing would be left; InputError if there is no text to continue."""
    room = min(budget, model.engine.info.context_length - max_tokens) - CONTROL_TOKENS
    if room <= 0:
        raise ContextOverflow(
            f"{max_tokens} tokens of answer leave no room for a prompt in a context of "
            f"{model.engine.info.context_length}; ask for fewer tokens"
        )
    fim = model.fim
    if fim is None:
        # Most tokens begin with their space, so a prompt must not end in one.
        body = prefix.rstrip(" \t")
        repeated, suffix = prefix[len(body) :], ""
        prefix = body
    else:
        repeated = ""
    if not prefix.strip() and not suffix.strip():
        raise InputError("there is no text before the cursor to go on from; write a line first")
    after = _encode_head(model.tokenizer, suffix, room // AFTER_SHARE)
    before = _encode_tail(model.tokenizer, prefix, room - len(after.tokens))
    if after.trimmed and len(before.tokens) + len(after.tokens) < room:
        after = _encode_head(model.tokenizer, suffix, room - len(before.tokens))
    if fim is not None:
        tokens = fim.assemble(model.tokenizer, before.tokens, after.tokens)
        return CompletionPrompt(tuple(tokens), fim.stops, repeated, before.trimmed or after.trimmed)
    first = [] if model.tokenizer.bos is None else [model.tokenizer.bos]
    return CompletionPrompt((*first, *before.tokens), frozenset(), repeated, before.trimmed)


def trim_text(prefix: str, suffix: str, *, budget: int) -> tuple[str, str]:
    """The same cut for a remote model: by characters, between lines."""
    room = budget * CHARACTERS_PER_TOKEN
    share = room // AFTER_SHARE
    after = "".join(_lines_that_fit(suffix.splitlines(keepends=True), share, len)) or suffix[:share]
    left = room - len(after)
    lines = _lines_that_fit(reversed(prefix.splitlines(keepends=True)), left, len)
    return "".join(reversed(lines)) or prefix[-left:], after


@dataclass(frozen=True, slots=True)
class _Side:
    tokens: list[int]
    trimmed: bool


def _encode_tail(tokenizer: Tokenizer, text: str, room: int) -> _Side:
    """The last whole lines of `text` that fit, or the last tokens of the last line."""
    near = text[-room * LONGEST_TOKEN :] if room else ""
    tokens = tokenizer.encode(near)
    if len(tokens) <= room and len(near) == len(text):
        return _Side(tokens, False)
    lines = near.splitlines(keepends=True)
    if len(near) < len(text) and len(lines) > 1:
        lines = lines[1:]
    kept = _lines_that_fit(reversed(lines), room, lambda line: len(tokenizer.encode(line)))
    if not kept:
        return _Side(tokens[-room:] if room else [], True)
    tokens = tokenizer.encode("".join(reversed(kept)))
    return _Side(tokens[-room:], True)


def _encode_head(tokenizer: Tokenizer, text: str, room: int) -> _Side:
    near = text[: room * LONGEST_TOKEN]
    tokens = tokenizer.encode(near)
    if len(tokens) <= room and len(near) == len(text):
        return _Side(tokens, False)
    kept = _lines_that_fit(near.splitlines(keepends=True), room, lambda line: len(tokenizer.encode(line)))
    return _Side((tokenizer.encode("".join(kept)) if kept else tokens)[:room], True)


def _lines_that_fit(lines: Iterable[str], room: int, size: Callable[[str], int]) -> list[str]:
    """The first lines that fit into the room."""
    kept: list[str] = []
    for line in lines:
        room -= size(line)
        if room < 0:
            break
        kept.append(line)
    return kept
