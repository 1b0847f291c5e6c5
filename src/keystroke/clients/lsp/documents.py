"""The documents an editor has open.

Each is an immutable snapshot that moves on by the editor's own edits; those of the recent past are kept,
so that an answer about an older revision can be carried onto the text of now. The editor's version is only
reported back: revisions are counted here, because not every editor counts as it should. No I/O.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from lsprotocol import types
from pygls.uris import to_fs_path, urlparse

from keystroke.text import Document, Dropped, Edit, Encoding, Position, rebase_all

HISTORY = 512  # changes remembered; an answer older than that is dropped
_LONE = re.compile("[\ud800-\udfff]")
NOTEBOOK_SCHEMES = ("vscode-notebook-cell", "vscode-notebook")


def replace_surrogates(text: str) -> str:
    """Half characters, which some editors send, as the replacement character: as wide in every encoding."""
    return _LONE.sub("\ufffd", text) if not text.isascii() else text


@dataclass(slots=True)
class OpenDocument:
    """`refusal`: why nothing is done for this document, if so."""

    uri: str
    document: Document
    version: int
    language: str
    path: str | None
    root: str | None
    encoding: Encoding
    refusal: str | None = None
    revision: int = 0
    _past: deque[tuple[int, tuple[Edit, ...]]] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def text(self) -> str:
        return self.document.text

    def apply_changes(
        self, version: int | None, changes: Iterable[types.TextDocumentContentChangeEvent]
    ) -> tuple[Edit, ...]:
        """Make the editor's changes, each counted in what the one before it left; the edits they are."""
        made: list[Edit] = []
        for change in changes:
            text = replace_surrogates(change.text)
            if isinstance(change, types.TextDocumentContentChangePartial):
                edit = self.to_edit(change.range, text)
            else:
                edit = Edit(0, len(self.text), text)
            self.document = self.document.apply((edit,))
            made.append(edit)
        self.revision += 1
        if version is not None:
            self.version = version
        edits = tuple(made)
        self._past.append((self.revision, edits))
        return edits

    def edits_since(self, revision: int) -> tuple[Edit, ...] | None:
        """The edits made after a revision, one after another; None where they are forgotten."""
        if revision == self.revision:
            return ()
        if revision > self.revision or not self._past or self._past[0][0] > revision + 1:
            return None
        return tuple(edit for made, edits in self._past if made > revision for edit in edits)

    def carry_span(self, start: int, end: int, revision: int) -> tuple[int, int] | None:
        """Where a span of an older revision lies now; None where it was typed into, or is unknown."""
        edits = self.edits_since(revision)
        if edits is None:
            return None
        for edit in edits:
            if edit.end <= start:
                start, end = start + edit.delta, end + edit.delta
            elif edit.start < end:
                return None
        return start, end

    def rebase_edits(self, edits: Sequence[Edit], revision: int) -> tuple[Edit, ...] | None:
        """Edits made for an older revision as edits of the text now; None where typing overtook them."""
        typed = self.edits_since(revision)
        if typed is None:
            return None
        if not typed:
            return tuple(edits)
        moved = rebase_all(edits, typed)
        return None if isinstance(moved, Dropped) else moved

    # Places

    def offset(self, place: types.Position) -> int:
        return self.document.offset(place.line, place.character, self.encoding, clamp=True)

    def span(self, place: types.Range) -> tuple[int, int]:
        start, end = self.offset(place.start), self.offset(place.end)
        return min(start, end), max(start, end)

    def to_edit(self, place: types.Range, text: str) -> Edit:
        return Edit(*self.span(place), text)

    def range(self, start: int, end: int) -> types.Range:
        return to_range(self.document, start, end, self.encoding)

    def text_edits(self, edits: Iterable[Edit]) -> list[types.TextEdit]:
        return [types.TextEdit(self.range(edit.start, edit.end), edit.text) for edit in edits]


def to_range(document: Document, start: int, end: int, encoding: Encoding) -> types.Range:
    size = len(document)
    first = document.position(min(start, size), encoding)
    last = document.position(min(end, size), encoding)
    return types.Range(_place(first), _place(last))


def _place(position: Position) -> types.Position:
    return types.Position(position.line, position.column)


class Documents:
    """Open documents by URI. `roots` are the folders the editor works in."""

    def __init__(self, max_characters: int) -> None:
        self.encoding: Encoding = "utf-16"
        self.roots: list[str] = []
        self._max = max_characters
        self._open: dict[str, OpenDocument] = {}

    def __iter__(self) -> Iterator[OpenDocument]:
        return iter(tuple(self._open.values()))

    def get(self, uri: str) -> OpenDocument | None:
        return self._open.get(uri)

    def get_usable(self, uri: str) -> OpenDocument | None:
        """The document, if it is open and something is done for it."""
        found = self._open.get(uri)
        return found if found is not None and found.refusal is None else None

    def open(self, item: types.TextDocumentItem) -> OpenDocument:
        """Open a document; one that is open already begins anew. Revisions go on rising either way."""
        before = self._open.get(item.uri)
        path = path_of(item.uri)
        opened = OpenDocument(
            uri=item.uri,
            document=Document(replace_surrogates(item.text)),
            version=item.version,
            language=item.language_id,
            path=path,
            root=self.root_of(path),
            encoding=self.encoding,
            revision=before.revision + 1 if before else 0,
        )
        opened.refusal = self.refusal(opened)
        self._open[item.uri] = opened
        return opened

    def close(self, uri: str) -> OpenDocument | None:
        return self._open.pop(uri, None)

    def refusal(self, opened: OpenDocument) -> str | None:
        if urlparse(opened.uri)[0] in NOTEBOOK_SCHEMES:
            return "cells of notebooks are left alone"
        if len(opened.text) > self._max:
            return f"it is larger than assist.max_file_kb ({self._max // 1024} KB)"
        if "\0" in opened.text:
            return "it is not text"
        return None

    def root_of(self, path: str | None) -> str | None:
        """The innermost workspace folder a path lies in."""
        if path is None:
            return self.roots[0] if self.roots else None
        inside = [root for root in self.roots if PurePath(path).is_relative_to(root)]
        return max(inside, key=len) if inside else None

    def find_by_path(self, path: str) -> OpenDocument | None:
        """The open document of a file."""
        wanted = Path(path)
        return next((d for d in self._open.values() if d.path is not None and Path(d.path) == wanted), None)


def path_of(uri: str) -> str | None:
    """The file a URI names; None for a document that has none yet."""
    return to_fs_path(uri) if urlparse(uri)[0] == "file" else None
