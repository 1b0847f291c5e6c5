"""The prompt of a live buffer, arranged so that a key only appends to it and the KV cache stays valid.

Project context comes first and is replaced only on request. Then, for models that take the suffix first,
comes the text below the cursor, a snapshot that may lag behind edits far below; then the text above, which
begins at an anchored line. The prefix tokens always equal a fresh encoding of the text from the anchor to the
cursor, less the half word before the cursor, which the model writes again (token healing).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from keystroke.assist.completion.extent import line_at, line_before, only_closers
from keystroke.assist.completion.prompt import CONTROL_TOKENS, LONGEST_TOKEN, trim_text
from keystroke.engine.model import Model
from keystroke.text.diff import common_prefix
from keystroke.text.edit import Edit

SUFFIX_SHARE = 4  # at most one token in four is for text below the cursor
CONTEXT_SHARE = 4  # likewise for pieces of other files
# A model that takes the prefix first recomputes the suffix with each key, so it gets a short one.
SHORT_SUFFIX = 48
FILL = 0.6  # how full the prefix is after its anchor moved; the rest is room for typing
LEAST = 0.25  # a prefix that fills less of its room gets an anchor further up
NEAR = 160  # characters below the cursor that are always up to date
LONGEST_WORD = 24  # characters of a half word that the model writes again
# Tokenizers put the character before a word into its token: a space, a dot, an underscore.
_HALF_WORD = re.compile(r"(?:[^\w\r\n]|_)?[^\W\d_]+\Z")


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A piece of another file, for the front of the prompt."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class WindowPrompt:
    """`repeated`: text left of the cursor that is not in the prompt, because the model writes it again; where
    it is a half word, the answer is forced to start with it (`begin`). A remote model gets `prefix` and
    `suffix` instead."""

    tokens: list[int]
    stops: frozenset[int]
    repeated: str
    prefix: str = ""
    suffix: str = ""
    begin: str = ""


def half_word(before: str) -> str:
    """The letters right before the cursor, with the character that is part of their token."""
    found = _HALF_WORD.search(before)
    return found[0] if found else ""


class TextWindow:
    """The prompt for a remote model: the text around the cursor."""

    lagging = False

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def set_context(self, files: Sequence[ContextFile]) -> bool:
        return False

    def resize(self, budget: int) -> None:
        self._budget = budget

    def apply_edits(self, edits: Sequence[Edit]) -> None:
        pass

    def prompt(self, text: str, cursor: int, *, refresh: bool = False) -> WindowPrompt:
        before, after = trim_text(text[:cursor], text[cursor:], budget=self._budget)
        return WindowPrompt([], frozenset(), "", before, after)


class PromptWindow:
    def __init__(self, model: Model, budget: int, path: str | None = None) -> None:
        self._model = model
        self._path = path
        self.resize(budget)
        from keystroke.engine.tokenizer.incremental import IncrementalEncoder  # here: it works with numpy

        self._encoder = IncrementalEncoder(model.tokenizer)
        self._prefix = ""  # the encoder's text
        self.anchor = 0  # where the prefix begins in the text
        self._suffix = ""
        self._suffix_tokens: list[int] = []
        self._header: list[int] = []
        self.lagging = False  # the suffix snapshot differs from the text
        self.set_context(())

    def resize(self, budget: int) -> None:
        """Set the room for tokens; later prompts fill it."""
        self._room = max(32, min(budget, self._model.engine.info.context_length // 2) - CONTROL_TOKENS)

    def set_context(self, files: Sequence[ContextFile]) -> bool:
        """Put pieces of other files in front, in at most 1 / CONTEXT_SHARE of the room.

        Returns whether that changed anything. A change costs a full prefill: call it when nobody types.
        """
        tokens: list[int] = []
        fim, tokenizer = self._model.fim, self._model.tokenizer
        separator = (
            [] if fim is None or fim.file_sep is None else tokenizer.encode(fim.file_sep, special=True)
        )
        if separator:
            left = self._room // CONTEXT_SHARE
            for file in files:
                piece = [*separator, *tokenizer.encode(f"{file.path}\n{file.text.rstrip()}\n")]
                if len(piece) <= left:
                    tokens += piece
                    left -= len(piece)
            if self._path:
                tokens += [*separator, *tokenizer.encode(f"{self._path}\n")]
        changed = tokens != self._header
        self._header = tokens
        return changed

    def apply_edits(self, edits: Sequence[Edit]) -> None:
        """Keep the anchor at its line after `edits`, which happened one after another."""
        for edit in edits:
            if edit.end <= self.anchor and edit.start < self.anchor:
                self.anchor += edit.delta
            elif edit.start < self.anchor:
                self.anchor = 0  # the anchored line itself changed: find a new one

    def prompt(self, text: str, cursor: int, *, refresh: bool = False) -> WindowPrompt:
        """The prompt at the cursor. `refresh`: bring the suffix snapshot up to date."""
        model = self._model
        begin = half_word(text[max(0, cursor - LONGEST_WORD) : cursor])
        body = cursor - len(begin)
        if model.fim is None and not begin:
            # Most tokens begin with their space, so a prompt must not end in one.
            line = line_before(text, cursor)
            body = cursor - (len(line) - len(line.rstrip(" \t")))
        repeated = text[body:cursor]
        if model.fim is not None:
            self._update_suffix(text, cursor, refresh)
        room = self._room - len(self._suffix_tokens) - len(self._header)
        self._update_prefix(text, body, room)
        first = [] if model.tokenizer.bos is None else [model.tokenizer.bos]
        if model.fim is None:
            lead = self._encoder.tokens or model.tokenizer.encode("\n")
            return WindowPrompt([*first, *self._header, *lead], frozenset(), repeated, begin=begin)
        tokens = model.fim.assemble(model.tokenizer, self._encoder.tokens, self._suffix_tokens)
        return WindowPrompt(
            [*first, *self._header, *tokens[len(first) :]], model.fim.stops, repeated, begin=begin
        )

    # The prefix

    def _update_prefix(self, text: str, end: int, room: int) -> None:
        if self.anchor > end or (self.anchor and text[self.anchor - 1 : self.anchor] != "\n"):
            self.anchor = self._find_anchor(text, end, room)
        self._encode(text[max(self.anchor, end - room * LONGEST_TOKEN) : end])
        count = len(self._encoder.tokens)
        if count > room or len(self._prefix) < end - self.anchor or (self.anchor and count < room * LEAST):
            self.anchor = self._find_anchor(text, end, room)
            self._encode(text[self.anchor : end])
            while len(self._encoder.tokens) > room:  # dense text: the estimate was too low
                half = (self.anchor + end) // 2
                at = text.find("\n", half, end) + 1
                self.anchor = at or max(half, end - room)
                self._encode(text[self.anchor : end])

    def _find_anchor(self, text: str, end: int, room: int) -> int:
        """Where the prefix should begin: the start of a line, preferably a top-level one."""
        size, tokens = len(self._prefix), len(self._encoder.tokens)
        density = size / tokens if tokens > 64 else 3.0
        start = end - int(room * FILL * density)
        if start <= 0 or end <= int(room * LEAST * density):
            return 0
        at = text.find("\n", start, end) + 1
        if not at:
            return start
        near = at
        for _ in range(24):  # lines
            if text[near : near + 1].strip():
                return near
            near = text.find("\n", near, end) + 1
            if not near:
                break
        return at

    def _encode(self, prefix: str) -> None:
        if prefix == self._prefix:
            return
        same = common_prefix(self._prefix, prefix)
        self._encoder.edit(same, len(self._prefix), prefix[same:])
        self._prefix = prefix

    # The suffix

    def _update_suffix(self, text: str, cursor: int, refresh: bool) -> None:
        _, end = line_at(text, cursor)
        # An editor adds and removes closing brackets while the user types, so they are left out.
        start = end if only_closers(text[cursor:end]) else cursor
        fim = self._model.fim
        assert fim is not None
        room = self._room // SUFFIX_SHARE if fim.order == "spm" else SHORT_SUFFIX
        wanted = text[start : start + room * LONGEST_TOKEN // 2]
        if wanted == self._suffix:
            self.lagging = False
            return
        near = min(NEAR, len(wanted))
        if not refresh and self._suffix and wanted[:near] == self._suffix[:near] and len(wanted) >= NEAR:
            self.lagging = True
            return
        self.lagging = False
        self._suffix = wanted
        tokens = self._model.tokenizer.encode(wanted)
        if len(tokens) > room:
            kept = self._model.tokenizer.decode(tokens[:room])
            whole = kept.rpartition("\n")[0]
            tokens = self._model.tokenizer.encode(whole) if whole.strip() else tokens[:room]
        self._suffix_tokens = tokens[:room]
