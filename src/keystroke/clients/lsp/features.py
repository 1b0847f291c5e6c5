"""Registers the handlers of the language server's requests, notifications and commands.

Each handler reads its parameters and calls one method. A KeystrokeError becomes a response error with the
same message, or a message shown to the user where no response is expected.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar, cast

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

AUDIT_TIMEOUT = 1.0  # seconds that a pulled report waits for the audit of the current text
_REQUEST_FAILED = -32803
_INVALID_PARAMS = -32602
_T = TypeVar("_T")


class RequestFailed(JsonRpcException):
    """A KeystrokeError as a JSON-RPC error response."""

    def __init__(self, error: KeystrokeError) -> None:
        code = _INVALID_PARAMS if isinstance(error, UsageError) else _REQUEST_FAILED
        super().__init__(message=error.message, code=code)


def register(server: KeystrokeServer) -> None:
    _register_lifecycle(server)
    _register_suggestions(server)
    _register_diagnostics(server)
    _register_actions(server)
    _register_commands(server)
    _register_tasks(server)


def _register_lifecycle(server: KeystrokeServer) -> None:
    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        server.read_capabilities(params)
        if server.pulls_diagnostics:
            _register_pull_diagnostics(server)

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
        """Ignored: the gateway reads settings from files."""


def _register_suggestions(server: KeystrokeServer) -> None:
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
        """The timings of the last suggestion, or why none was shown."""
        return suggestions.receipt(str(field_of(params, "uri")))

    @server.feature("textDocument/didShowCompletion")
    def on_shown(params: Any) -> None:
        suggestions.feedback(field_of(field_of(params, "item"), "command"), "shown")

    @server.feature("textDocument/didShowInlineEdit")
    def on_edit_shown(params: Any) -> None:
        suggestions.feedback(field_of(field_of(params, "item"), "command"), "shown")

    @server.feature("textDocument/didPartiallyAcceptCompletion")
    def on_partly_accepted(params: Any) -> None:
        length = field_of(params, "acceptedLength")
        command = field_of(field_of(params, "item"), "command")
        suggestions.feedback(command, "partial", length if isinstance(length, int) else None)

    @server.feature("textDocument/didFocus")
    def on_focus(params: Any) -> None:
        uri = field_of(field_of(params, "textDocument"), "uri")
        if isinstance(uri, str):
            server.check_now(uri)  # other files may have changed since its last check


def _register_diagnostics(server: KeystrokeServer) -> None:
    @server.feature("keystroke/findings")
    def findings(params: Any) -> list[types.Diagnostic]:
        """The current diagnostics of a document, for clients that show them in their own way."""
        document = server.documents.get_usable(str(field_of(params, "uri")))
        return server.findings.diagnostics(document) if document is not None else []


def _register_pull_diagnostics(server: KeystrokeServer) -> None:
    options = types.DiagnosticOptions(inter_file_dependencies=True, workspace_diagnostics=False)

    @server.feature(types.TEXT_DOCUMENT_DIAGNOSTIC, options)
    async def pull_diagnostics(params: types.DocumentDiagnosticParams) -> types.DocumentDiagnosticReport:
        document = server.documents.get_usable(params.text_document.uri)
        if document is None:
            return types.RelatedFullDocumentDiagnosticReport([])
        if server.channel.connected:
            await server.findings.wait_until_fresh(document, AUDIT_TIMEOUT)
        server.findings.changed_diagnostics(document)  # mark them as reported
        return types.RelatedFullDocumentDiagnosticReport(server.findings.diagnostics(document))


def _register_actions(server: KeystrokeServer) -> None:
    actions = server.actions

    @server.feature(
        types.TEXT_DOCUMENT_CODE_ACTION,
        types.CodeActionOptions(code_action_kinds=list(ACTION_KINDS), resolve_provider=True),
    )
    def list_actions(params: types.CodeActionParams) -> list[types.CodeAction | types.Command]:
        if params.range.start == params.range.end:
            server.move_cursor(
                params.text_document.uri, params.range.end
            )  # editors ask wherever the cursor goes
        return actions.list_actions(params.text_document.uri, params.range, params.context.only)

    @server.feature(types.CODE_ACTION_RESOLVE)
    async def resolve_action(action: types.CodeAction) -> types.CodeAction:
        command = field_of(action.data, "command")
        arguments = field_of(action.data, "arguments")
        if isinstance(command, str) and isinstance(arguments, (list, tuple)):
            async with server.show_progress("Keystroke", action.title):
                action.edit = await _as_response(_edit_of(server, command, list(arguments)))
        return action

    @server.feature(types.TEXT_DOCUMENT_PREPARE_RENAME)
    def prepare_rename(params: types.PrepareRenameParams) -> types.PrepareRenamePlaceholder | None:
        return actions.prepare_rename(params.text_document.uri, params.position)

    @server.feature(types.TEXT_DOCUMENT_RENAME, types.RenameOptions(prepare_provider=True))
    async def rename(params: types.RenameParams) -> types.WorkspaceEdit:
        async with server.show_progress(
            "Keystroke", f"renaming to {params.new_name}", params.work_done_token
        ):
            return await _as_response(
                actions.rename(params.text_document.uri, params.position, params.new_name)
            )


def _register_commands(server: KeystrokeServer) -> None:
    def register_edit(command: str, label: str) -> None:
        @server.command(command)
        async def run(*arguments: Any) -> bool:
            """Compute an edit and have the editor apply it; errors are shown."""
            try:
                async with server.show_progress("Keystroke", label):
                    edit = await _edit_of(server, command, list(arguments))
                await server.apply_edit(label, edit)
            except KeystrokeError as error:
                server.show(error.message, types.MessageType.Warning)
                return False
            return True

    register_edit(EDIT, "edit")
    register_edit(REFACTOR, "refactoring")
    register_edit(SUPPRESS, "suppress finding")

    @server.command(ACCEPTED)
    def on_accepted(*arguments: Any) -> None:
        server.suggestions.feedback({"arguments": list(arguments)}, "accepted")

    @server.command(RECONNECT)
    def reconnect(*_arguments: Any) -> None:
        if not server.channel.connected:
            server.connect()

    @server.command(STATUS)
    def status(*_arguments: Any) -> dict[str, Any]:
        return {"connected": server.channel.connected, "model": server.model}


def _register_tasks(server: KeystrokeServer) -> None:
    tasks = server.tasks

    @server.command(TASK)
    async def begin(*arguments: Any) -> Any:
        """Arguments: the instruction, and options of a task (docs/tasks.md)."""
        instruction, options = (*arguments, None, None)[:2]
        if not isinstance(instruction, str) or not instruction.strip():
            raise RequestFailed(UsageError(f"{TASK} needs an instruction."))
        return await _as_response(tasks.start(instruction, _fields(options)))

    @server.command(TASK_ACT)
    async def act(*arguments: Any) -> Any:
        """Arguments: a task's id, an action, and the fields of that request."""
        task, what, fields = (*arguments, None, None, None)[:3]
        return await _as_response(tasks.act(str(task), str(what), _fields(fields)))

    @server.command(TASKS)
    async def list_tasks(*_arguments: Any) -> Any:
        return await _as_response(tasks.list_tasks())

    @server.command(TASK_DIFF)
    async def diff(*arguments: Any) -> Any:
        return await _as_response(tasks.diff(str(arguments[0] if arguments else "")))


async def _as_response(work: Awaitable[_T]) -> _T:
    """Await a result; a KeystrokeError becomes a response error."""
    try:
        return await work
    except KeystrokeError as error:
        raise RequestFailed(error) from None


def _fields(value: Any) -> dict[str, Any]:
    """A JSON object as a dict, whatever type the protocol library gave it."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return dict(value)
    return dict(getattr(value, "_asdict", lambda: vars(value))())


async def _edit_of(server: KeystrokeServer, command: str, arguments: list[Any]) -> types.WorkspaceEdit:
    """The edit of a command. Raises KeystrokeError."""
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
        raise UsageError(f"{command} was called with invalid arguments.") from None


_NOWHERE = types.Range(types.Position(0, 0), types.Position(0, 0))


def _range(place: Any) -> types.Range | None:
    if place is None or isinstance(place, types.Range):
        return place

    def position(name: str) -> types.Position:
        where = field_of(place, name)
        return types.Position(int(field_of(where, "line")), int(field_of(where, "character")))

    return types.Range(position("start"), position("end"))
