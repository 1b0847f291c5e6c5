"""What language server tests share: the real `keystroke lsp` over stdio, driven as an editor would."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lsprotocol import types
from pytest_lsp import LanguageClient, client_capabilities, make_test_lsp_client

from keystroke.text import Document, Encoding

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))

from gateway_support import RunningServer, scripted_model, serving

__all__ = ["Editor", "RunningServer", "editing", "eventually", "scripted_model", "serving"]

PROGRAM = str(Path(sys.executable).with_name("keystroke"))
PATIENCE = 60.0  # seconds for anything to happen; a loaded machine is slow, not wrong


@dataclass
class Editor:
    """One editor session. It keeps its own copy of each text, so edits go out as an editor sends them."""

    client: LanguageClient
    root: Path
    result: types.InitializeResult
    texts: dict[str, Document] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    applied: list[types.ApplyWorkspaceEditParams] = field(default_factory=list)

    @property
    def encoding(self) -> Encoding:
        return self.result.capabilities.position_encoding or "utf-16"  # type: ignore[return-value]

    def uri(self, name: str) -> str:
        return name if ":" in name else (self.root / name).as_uri()

    # Texts

    def open(self, name: str, text: str, language: str = "python", version: int = 1) -> str:
        uri = self.uri(name)
        self.texts[uri], self.versions[uri] = Document(text), version
        item = types.TextDocumentItem(uri, language, version, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(item))
        return uri

    def type(self, uri: str, text: str, offset: int | None = None, *, version: int | None = None) -> None:
        """Insert at an offset, or at the end."""
        at = len(self.texts[uri]) if offset is None else offset
        self.replace(uri, at, at, text, version=version)

    def replace(self, uri: str, start: int, end: int, text: str, *, version: int | None = None) -> None:
        document = self.texts[uri]
        place = self.range(uri, start, end)
        self.texts[uri] = Document(document.text[:start] + text + document.text[end:])
        self.versions[uri] = self.versions[uri] + 1 if version is None else version
        self.client.text_document_did_change(
            types.DidChangeTextDocumentParams(
                types.VersionedTextDocumentIdentifier(uri=uri, version=self.versions[uri]),
                [types.TextDocumentContentChangePartial(range=place, text=text)],
            )
        )

    def make(self, edit: types.WorkspaceEdit | None) -> None:
        """Do what a workspace edit says, and tell the server as an editor would."""
        assert edit is not None
        changes = {c.text_document.uri: c.edits for c in edit.document_changes or ()}  # type: ignore[union-attr]
        for uri, edits in (changes or edit.changes or {}).items():
            spans = [(*self.span(uri, e.range), e.new_text) for e in edits]  # type: ignore[union-attr]
            for start, end, text in sorted(spans, reverse=True):
                self.replace(uri, start, end, text)

    def close(self, uri: str) -> None:
        self.client.text_document_did_close(
            types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(uri))
        )

    def text(self, uri: str) -> str:
        return self.texts[uri].text

    def place(self, uri: str, offset: int) -> types.Position:
        at = self.texts[uri].position(offset, self.encoding)
        return types.Position(at.line, at.column)

    def range(self, uri: str, start: int, end: int) -> types.Range:
        return types.Range(self.place(uri, start), self.place(uri, end))

    def span(self, uri: str, place: types.Range) -> tuple[int, int]:
        document = self.texts[uri]
        return (
            document.offset(place.start.line, place.start.character, self.encoding),
            document.offset(place.end.line, place.end.character, self.encoding),
        )

    # Questions

    def ask(
        self, uri: str, offset: int | None = None, *, invoked: bool = True, name: str | None = None
    ) -> asyncio.Future[Any]:
        """The request for ghost text, on its way."""
        kind = types.InlineCompletionTriggerKind
        sent = self.client.protocol.send_request(
            types.TEXT_DOCUMENT_INLINE_COMPLETION,
            types.InlineCompletionParams(
                context=types.InlineCompletionContext(kind.Invoked if invoked else kind.Automatic),
                text_document=types.TextDocumentIdentifier(uri),
                position=self.place(uri, len(self.texts[uri]) if offset is None else offset),
            ),
            msg_id=name,
        )
        return asyncio.wrap_future(sent)

    async def ghost(self, uri: str, offset: int | None = None, *, invoked: bool = True) -> str | None:
        """The ghost text at an offset; asked for until the gateway is there."""
        item = await self.item(uri, offset, invoked=invoked)
        return item.insert_text if item is not None else None  # type: ignore[return-value]

    async def item(
        self, uri: str, offset: int | None = None, *, invoked: bool = True
    ) -> types.InlineCompletionItem | None:
        got = await self.ask(uri, offset, invoked=invoked)
        return got.items[0] if got is not None and got.items else None

    async def until_ghost(self, uri: str) -> str:
        found: list[str] = []

        async def there() -> bool:
            text = await self.ghost(uri)
            found.append(text or "")
            return bool(text)

        await eventually(there)
        return found[-1]

    async def request(self, method: str, params: Any) -> Any:
        """A request that the protocol library has no type for; its answer as plain values."""
        sent = self.client.protocol.send_request(method, params)
        return plain(await asyncio.wrap_future(sent))

    async def connected(self) -> bool:
        params = types.ExecuteCommandParams("keystroke.status", [])
        return bool(plain(await self.client.workspace_execute_command_async(params))["connected"])

    async def send(self, body: bytes) -> None:
        """Bytes as they are, in the frame of a message."""
        writer: Any = self.client.protocol.writer
        sent = writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        if asyncio.iscoroutine(sent):
            await sent

    def codes(self, uri: str) -> list[Any]:
        return [d.code for d in self.client.diagnostics.get(uri, ())]

    async def until_codes(self, uri: str, wanted: Callable[[list[Any]], bool]) -> None:
        await eventually(lambda: wanted(self.codes(uri)), lambda: f"{self.codes(uri)}")

    async def actions(
        self, uri: str, start: int, end: int | None = None, only: Sequence[str] | None = None
    ) -> list[types.CodeAction]:
        place = self.range(uri, start, start if end is None else end)
        context = types.CodeActionContext([], only=only)
        params = types.CodeActionParams(types.TextDocumentIdentifier(uri), place, context)
        found = await self.client.text_document_code_action_async(params)
        return [a for a in found or () if isinstance(a, types.CodeAction)]


def plain(value: Any) -> Any:
    """A value without the types that the client's library made up for it."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@asynccontextmanager
