"""The documents an editor has open.

This is the only copy of each text in the process. Recent edits are kept, so that an answer for an older
revision can be rebased onto the current text. Revisions are counted here, because some editors do not
increase their versions; the editor's version is only reported back. No I/O.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from lsprotocol import types
from pygls.uris import to_fs_path, urlparse

from keystroke.text import Document, Dropped, Edit, Encoding, rebase_all

HISTORY = 512  # changes kept; an answer older than that is dropped
_SURROGATES = re.compile("[\ud800-\udfff]")
NOTEBOOK_SCHEMES = ("vscode-notebook-cell", "vscode-notebook")


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which some editors send, by a character of the same width in UTF-16."""
    return _SURROGATES.sub("\ufffd", text) if not text.isascii() else text


@dataclass(slots=True)
class OpenDocument:
    """`refusal`: why this document is ignored, if it is."""

    uri: str
    document: Document
    version: int
    language: str
    path: str | None
    root: str | None
    encoding: Encoding
    refusal: str | None = None
    revision: int = 0
    _history: deque[tuple[int, tuple[Edit, ...]]] = field(default_factory=lambda: deque(maxlen=HISTORY))

    @property
    def text(self) -> str:
        return self.document.text

    def apply_changes(
        self, version: int | None, changes: Iterable[types.TextDocumentContentChangeEvent]
    ) -> tuple[Edit, ...]:
        """Apply the editor's changes, each relative to the result of the one before; return the edits."""
        edits: list[Edit] = []
        for change in changes:
            text = replace_surrogates(change.text)
            if isinstance(change, types.TextDocumentContentChangePartial):
                edit = self.to_edit(change.range, text)
            else:
                edit = Edit(0, len(self.text), text)
            self.document = self.document.apply((edit,))
            edits.append(edit)
        self.revision += 1
        if version is not None:
            self.version = version
        self._history.append((self.revision, tuple(edits)))
        return tuple(edits)

    def edits_since(self, revision: int) -> tuple[Edit, ...] | None:
        """The edits made after a revision, in order; None if they are no longer kept."""
        if revision == self.revision:
            return ()
        if revision > self.revision or not self._history or self._history[0][0] > revision + 1:
            return None
        return tuple(edit for changed, edits in self._history if changed > revision for edit in edits)

    def carry_span(self, start: int, end: int, revision: int) -> tuple[int, int] | None:
        """The current position of a span of an older revision; None if it was edited, or is unknown."""
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
        """Edits for an older revision as edits of the current text; None if they conflict with newer ones."""
        typed = self.edits_since(revision)
        if typed is None:
            return None
        if not typed:
            return tuple(edits)
        moved = rebase_all(edits, typed)
        return None if isinstance(moved, Dropped) else moved

    # Positions

    def offset(self, position: types.Position) -> int:
        return self.document.offset(position.line, position.character, self.encoding, clamp=True)

    def span(self, range_: types.Range) -> tuple[int, int]:
        start, end = self.offset(range_.start), self.offset(range_.end)
        return min(start, end), max(start, end)

    def to_edit(self, range_: types.Range, text: str) -> Edit:
        return Edit(*self.span(range_), text)

    def range(self, start: int, end: int) -> types.Range:
        return to_range(self.document, start, end, self.encoding)

    def text_edits(self, edits: Iterable[Edit]) -> list[types.TextEdit]:
        return [types.TextEdit(self.range(edit.start, edit.end), edit.text) for edit in edits]


def to_range(document: Document, start: int, end: int, encoding: Encoding) -> types.Range:
    size = len(document)
    first = document.position(min(start, size), encoding)
    last = document.position(min(end, size), encoding)
    return types.Range(types.Position(first.line, first.column), types.Position(last.line, last.column))


class Documents:
    """Open documents by URI. `roots` are the workspace folders."""

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
        """The document, if it is open and not refused."""
        found = self._open.get(uri)
        return found if found is not None and found.refusal is None else None

    def open(self, item: types.TextDocumentItem) -> OpenDocument:
        """Open a document, or reopen it with a higher revision."""
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
            return "notebook cells are not supported"
        if len(opened.text) > self._max:
            return f"it is larger than assist.max_file_kb ({self._max // 1024} KB)"
        if "\0" in opened.text:
            return "it is not text"
        return None

    def root_of(self, path: str | None) -> str | None:
        """The innermost workspace folder that contains a path."""
        if path is None:
            return self.roots[0] if self.roots else None
        inside = [root for root in self.roots if PurePath(path).is_relative_to(root)]
        return max(inside, key=len) if inside else None

    def find_by_path(self, path: str) -> OpenDocument | None:
        """The open document of a file."""
        wanted = Path(path)
        return next((d for d in self._open.values() if d.path is not None and Path(d.path) == wanted), None)


def path_of(uri: str) -> str | None:
    """The file of a URI; None for a document without one."""
    return to_fs_path(uri) if urlparse(uri)[0] == "file" else None
