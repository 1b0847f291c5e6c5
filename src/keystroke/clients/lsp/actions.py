"""Code actions, rename and edits by instruction.

Listing actions sends no request, because editors list at every cursor move; the change is requested when an
action is chosen. It becomes one workspace edit, and is refused if the text has changed meanwhile. Files
outside the workspace are never changed.
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
# A TODO comment is offered as an instruction, for editors that cannot prompt for one.
_TODO = re.compile(r"(?:#|//|--|/\*|<!--)[ \t]*(?:TODO|FIXME)\b[ \t]*(?:\([^)\n]*\))?[:\- \t]+([^\n]{3,300})")
_NAME = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class _RefactoringAction:
    refactoring: live.Refactoring
    title: str
    kind: types.CodeActionKind


_SELECTED = (
    _RefactoringAction("extract_function", "Extract function", _Kind.RefactorExtract),
    _RefactoringAction("extract_variable", "Extract variable", _Kind.RefactorExtract),
)
_AT_NAME = (_RefactoringAction("inline", "Inline", _Kind.RefactorInline),)
_ALWAYS = (_RefactoringAction("organise_imports", "Organise imports", _Kind.SourceOrganizeImports),)


class Actions:
    """`versioned`: the editor accepts versioned edits. `resolvable`: it resolves an action's edit later."""

    def __init__(self, documents: Documents, channel: Channel, findings: Findings) -> None:
        self._documents, self._channel, self._findings = documents, channel, findings
        self.versioned = False
        self.resolvable = False

    # Listing

    def list_actions(
        self, uri: str, range_: types.Range, only: Sequence[str] | None
    ) -> list[types.CodeAction | types.Command]:
        document = self._documents.get_usable(uri)
        if document is None:
            return []
        start, end = document.span(range_)
        found: list[types.CodeAction] = []
        if _matches_kind(_Kind.QuickFix, only):
            found += self._fixes(document, start, end)
        if document.language == "python":
            found += self._refactorings(document, start, end, only)
        if _matches_kind(_REWRITE, only):
            found += self._todo_actions(document, start, end)
        return [*found]

    def _fixes(self, document: OpenDocument, start: int, end: int) -> list[types.CodeAction]:
        """The fixes on the lines of the selection, those under it first."""
        fixes: list[types.CodeAction] = []
        quiet: list[types.CodeAction] = []
        first = document.text.rfind("\n", 0, start) + 1
        last = document.text.find("\n", end)
        last = len(document.text) if last < 0 else last
        near = [f for f in self._findings.current_findings(document) if f.start <= last and f.end >= first]
        near.sort(key=lambda finding: finding.start > end or finding.end < start)
        for finding in near:
            for index, (title, edits) in enumerate(finding.fixes):
                preferred = index == 0 < finding.ready
                fixes.append(self._fix(document, title, edits, finding.diagnostic, preferred=preferred))
            for reason in REASONS if finding.audited else ():
                edit = suppression_edit(document, finding.start, finding.code, reason)
                if edit is not None:
                    title = f"Suppress {finding.code}: {reason}"
                    quiet.append(self._fix(document, title, (edit,), finding.diagnostic, preferred=False))
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
        for offer in (*offers, *(_ALWAYS if only else ())):  # source actions are only requested by kind
            if not _matches_kind(offer.kind, only):
                continue
            arguments = [document.uri, document.range(start, end), offer.refactoring, ""]
            actions.append(self._deferred_action(offer.title, offer.kind, REFACTOR, arguments))
        return actions

    def _todo_actions(self, document: OpenDocument, start: int, end: int) -> list[types.CodeAction]:
        first = document.text.rfind("\n", 0, start) + 1
        last = document.text.find("\n", end)
        last = len(document.text) if last < 0 else last
        actions = []
        for todo in _TODO.finditer(document.text, first, last):
            instruction = todo[1].replace("*/", "").replace("-->", "").strip()
            region = (first, last) if end > start else (0, 0)
            arguments = [document.uri, document.range(*region), instruction]
            actions.append(self._deferred_action(f"Do: {instruction:.60}", _REWRITE, EDIT, arguments))
        return actions

    def _deferred_action(
        self, title: str, kind: types.CodeActionKind, command: str, arguments: list[Any]
    ) -> types.CodeAction:
        """An action whose edit is computed when it is chosen."""
        if self.resolvable:
            return types.CodeAction(title, kind, data={"command": command, "arguments": arguments})
        return types.CodeAction(title, kind, command=types.Command(title, command, arguments=arguments))

    # Doing

    async def refactor(
        self, uri: str, range_: types.Range, kind: live.Refactoring, name: str = ""
    ) -> types.WorkspaceEdit:
        if kind.startswith("extract") and not name:
            name = "extracted"
        return await self._request(live.RefactorAsk, uri, range_, kind=kind, name=name)

    async def edit(self, uri: str, range_: types.Range | None, instruction: str) -> types.WorkspaceEdit:
        self._require_document(uri)
        if not instruction.strip():
            raise InputError("The instruction is empty; describe what to change.")
        return await self._request(live.EditAsk, uri, range_, instruction=instruction.strip())

    async def _request(
        self,
        request: type[live.RefactorAsk] | type[live.EditAsk],
        uri: str,
        range_: types.Range | None,
        **fields: Any,
    ) -> types.WorkspaceEdit:
        document = self._require_document(uri)
        start, end = document.span(range_) if range_ is not None else (0, 0)
        name, version = self._channel.new_id(), document.revision
        ask = request(id=name, buffer=uri, version=version, start=start, end=end, **fields)
        return self._to_workspace_edit(document, await self._channel.request(ask))

    def suppress(self, uri: str, line: int, rule: str, reason: str) -> types.WorkspaceEdit:
        document = self._require_document(uri)
        offset = document.offset(types.Position(line, 0))
        edit = suppression_edit(document, offset, rule, reason)
        if edit is None:
            raise InputError("A suppression needs a reason, and a line that a comment can precede.")
        return self._workspace_edit([(document, (edit,))])

    # Rename

    def prepare_rename(self, uri: str, position: types.Position) -> types.PrepareRenamePlaceholder | None:
        document = self._documents.get_usable(uri)
        if document is None or document.language != "python":
            return None
        span = _name_at(document, document.offset(position))
        if span is None:
            return None
        return types.PrepareRenamePlaceholder(document.range(*span), document.text[slice(*span)])

    async def rename(self, uri: str, position: types.Position, name: str) -> types.WorkspaceEdit:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise InputError(f"{name:.60} is not a valid Python name; choose another.")
        document = self._require_document(uri)
        span = _name_at(document, document.offset(position))
        if span is None or document.language != "python":
            raise InputError("There is no name here that can be renamed.")
        return await self.refactor(uri, document.range(*span), "rename", name)

    # Edits

    def _require_document(self, uri: str) -> OpenDocument:
        document = self._documents.get_usable(uri)
        if document is None:
            raise InputError("This document is not open, or is too large.")
        return document

    def _to_workspace_edit(self, document: OpenDocument, reply: object) -> types.WorkspaceEdit:
        if isinstance(reply, live.Changes) and reply.version != document.revision:
            raise InputError("The text changed meanwhile; try again.")
        if not isinstance(reply, live.Changes) or not reply.files:
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
                texts.append((self._workspace_file(file.path), edits))
            else:
                raise InputError("A document that the change needs was closed meanwhile; try again.")
        return self._workspace_edit(texts)

    def _workspace_file(self, path: str) -> Path:
        """The resolved path. Raises Forbidden for a file outside the workspace."""
        file = Path(path).resolve()
        if not any(file.is_relative_to(Path(root).resolve()) for root in self._documents.roots):
            raise Forbidden(f"The change would modify {file}, which is outside the workspace.")
        return file

    def _workspace_edit(
        self, texts: Sequence[tuple[OpenDocument | Path, Sequence[Edit]]]
    ) -> types.WorkspaceEdit:
        plain: dict[str, list[types.TextEdit]] = {}
        versioned: list[types.TextDocumentEdit] = []
        for target, edits in texts:
            if isinstance(target, OpenDocument):
                uri, version, changes = target.uri, target.version, target.text_edits(edits)
            else:
                uri, version = from_fs_path(str(target)) or str(target), None
                changes = self._file_text_edits(target, edits)
            plain[uri] = changes
            identity = types.OptionalVersionedTextDocumentIdentifier(uri, version)
            versioned.append(types.TextDocumentEdit(identity, [*changes]))
        if self.versioned:
            return types.WorkspaceEdit(document_changes=[*versioned])
        return types.WorkspaceEdit(changes={uri: [*edits] for uri, edits in plain.items()})

    def _file_text_edits(self, file: Path, edits: Sequence[Edit]) -> list[types.TextEdit]:
        try:
            text = file.read_bytes().decode("utf-8-sig")  # editors do not count the byte order mark
        except (OSError, UnicodeDecodeError):
            raise InputError(f"{file} cannot be read as UTF-8 text; open it first.") from None
        document, encoding = Document(text), self._documents.encoding
        return [types.TextEdit(to_range(document, e.start, e.end, encoding), e.text) for e in edits]


def _matches_kind(kind: str, only: Sequence[str] | None) -> bool:
    return not only or any(kind == asked or kind.startswith(f"{asked}.") for asked in only)


def _name_at(document: OpenDocument, offset: int) -> tuple[int, int] | None:
    """The span of the identifier at an offset."""
    line = document.document.position(offset, "utf-32").line
    start, end = document.document.line_span(line)
    for found in _NAME.finditer(document.text, start, end):
        if found.start() <= offset <= found.end():
            return None if keyword.iskeyword(found[0]) else found.span()
    return None
