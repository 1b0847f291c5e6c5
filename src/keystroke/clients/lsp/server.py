"""The language server: connects the editor's messages with the live channel.

Notifications are handled at once and in order. Each request is a task; cancelling it reaches the engine.
Nothing waits for the gateway: without one the editor gets empty answers, one message when it is lost and one
when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from typing import Any, cast

from lsprotocol import types
from pygls.exceptions import FeatureRequestError, JsonRpcException, JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, default_converter
from pygls.protocol.language_server import lsp_method
from pygls.uris import to_fs_path

from keystroke.clients.gateway_address import GatewayAddress
from keystroke.clients.local_gateway import process_exists
from keystroke.clients.lsp.actions import Actions
from keystroke.clients.lsp.channel import Channel
from keystroke.clients.lsp.documents import Documents, OpenDocument
from keystroke.clients.lsp.findings import Findings
from keystroke.clients.lsp.suggestions import Suggestions, field_of
from keystroke.clients.lsp.tasks import EditorTasks
from keystroke.config import AssistSettings
from keystroke.errors import KeystrokeError, Unavailable
from keystroke.protocol import live_messages as live
from keystroke.text import Encoding

log = logging.getLogger("keystroke.lsp")

CHECK_AFTER = 0.25  # seconds without a change after which problems are requested
EDITOR_POLL = 10.0  # seconds between checks that the editor's process exists
LANGUAGES_CHECKED = frozenset({"python"})


class EditorProtocol(LanguageServerProtocol):
    """pygls' protocol with our own documents, so that pygls keeps no second copy of each text."""

    _server: KeystrokeServer

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> None:
        self._server.open_document(params.text_document)

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> None:
        self._server.change_document(params.text_document, params.content_changes)

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> None:
        self._server.close_document(params.text_document.uri)

    # Notebooks are ignored.

    @lsp_method(types.NOTEBOOK_DOCUMENT_DID_OPEN)
    def lsp_notebook_document__did_open(self, params: object) -> None: ...

    @lsp_method(types.NOTEBOOK_DOCUMENT_DID_CHANGE)
    def lsp_notebook_document__did_change(self, params: object) -> None: ...

    @lsp_method(types.NOTEBOOK_DOCUMENT_DID_CLOSE)
    def lsp_notebook_document__did_close(self, params: object) -> None: ...

    @lsp_method(types.WORKSPACE_EXECUTE_COMMAND)
    async def lsp_workspace__execute_command(self, params: types.ExecuteCommandParams) -> Any:  # type: ignore[override]
        """Run the command in the request's own task, so that cancelling the request cancels the work."""
        handler = self.fm.commands.get(params.command)
        if handler is None:
            raise JsonRpcInvalidParams(f"there is no command {params.command:.80}")
        result = handler(*(params.arguments or ()))
        return await result if inspect.isawaitable(result) else result

    @lsp_method(types.EXIT)
    def lsp_exit(self, *_args: object) -> None:  # type: ignore[override]
        self._server.exit_code = 0 if self._shutdown else 1
        self._server.exited.set()


