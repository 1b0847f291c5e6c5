"""Which messages the language server answers, and with what.

A table in code. Each handler reads its parameters, calls one thing and returns; an error of ours becomes
a response error with its own sentence, or a message where nobody waits for a response.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

from lsprotocol import types
from pygls.exceptions import JsonRpcException

from keystroke.clients.lsp.commands import (
    ACCEPTED,
    ACTION_KINDS,
    EDIT,
    RECONNECT,
    REFACTOR,
    STATUS,
    SUPPRESS,
    TASK,
    TASK_ACT,
    TASK_DIFF,
    TASKS,
)
from keystroke.clients.lsp.server import KeystrokeServer
from keystroke.clients.lsp.suggestions import field_of
from keystroke.errors import KeystrokeError, UsageError
from keystroke.protocol import live_messages as live

FRESH = 1.0  # seconds a pulled report waits for the audit of the last key
_REQUEST_FAILED = -32803
_INVALID_PARAMS = -32602


class RequestFailed(JsonRpcException):
    """An error of ours as a response."""

    def __init__(self, error: KeystrokeError) -> None:
        code = _INVALID_PARAMS if isinstance(error, UsageError) else _REQUEST_FAILED
        super().__init__(message=error.message, code=code)


def register(server: KeystrokeServer) -> None:
    _life(server)
    _suggestions(server)
    _diagnostics(server)
    _actions(server)
    _commands(server)
    _tasks(server)


def _life(server: KeystrokeServer) -> None:
    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        server.read_capabilities(params)
        if server.pulls_diagnostics:
            _pull(server)

    @server.feature(types.INITIALIZED)
    def initialized(_params: types.InitializedParams) -> None:
        server.connect()
        if server.process_id is not None:
            server.watch_editor(server.process_id)

    @server.feature(types.SHUTDOWN)
    async def shutdown(*_params: Any) -> None:
        await server.stop()

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def did_save(params: types.DidSaveTextDocumentParams) -> None:
        server.check_now(params.text_document.uri)

    @server.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    def folders(params: types.DidChangeWorkspaceFoldersParams) -> None:
        server.change_folders(params.event)

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def configuration(_params: types.DidChangeConfigurationParams) -> None:
        """Settings are read from files, by the gateway."""


def _suggestions(server: KeystrokeServer) -> None:
    suggestions = server.suggestions

    @server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())
    async def inline(params: types.InlineCompletionParams) -> types.InlineCompletionList | None:
        invoked = params.context.trigger_kind is types.InlineCompletionTriggerKind.Invoked
        selected = params.context.selected_completion_info
        return await suggestions.inline(params.text_document.uri, params.position, invoked, selected)

    @server.feature("textDocument/copilotInlineEdit")
    async def inline_edit(params: Any) -> dict[str, Any]:
        document, place = field_of(params, "textDocument"), field_of(params, "position")
        uri, version = field_of(document, "uri"), field_of(document, "version")
        line, column = field_of(place, "line"), field_of(place, "character")
        if not isinstance(uri, str) or not isinstance(line, int) or not isinstance(column, int):
            raise RequestFailed(UsageError("textDocument/copilotInlineEdit needs textDocument and position."))
        return await suggestions.next_edit(uri, version, types.Position(line, column))

    @server.feature("keystroke/receipt")
    def receipt(params: Any) -> dict[str, Any]:
        """Why nothing is shown, or where the time of what is shown went."""
        return suggestions.receipt(str(field_of(params, "uri")))

    @server.feature("textDocument/didShowCompletion")
    def shown(params: Any) -> None:
        suggestions.feedback(field_of(field_of(params, "item"), "command"), "shown")

    @server.feature("textDocument/didShowInlineEdit")
    def shown_edit(params: Any) -> None:
        suggestions.feedback(field_of(field_of(params, "item"), "command"), "shown")

    @server.feature("textDocument/didPartiallyAcceptCompletion")
    def partly_accepted(params: Any) -> None:
        length = field_of(params, "acceptedLength")
        command = field_of(field_of(params, "item"), "command")
        suggestions.feedback(command, "partial", length if isinstance(length, int) else None)

    @server.feature("textDocument/didFocus")
    def focused(params: Any) -> None:
        uri = field_of(field_of(params, "textDocument"), "uri")
        if isinstance(uri, str):
            server.check_now(uri)  # other files may have changed since it was last looked at


def _diagnostics(server: KeystrokeServer) -> None:
    @server.feature("keystroke/findings")
    def findings(params: Any) -> list[types.Diagnostic]:
        """What is known about a document now, for clients that show it in their own way."""
        document = server.documents.get_usable(str(field_of(params, "uri")))
        return server.findings.diagnostics(document) if document is not None else []


def _pull(server: KeystrokeServer) -> None:
    options = types.DiagnosticOptions(inter_file_dependencies=True, workspace_diagnostics=False)

    @server.feature(types.TEXT_DOCUMENT_DIAGNOSTIC, options)
    async def pulled(params: types.DocumentDiagnosticParams) -> types.DocumentDiagnosticReport:
        document = server.documents.get_usable(params.text_document.uri)
        if document is None:
            return types.RelatedFullDocumentDiagnosticReport([])
        if server.channel.connected:
            await server.findings.wait_until_fresh(document, FRESH)
        server.findings.changed_diagnostics(document)  # what is told here need not be announced again
        return types.RelatedFullDocumentDiagnosticReport(server.findings.diagnostics(document))


def _actions(server: KeystrokeServer) -> None:
    actions = server.actions

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(code_action_kinds=list(ACTION_KINDS), resolve_provider=True),
    )
    def listed(params: types.CodeActionParams) -> list[types.CodeAction | types.Command]:
        if params.range.start == params.range.end:
            server.move_cursor(
                params.text_document.uri, params.range.end
            )  # editors ask wherever the cursor goes
        return actions.list_actions(params.text_document.uri, params.range, params.context.only)

    @server.feature(types.CODE_ACTION_RESOLVE)
    async def resolved(action: types.CodeAction) -> types.CodeAction:
        command = field_of(action.data, "command")
        arguments = field_of(action.data, "arguments")
        if isinstance(command, str) and isinstance(arguments, (list, tuple)):
            async with server.show_progress("Keystroke", action.title):
                action.edit = await _failing(_edit_of(server, command, list(arguments)))
        return action

    @server.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    def prepared(params: types.PrepareRenameParams) -> types.PrepareRenamePlaceholder | None:
        return actions.prepare_rename(params.text_document.uri, params.position)

    @server.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    async def renamed(params: types.RenameParams) -> types.WorkspaceEdit:
        async with server.show_progress(
            "Keystroke", f"renaming to {params.new_name}", params.work_done_token
        ):
            return await _failing(actions.rename(params.text_document.uri, params.position, params.new_name))


def _commands(server: KeystrokeServer) -> None:
    def doing(command: str, label: str) -> None:
        @server.command(command)
        async def run(*arguments: Any) -> bool:
            """Make an edit and have the editor apply it; what goes wrong is shown."""
            try:
                async with server.show_progress("Keystroke", label):
                    edit = await _edit_of(server, command, list(arguments))
                await server.apply_edit(label, edit)
            except KeystrokeError as error:
                server.show(error.message, types.MessageType.Warning)
                return False
            return True

    doing(EDIT, "edit")
    doing(REFACTOR, "refactoring")
    doing(SUPPRESS, "suppress finding")

    @server.command(ACCEPTED)
    def accepted(*arguments: Any) -> None:
        server.suggestions.feedback({"arguments": list(arguments)}, "accepted")

    @server.command(RECONNECT)
    def reconnect(*_arguments: Any) -> None:
        if not server.channel.connected:
            server.connect()

    @server.command(STATUS)
    def status(*_arguments: Any) -> dict[str, Any]:
        return {"connected": server.channel.connected, "model": server.model}


def _tasks(server: KeystrokeServer) -> None:
    tasks = server.tasks

    @server.command(TASK)
    async def begin(*arguments: Any) -> Any:
        """Arguments: what to do, and options of a task (docs/tasks.md)."""
        words, options = (*arguments, None, None)[:2]
        if not isinstance(words, str) or not words.strip():
            raise RequestFailed(UsageError(f"{TASK} wants what to do, in words."))
        return await _said(tasks.start(words, _fields(options)))

    @server.command(TASK_ACT)
    async def act(*arguments: Any) -> Any:
        """Arguments: a task's id, what to do with it, and the fields of that request."""
        task, what, fields = (*arguments, None, None, None)[:3]
        return await _said(tasks.act(str(task), str(what), _fields(fields)))

    @server.command(TASKS)
    async def listed(*_arguments: Any) -> Any:
        return await _said(tasks.list_tasks())

    @server.command(TASK_DIFF)
    async def diff(*arguments: Any) -> Any:
        return await _said(tasks.diff(str(arguments[0] if arguments else "")))