async def editing(
    root: Path,
    *options: str,
    editor: str = "emacs",
    encodings: Sequence[str] | None = None,
    pulls: bool = False,
    tasks: bool = False,
    environment: dict[str, str] | None = None,
) -> AsyncIterator[Editor]:
    """A session of `keystroke lsp` in a home of its own, ended as an editor ends it."""
    ours = ("KEYSTROKE", "XDG_")
    home = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    (root / "config").mkdir(exist_ok=True)
    home |= {"KEYSTROKE_CONFIG": str(root / "config"), "KEYSTROKE_PATHS_STATE": str(root / "state")}
    client = make_test_lsp_client()
    applied: list[types.ApplyWorkspaceEditParams] = []

    def apply(params: types.ApplyWorkspaceEditParams) -> types.ApplyWorkspaceEditResult:
        applied.append(params)
        return types.ApplyWorkspaceEditResult(applied=True)

    client.feature(types.WORKSPACE_APPLY_EDIT)(apply)

    await client.start_io(PROGRAM, "lsp", *options, env={**home, **(environment or {})})
    capabilities = client_capabilities(editor)
    if encodings is not None:
        kinds = [types.PositionEncodingKind(name) for name in encodings]
        capabilities.general = types.GeneralClientCapabilities(position_encodings=kinds)
    if pulls:
        assert capabilities.text_document is not None
        assert capabilities.workspace is not None
        capabilities.text_document.diagnostic = types.DiagnosticClientCapabilities()
        capabilities.workspace.diagnostics = types.DiagnosticWorkspaceClientCapabilities(refresh_support=True)
    if tasks:
        capabilities.experimental = {"keystrokeTasks": True}
    folder = types.WorkspaceFolder(root.as_uri(), root.name)
    result = await client.initialize_session(
        types.InitializeParams(capabilities=capabilities, workspace_folders=[folder])
    )
    try:
        yield Editor(client, root, result, applied=applied)
    finally:
        await client.shutdown_session()
        await client.stop()  # type: ignore[no-untyped-call]


async def eventually(
    condition: Callable[[], Any], explain: Callable[[], str] = lambda: "it never happened"
) -> None:
    """Wait for a condition, which may be a coroutine function."""
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                holds = condition()
                if asyncio.iscoroutine(holds):
                    holds = await holds
                if holds:
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(explain()) from None