class KeystrokeServer(LanguageServer):
    def __init__(
        self, settings: AssistSettings, locate: Callable[[], Awaitable[GatewayAddress]], version: str = "0"
    ) -> None:
        super().__init__(
            "keystroke", version, protocol_cls=EditorProtocol, converter_factory=default_converter
        )
        self.exited = asyncio.Event()
        self.exit_code = 1
        self.model = ""  # the model that completes, once a buffer is ready
        self._locate = locate
        self.channel = Channel(self._locate_with_progress, on_event=self._on_event, on_notice=self._on_notice)
        self.documents = Documents(settings.max_file_kb * 1024)
        self.findings = Findings()
        self.suggestions = Suggestions(self.documents, self.channel)
        self.actions = Actions(self.documents, self.channel, self.findings)
        self.tasks = EditorTasks(self, self, self._locate_with_progress)
        self.pulls_diagnostics = False  # the editor requests diagnostics itself
        self._checks: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged: set[str] = set()

    # Lifecycle

    def read_capabilities(self, params: types.InitializeParams) -> None:
        """Read the editor's capabilities and folders."""
        encoding = self.workspace.position_encoding
        self.documents.encoding = cast(Encoding, str(getattr(encoding, "value", encoding)))
        folders = [folder.uri for folder in params.workspace_folders or ()]
        if not folders and params.root_uri:
            folders = [params.root_uri]
        self.documents.roots = [path for uri in folders if (path := to_fs_path(uri))]
        workspace, document = params.capabilities.workspace, params.capabilities.text_document
        edits = workspace.workspace_edit if workspace else None
        self.actions.versioned = bool(edits and edits.document_changes)
        action = document.code_action if document else None
        resolve = action.resolve_support if action else None
        self.actions.resolvable = bool(resolve and "edit" in resolve.properties)
        refresh = workspace.diagnostics.refresh_support if workspace and workspace.diagnostics else None
        experimental = params.capabilities.experimental
        self.tasks.has_task_view = bool(field_of(experimental, "keystrokeTasks"))
        self.pulls_diagnostics = bool(document and document.diagnostic and refresh)

    def connect(self) -> None:
        """Connect to a gateway in the background."""
        self.spawn(self._connect())

    def watch_editor(self, editor: int) -> None:
        """Exit when the editor's process has ended without an `exit` notification."""
        if process_exists(editor):
            asyncio.get_running_loop().call_later(EDITOR_POLL, self.watch_editor, editor)
        else:
            self.exited.set()

    async def _connect(self) -> None:
        try:
            await self.channel.start()
        except KeystrokeError as error:
            self.show(error.message, types.MessageType.Error)

    async def _locate_with_progress(self) -> GatewayAddress:
        """The gateway's address. A wait of more than a second is shown as progress."""
        locating = asyncio.ensure_future(self._locate())
        done, _ = await asyncio.wait({locating}, timeout=1.0)
        if done:
            return locating.result()
        async with self.show_progress("Keystroke", "starting the model"):
            return await locating

    async def stop(self) -> None:
        for timer in self._checks.values():
            timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await self.channel.stop()
        await self.tasks.stop()
        await asyncio.sleep(0)

    def change_folders(self, event: types.WorkspaceFoldersChangeEvent) -> None:
        removed = {to_fs_path(folder.uri) for folder in event.removed}
        kept = [root for root in self.documents.roots if root not in removed]
        new = [path for folder in event.added if (path := to_fs_path(folder.uri))]
        self.documents.roots = list(dict.fromkeys([*kept, *new]))
        for document in self.documents:
            root = self.documents.root_of(document.path)
            if root != document.root:
                document.root = root
                self._send_document(document)

    # Documents

    def open_document(self, item: types.TextDocumentItem) -> None:
        document = self.documents.open(item)
        self._open_or_refuse(document, document.refusal)

    def change_document(self, identity: types.VersionedTextDocumentIdentifier, changes: Any) -> None:
        document = self.documents.get(identity.uri)
        if document is None:
            self.log_once(f"ignored a change of {identity.uri}, which is not open")
            return
        if identity.version is not None and identity.version <= document.version:
            self.log_once(f"{identity.uri} changed, but its version did not increase; the change was applied")
        edits = document.apply_changes(identity.version, changes)
        refusal = self.documents.refusal(document)
        if refusal != document.refusal:
            self._open_or_refuse(document, refusal)
        elif refusal is None:
            self.channel.change(document.uri, document.revision, edits, text=document.text)
            self._schedule_check(document)

    def move_cursor(self, uri: str, position: types.Position) -> None:
        """Report the cursor's position to the gateway."""
        document = self.documents.get_usable(uri)
        if document is not None:
            self.channel.move_cursor(uri, document.offset(position))

    def check_now(self, uri: str) -> None:
        document = self.documents.get_usable(uri)
        if document is not None:
            self._schedule_check(document, 0.0)

    def close_document(self, uri: str) -> None:
        document = self.documents.close(uri)
        timer = self._checks.pop(uri, None)
        if timer is not None:
            timer.cancel()
        self.channel.close(uri)
        self.findings.forget(uri)
        self.suggestions.forget(uri)
        if document is not None and not self.pulls_diagnostics:
            self.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))

    def _open_or_refuse(self, document: OpenDocument, refusal: str | None) -> None:
        document.refusal = refusal
        if refusal is None:
            self._send_document(document)
            return
        self.channel.close(document.uri)
        self.findings.forget(document.uri)
        self.log_once(f"{document.uri}: {refusal}")
        self._publish(document)

    def _send_document(self, document: OpenDocument) -> None:
        self.channel.open(
            document.uri,
            document.text,
            document.revision,
            path=document.path,
            root=document.root,
            language=document.language,
        )
        self._schedule_check(document)

    # Findings

    def _schedule_check(self, document: OpenDocument, seconds: float = CHECK_AFTER) -> None:
        if document.language not in LANGUAGES_CHECKED:
            return
        uri = document.uri
        timer = self._checks.pop(uri, None)
        if timer is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._checks[uri] = loop.call_later(seconds, lambda: self.spawn(self._check(uri)))

    async def _check(self, uri: str) -> None:
        document = self.documents.get_usable(uri)
        if document is None:
            return
        ask = live.ProblemsAsk(id=self.channel.new_id(), buffer=uri, version=document.revision)
        with contextlib.suppress(KeystrokeError):  # the next change, or the next gateway, checks again
            reply = await self.channel.request(ask)
            if isinstance(reply, live.Problems) and self.documents.get(uri) is document:
                self.findings.set_problems(reply)
                self._publish(document)

    def _publish(self, document: OpenDocument) -> None:
        news = self.findings.changed_diagnostics(document)
        if news is None:
            return
        if self.pulls_diagnostics:
            self.workspace_diagnostic_refresh(None)
            return
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(document.uri, news, document.version)
        )

    # Events from the gateway

    def _on_event(self, event: live.LiveEvent) -> None:
        if isinstance(event, live.Diagnostics):
            document = self.documents.get_usable(event.buffer)
            if document is not None:
                self.findings.set_audit(event)
                self._publish(document)
        elif isinstance(event, live.Ready):
            self.model = event.model
            document = self.documents.get_usable(event.buffer)
            if document is not None:
                self._schedule_check(document)
            if event.note:
                self.log_once(f"{event.buffer}: {event.note}")
        elif isinstance(event, live.SuggestionRevised) and event.verdict != "confirmed":
            # LSP has no way to push ghost text. An editor that handles this notification requests it again;
            # in any other the next key shows it.
            revised = {"uri": event.buffer, "verdict": event.verdict, "model": event.receipt.model}
            self.protocol.notify("keystroke/suggestionRevised", revised)

    def _on_notice(self, sentence: str) -> None:
        self.show(sentence, types.MessageType.Warning)

    # Messages to the editor

    def show(self, message: str, kind: types.MessageType) -> None:
        self.window_show_message(types.ShowMessageParams(kind, f"Keystroke: {message}"))

    def log_once(self, message: str) -> None:
        """Write a line to the editor's log, unless it is there already."""
        if message not in self._logged:
            self._logged.add(message)
            self.window_log_message(types.LogMessageParams(types.MessageType.Info, message))

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Log internal errors instead of showing them."""
        if source is not FeatureRequestError:  # a failed request was answered with its error
            log.error("a message failed: %s", error)

    @contextlib.asynccontextmanager
    async def show_progress(
        self, title: str, message: str, token: Any = None
    ) -> AsyncIterator[Callable[[str], None]]:
        """Show work-done progress, which the user may cancel; yields a function that changes its message.
        `token` is the editor's own, if it gave one. Otherwise one is requested, without waiting: Helix
        answers nothing until its rename is done."""
        progress, window = self.work_done_progress, self.client_capabilities.window
        asks = token is None
        if asks and (window is None or not window.work_done_progress):
            yield lambda _message: None
            return
        token = f"keystroke-{self.channel.new_id()}" if asks else token
        task = asyncio.current_task()
        begun = over = False

        def begin() -> None:
            nonlocal begun
            begun = True
            cancelled = progress.tokens.setdefault(token, Future())
            if task is not None and not over:
                cancelled.add_done_callback(lambda future: task.cancel() if future.cancelled() else None)
            progress.begin(token, types.WorkDoneProgressBegin(title=title, message=message, cancellable=True))

        def report(message: str) -> None:
            if begun:
                progress.report(token, types.WorkDoneProgressReport(message=message))

        def end() -> None:
            progress.end(token, types.WorkDoneProgressEnd())
            progress.tokens.pop(token, None)

        async def ask() -> None:
            with contextlib.suppress(JsonRpcException):
                await progress.create_async(token)
                begin()
                if over:  # the work finished before the editor created the token
                    end()

        if asks:
            self.spawn(ask())
        else:
            begin()
        try:
            yield report
        finally:
            over = True
            if begun:
                end()

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    async def apply_edit(self, label: str, edit: types.WorkspaceEdit) -> None:
        """Have the editor apply an edit. Raises Unavailable if it refuses."""
        done = await self.workspace_apply_edit_async(types.ApplyWorkspaceEditParams(edit, label))
        if not done.applied:
            raise Unavailable(f"The editor did not apply it: {done.failure_reason or 'no reason given'}.")