async def _said(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except KeystrokeError as error:
        raise RequestFailed(error) from None


def _fields(value: Any) -> dict[str, Any]:
    """An object of JSON, however the protocol library has read it."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    return dict(getattr(value, "_asdict", lambda: vars(value))())


async def _edit_of(server: KeystrokeServer, command: str, arguments: list[Any]) -> types.WorkspaceEdit:
    """The edit that a command with its arguments means. Raises KeystrokeError."""
    actions = server.actions
    try:
        if command == EDIT:
            uri, place, instruction = arguments
            return await actions.edit(uri, _range(place), str(instruction))
        if command == REFACTOR:
            uri, place, kind, name = (*arguments, "")[:4]
            return await actions.refactor(
                uri, _range(place) or _NOWHERE, cast(live.Refactoring, kind), str(name)
            )
        uri, line, rule, reason = arguments
        return actions.suppress(uri, int(line), str(rule), str(reason))
    except (ValueError, TypeError, AttributeError):
        raise UsageError(f"{command} was called with arguments it does not take.") from None


_NOWHERE = types.Range(types.Position(0, 0), types.Position(0, 0))


def _range(place: Any) -> types.Range | None:
    if place is None or isinstance(place, types.Range):
        return place

    def position(name: str) -> types.Position:
        where = field_of(place, name)
        return types.Position(int(field_of(where, "line")), int(field_of(where, "character")))

    return types.Range(position("start"), position("end"))


async def _failing(work: Awaitable[types.WorkspaceEdit]) -> types.WorkspaceEdit:
    try:
        return await work
    except KeystrokeError as error:
        raise RequestFailed(error) from None
