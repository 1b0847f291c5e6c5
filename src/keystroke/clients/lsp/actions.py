"""Code actions, rename and edits by instruction: what can be done here, and doing it.

Listing is cheap and asks nobody (editors list at every move of the cursor); what an action would change
is asked for when it is chosen. Changes come back whole, and are turned into one workspace edit for the text
they were made for; a text that changed meanwhile refuses them.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsprotocol import types
from pygls.uris import from_fs_path

from keystroke.clients.lsp.channel import Channel
from keystroke.clients.lsp.commands import EDIT, REFACTOR
from keystroke.clients.lsp.documents import Documents, OpenDocument, to_range
from keystroke.clients.lsp.findings import REASONS, Findings, suppression_edit
from keystroke.errors import Forbidden, InputError
from keystroke.protocol import live_messages as live
from keystroke.text import Document, Edit

_Kind = types.CodeActionKind
_REWRITE = _Kind.RefactorRewrite
# A comment that asks for something: whoever has no way to be asked for an instruction writes it down.
_WISH = re.compile(r"(?:#|//|--|/\*|<!--)[ \t]*(?:TODO|FIXME)\b[ \t]*(?:\([^)\n]*\))?[:\- \t]+([^\n]{3,300})")
_NAME = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class _Offer:
    refactoring: live.Refactoring
    title: str
    kind: types.CodeActionKind


_SELECTED = (
    _Offer("extract_function", "Extract function", _Kind.RefactorExtract),
    _Offer("extract_variable", "Extract variable", _Kind.RefactorExtract),
)
_AT_NAME = (_Offer("inline", "Inline", _Kind.RefactorInline),)
_ALWAYS = (_Offer("organise_imports", "Organise imports", _Kind.SourceOrganizeImports),)


class Actions:
    """`versioned`: the editor takes edits that name the version they are for."""

    def __init__(self, documents: Documents, channel: Channel, findings: Findings) -> None:
        self._documents, self._channel, self._findings = documents, channel, findings
        self.versioned = False
        self.resolvable = False

    # Listing

    def list_actions(
        self, uri: str, place: types.Range, only: Sequence[str] | None
    ) -> list[types.CodeAction | types.Command]:
        document = self._documents.get_usable(uri)
        if document is None:
            return []
        start, end = document.span(place)
        found: list[types.CodeAction] = []
        if _wanted(_Kind.QuickFix, only):
            found += self._fixes(document, start, end)
        if document.language == "python":
            found += self._refactorings(document, start, end, only)
        if _wanted(_REWRITE, only):
            found += self._wishes(document, start, end)
        return [*found]

    def _fixes(self, document: OpenDocument, start: int, end: int) -> list[types.CodeAction]:
        fixes: list[types.CodeAction] = []
        quiet: list[types.CodeAction] = []
        for known in self._findings.placed(document):
            if known.start > end or known.end < start:
                continue
            for index, (title, edits) in enumerate(known.fixes):
                preferred = index == 0 < known.ready
                fixes.append(self._fix(document, title, edits, known.diagnostic, preferred=preferred))
            for reason in REASONS if known.audited else ():
                edit = suppression_edit(document, known.start, known.code, reason)
                if edit is not None:
                    title = f"Suppress {known.code}: {reason}"
                    quiet.append(self._fix(document, title, (edit,), known.diagnostic, preferred=False))
        return fixes + quiet

    def _fix(
        self,
        document: OpenDocument,
        title: str,
        edits: Sequence[Edit],
        about: types.Diagnostic,
        *,
        preferred: bool,
    ) -> types.CodeAction:
        return types.CodeAction(
            title=title,
            kind=_Kind.QuickFix,
            diagnostics=[about],
            is_preferred=preferred or None,
            edit=self._workspace_edit([(document, edits)]),
        )

    def _refactorings(
        self, document: OpenDocument, start: int, end: int, only: Sequence[str] | None
    ) -> list[types.CodeAction]:
        offers = list(_SELECTED if end > start else _AT_NAME if _name_at(document, start) else ())
        actions = []
        for offer in (*offers, *(_ALWAYS if only else ())):  # source actions are asked for by kind
            if not _wanted(offer.kind, only):
                continue
            arguments = [document.uri, document.range(start, end), offer.refactoring, ""]
            actions.append(self._later(offer.title, offer.kind, REFACTOR, arguments))
        return actions

    def _wishes(self, document: OpenDocument, start: int, end: int) -> list[types.CodeAction]:
        first = document.text.rfind("\n", 0, start) + 1
        last = document.text.find("\n", end)
        last = len(document.text) if last < 0 else last
        actions = []
        for wish in _WISH.finditer(document.text, first, last):
            instruction = wish[1].replace("*/", "").replace("-->", "").strip()
            region = (first, last) if end > start else (0, 0)
            arguments = [document.uri, document.range(*region), instruction]
            actions.append(self._later(f"Do: {instruction:.60}", _REWRITE, EDIT, arguments))
        return actions

    def _later(
        self, title: str, kind: types.CodeActionKind, command: str, arguments: list[Any]
    ) -> types.CodeAction:
        """An action whose edit is made when it is chosen."""
        if self.resolvable:
            return types.CodeAction(title, kind, data={"command": command, "arguments": arguments})
        return types.CodeAction(title, kind, command=types.Command(title, command, arguments=arguments))

    # Doing

    async def refactor(
        self, uri: str, place: types.Range, kind: live.Refactoring, name: str = ""
    ) -> types.WorkspaceEdit:
        document = self._opened(uri)
        start, end = document.span(place)
        if kind.startswith("extract") and not name:
            name = "extracted"
        ask = live.RefactorAsk(
            id=self._channel.new_id(),
            buffer=uri,
            version=document.revision,
            kind=kind,
            start=start,
            end=end,
            name=name,
        )
        return self._made(document, await self._channel.request(ask))

    async def edit(self, uri: str, place: types.Range | None, instruction: str) -> types.WorkspaceEdit:
        document = self._opened(uri)
        start, end = document.span(place) if place is not None else (0, 0)
        if not instruction.strip():
            raise InputError("The instruction is empty; say what to change.")
        ask = live.EditAsk(
            id=self._channel.new_id(),
            buffer=uri,
            version=document.revision,
            start=start,
            end=end,
            instruction=instruction.strip(),
        )
        return self._made(document, await self._channel.request(ask))

    def suppress(self, uri: str, line: int, rule: str, reason: str) -> types.WorkspaceEdit:
        document = self._opened(uri)
        offset = document.offset(types.Position(line, 0))
        edit = suppression_edit(document, offset, rule, reason)
        if edit is None:
            raise InputError("A suppression needs a reason, and a line before which a comment can stand.")
        return self._workspace_edit([(document, (edit,))])

    # Rename

    def prepare_rename(self, uri: str, place: types.Position) -> types.PrepareRenamePlaceholder | None:
        document = self._documents.get_usable(uri)
        if document is None or document.language != "python":
            return None
        span = _name_at(document, document.offset(place))
        if span is None:
            return None
        return types.PrepareRenamePlaceholder(document.range(*span), document.text[slice(*span)])

    async def rename(self, uri: str, place: types.Position, name: str) -> types.WorkspaceEdit:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"{name:.60} is not a name that Python allows; choose another.")
        document = self._opened(uri)
        span = _name_at(document, document.offset(place))
        if span is None or document.language != "python":
            raise InputError("There is no name here that can be renamed.")
        return await self.refactor(uri, document.range(*span), "rename", name)

    # Edits

    def _opened(self, uri: str) -> OpenDocument:
        document = self._documents.get_usable(uri)
        if document is None:
            raise InputError("This document is not open, or too large to be worked on.")
        return document

    def _made(self, document: OpenDocument, reply: object) -> types.WorkspaceEdit:
        if not isinstance(reply, live.Changes):
            raise InputError("There is nothing to change.")
        if reply.version != document.revision:
            raise InputError("The text changed meanwhile; try again.")
        if not reply.files:
            raise InputError("There is nothing to change.")
        texts: list[tuple[OpenDocument | Path, Sequence[Edit]]] = []
        for file in reply.files:
            edits = [Edit(d.start, d.end, d.text) for d in file.edits]
            opened = self._documents.get(file.buffer) if file.buffer is not None else None
            if opened is None and file.path is not None:
                opened = self._documents.find_by_path(file.path)
            if opened is not None:
                texts.append((opened, edits))
            elif file.path is not None:
                texts.append((self._inside(file.path), edits))
            else:
                raise InputError("A document that the change needs was closed meanwhile; try again.")
        return self._workspace_edit(texts)

    def _inside(self, path: str) -> Path:
        """A file of the workspace; nothing outside it is ever changed."""
        file = Path(path).resolve()
        if not any(file.is_relative_to(Path(root).resolve()) for root in self._documents.roots):
            raise Forbidden(f"The change would reach {file}, which is outside the workspace.")
        return file

    def _workspace_edit(
        self, texts: Sequence[tuple[OpenDocument | Path, Sequence[Edit]]]
    ) -> types.WorkspaceEdit:
        plain: dict[str, list[types.TextEdit]] = {}
        versioned: list[types.TextDocumentEdit] = []
        for target, edits in texts:
            if isinstance(target, OpenDocument):
                uri, version, made = target.uri, target.version, target.text_edits(edits)
            else:
                uri, version = from_fs_path(str(target)) or str(target), None
                made = self._in_file(target, edits)
            plain[uri] = made
            identity = types.OptionalVersionedTextDocumentIdentifier(uri, version)
            versioned.append(types.TextDocumentEdit(identity, [*made]))
        if self.versioned:
            return types.WorkspaceEdit(document_changes=[*versioned])
        return types.WorkspaceEdit(changes={uri: [*edits] for uri, edits in plain.items()})

    def _in_file(self, file: Path, edits: Sequence[Edit]) -> list[types.TextEdit]:
        try:
            text = file.read_bytes().decode("utf-8-sig")  # an editor does not count the mark
        except (OSError, UnicodeDecodeError):
            raise InputError(f"{file} cannot be read as UTF-8 text; open it first.") from None
        document, encoding = Document(text), self._documents.encoding
        return [types.TextEdit(to_range(document, e.start, e.end, encoding), e.text) for e in edits]


def _wanted(kind: str, only: Sequence[str] | None) -> bool:
    return not only or any(kind == asked or kind.startswith(f"{asked}.") for asked in only)


def _name_at(document: OpenDocument, offset: int) -> tuple[int, int] | None:
    """The identifier that an offset touches."""
    line = document.document.position(offset, "utf-32").line
    start, end = document.document.line_span(line)
    for found in _NAME.finditer(document.text, start, end):
        if found.start() <= offset <= found.end():
            return None if keyword.iskeyword(found[0]) else found.span()
    return None
