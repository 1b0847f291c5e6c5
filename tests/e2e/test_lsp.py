"""`keystroke lsp` over real stdio, with a real gateway whose model is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lsp_support import Editor, RunningServer, editing, eventually, scripted_model, serving
from lsprotocol import types
from pygls.exceptions import JsonRpcException

from keystroke.text import Document

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLEAN = "value = 1\n"
RISKY = "import os\n\n\ndef run(request):\n    os.system(f\"ls '{request.args['dir']}'\")\n"


def script(prompt: str) -> str:
    """What the model says: an edit where one is asked for, else what follows the last words."""
    if "[user]" in prompt:
        return "```\nvalue = 2\n```\n"
    for ending, said in {
        "endless = ": "1 + " * 20_000,
        "total = ": "left + right",
        "😀'; x = ": "after_smile",
        "é = ": "accent",
    }.items():
        if prompt.endswith(ending):
            return said
    return "nothing_special"


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningServer]:
    with serving(scripted_model(script, step_cost=0.0005)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def editor(gateway: RunningServer, tmp_path_factory: Any) -> AsyncIterator[Editor]:
    async with editing(tmp_path_factory.mktemp("work"), "--gateway", gateway.url) as session:
        ready = session.open("ready.py", "total = ")
        await session.until_ghost(ready)
        yield session


@pytest.fixture(scope="module")
def slow_gateway() -> Iterator[RunningServer]:
    """A model that takes many seconds for a line."""
    with serving(scripted_model(script, step_cost=0.4)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def waiting(slow_gateway: RunningServer, tmp_path_factory: Any) -> AsyncIterator[Editor]:
    async with editing(tmp_path_factory.mktemp("slow"), "--gateway", slow_gateway.url) as session:
        await eventually(session.connected)
        yield session


# Ghost text


async def test_ghost_text_arrives_at_the_cursor(editor: Editor) -> None:
    uri = editor.open("ghost.py", "left, right = 1, 2\ntotal =")
    editor.type(uri, " ")
    item = await editor.item(uri, invoked=False)
    assert item is not None
    assert item.insert_text == "left + right"
    end = editor.place(uri, len(editor.text(uri)))
    assert item.range == types.Range(end, end)


async def test_a_receipt_says_where_the_time_went_or_why_nothing_is_shown(editor: Editor) -> None:
    uri = editor.open("receipt.py", "left, right = 1, 2\ntotal = ")
    assert await editor.request("keystroke/receipt", {"uri": uri}) == {}
    await editor.ghost(uri)
    paid = await editor.request("keystroke/receipt", {"uri": uri})
    assert (paid["shown"], paid["reason"]) == (True, "")
    assert paid["total_ms"] > 0
    await editor.ghost(uri, len("lef"), invoked=False)
    paid = await editor.request("keystroke/receipt", {"uri": uri})
    assert (paid["shown"], paid["reason"]) == (False, "mid_word")
    assert await editor.request("keystroke/receipt", {"nonsense": 1}) == {}


async def test_typing_what_is_suggested_shows_the_rest_without_computing(
    editor: Editor, gateway: RunningServer
) -> None:
    uri = editor.open("through.py", "left, right = 1, 2\ntotal = ")
    assert await editor.ghost(uri) == "left + right"
    await eventually(gateway.settled)
    shown = []
    for key in "left":
        editor.type(uri, key)
        shown.append(await editor.ghost(uri))
    assert shown == ["eft + right", "ft + right", "t + right", " + right"]


async def test_ghost_text_goes_on_from_what_the_editors_list_has_selected(editor: Editor) -> None:
    uri = editor.open("list.py", "left, right = 1, 2\nto")
    place = editor.range(uri, len("left, right = 1, 2\n"), len(editor.text(uri)))
    got = await editor.client.text_document_inline_completion_async(
        types.InlineCompletionParams(
            context=types.InlineCompletionContext(
                types.InlineCompletionTriggerKind.Automatic, types.SelectedCompletionInfo(place, "total = ")
            ),
            text_document=types.TextDocumentIdentifier(uri),
            position=place.end,
        )
    )
    assert isinstance(got, types.InlineCompletionList)
    assert [(item.insert_text, item.range) for item in got.items] == [("total = left + right", place)]


async def test_a_cancelled_request_stops_the_engine(waiting: Editor, slow_gateway: RunningServer) -> None:
    uri = waiting.open("cancel.py", "endless = ")
    steps = slow_gateway.engines["echo"].steps
    asked = waiting.ask(uri, name="to-cancel")
    await eventually(lambda: slow_gateway.engines["echo"].steps > steps)
    waiting.client.cancel_request(types.CancelParams("to-cancel"))
    with pytest.raises(JsonRpcException):
        await asked
    waiting.close(uri)
    await eventually(slow_gateway.settled)


async def test_an_answer_about_an_older_text_is_not_shown(waiting: Editor) -> None:
    uri = waiting.open("older.py", "endless = ")
    asked = waiting.ask(uri)
    waiting.type(uri, "0\n")
    assert await asked is None
    waiting.close(uri)


async def test_a_change_whose_version_does_not_rise_is_made_all_the_same(editor: Editor) -> None:
    uri = editor.open("versions.py", "tot", version=7)
    editor.type(uri, "al = ", version=3)
    assert await editor.ghost(uri) == "left + right"


async def test_positions_past_the_end_mean_the_end(editor: Editor) -> None:
    uri = editor.open("past.py", "total = ")
    kind = types.InlineCompletionTriggerKind.Invoked
    params = types.InlineCompletionParams(
        types.InlineCompletionContext(kind), types.TextDocumentIdentifier(uri), types.Position(999, 999)
    )
    got = await editor.client.text_document_inline_completion_async(params)
    assert isinstance(got, types.InlineCompletionList)
    assert got.items[0].insert_text == "left + right"


async def test_a_closed_document_has_no_ghost_text_and_a_reopened_one_has(editor: Editor) -> None:
    uri = editor.open("again.py", "total = ")
    assert await editor.ghost(uri) == "left + right"
    editor.close(uri)
    assert await editor.ghost(uri) is None
    editor.open("again.py", "other = 1\ntotal = ")
    assert await editor.ghost(uri) == "left + right"


async def test_an_untitled_document_is_served(editor: Editor) -> None:
    uri = editor.open("untitled:Untitled-1", "total = ")
    assert await editor.ghost(uri) == "left + right"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("huge.py", "x = 1\n" * 400_000 + "total = "),
        ("binary.py", "\0\1\2\ntotal = "),
        ("vscode-notebook-cell:/work/book.ipynb#c1", "total = "),
    ],
    ids=["huge", "binary", "notebook"],
)
async def test_what_is_no_source_text_is_left_alone_and_logged_once(
    editor: Editor, name: str, text: str
) -> None:
    uri = editor.open(name, text)
    assert await editor.ghost(uri, 0) is None
    editor.type(uri, "more")
    assert await editor.ghost(uri, 0) is None
    assert len([m for m in editor.client.log_messages if uri in m.message]) == 1
    editor.close(uri)


async def test_feedback_of_an_editor_is_taken(editor: Editor) -> None:
    uri = editor.open("feedback.py", "total = ")
    item = await editor.item(uri)
    assert item is not None
    assert item.command is not None
    notify = editor.client.protocol.notify
    plain = {"insertText": item.insert_text, "command": {"arguments": list(item.command.arguments or ())}}
    notify("textDocument/didShowCompletion", {"item": plain})
    notify("textDocument/didPartiallyAcceptCompletion", {"item": plain, "acceptedLength": 4})
    notify("textDocument/didFocus", {"textDocument": {"uri": uri}})
    notify("textDocument/didShowCompletion", {"item": None})  # nonsense costs nothing
    params = types.ExecuteCommandParams(item.command.command, item.command.arguments)
    await editor.client.workspace_execute_command_async(params)
    assert await editor.ghost(uri) == "left + right"


async def test_a_stale_inline_edit_request_gets_no_edits(editor: Editor) -> None:
    uri = editor.open("stale.py", "total = 1\n", version=5)
    params = {"textDocument": {"uri": uri, "version": 4}, "position": {"line": 0, "character": 0}}
    assert await editor.request("textDocument/copilotInlineEdit", params) == {"edits": []}


async def test_a_rename_typed_by_hand_is_offered_as_the_next_edit(editor: Editor) -> None:
    text = "count = 1\nprint(count)\nprint(count + 1)\n"
    uri = editor.open("next.py", text)
    for index, key in enumerate("er"):
        editor.type(uri, key, len("count") + index)
    answers: list[Any] = []

    async def offered() -> bool:
        params = {
            "textDocument": {"uri": uri, "version": editor.versions[uri]},
            "position": {"line": 0, "character": 7},
        }
        answers.append(await editor.request("textDocument/copilotInlineEdit", params))
        return bool(answers[-1]["edits"])

    await eventually(offered)
    edits = answers[-1]["edits"]
    lines = [edit["range"]["start"]["line"] for edit in edits]
    assert lines[0] == 1
    assert all("counter" in edit["text"] or edit["text"] == "er" for edit in edits)


# Findings


async def test_a_finding_on_unsaved_text_goes_when_its_quick_fix_is_taken(editor: Editor) -> None:
    uri = editor.open("risky.py", CLEAN)
    editor.replace(uri, 0, len(CLEAN), RISKY)
    await editor.until_codes(uri, lambda codes: "python-command-injection" in codes)
    actions = await editor.actions(uri, RISKY.index("os.system"), only=["quickfix"])
    fix = next(a for a in actions if a.is_preferred)
    editor.make(fix.edit)
    assert "shlex.quote" in editor.text(uri)
    await editor.until_codes(uri, lambda codes: not codes)


async def test_a_suppression_carries_its_reason_and_silences_the_finding(editor: Editor) -> None:
    uri = editor.open("quiet.py", RISKY)
    await editor.until_codes(uri, lambda codes: "python-command-injection" in codes)
    actions = await editor.actions(uri, RISKY.index("os.system"))
    quiet = next(a for a in actions if a.title.startswith("Suppress"))
    editor.make(quiet.edit)
    assert "    # keystroke: ignore[python-command-injection] checked, the input" in editor.text(uri)
    await editor.until_codes(uri, lambda codes: not codes)


async def test_an_undefined_name_is_a_diagnostic_with_a_fix(editor: Editor) -> None:
    uri = editor.open("names.py", "total = 1\nprint(totl)\n")
    await editor.until_codes(uri, lambda codes: "undefined-name" in codes)
    actions = await editor.actions(uri, editor.text(uri).index("totl"), only=["quickfix"])
    fixed = [a for a in actions if a.edit is not None]
    assert fixed
    editor.make(fixed[0].edit)
    await editor.until_codes(uri, lambda codes: not codes)


async def test_findings_move_with_the_text_and_go_with_the_document(editor: Editor) -> None:
    uri = editor.open("moving.py", RISKY)
    await editor.until_codes(uri, lambda codes: "python-command-injection" in codes)
    editor.type(uri, "# one more line\n", 0)
    await eventually(lambda: [d.range.start.line for d in editor.client.diagnostics[uri]] == [5])
    editor.close(uri)
    await editor.until_codes(uri, lambda codes: not codes)


# Actions


async def test_an_edit_by_instruction_changes_only_what_it_must(editor: Editor) -> None:
    uri = editor.open("edited.py", "first = 1\nvalue = 1\nlast = 1\n")
    place = editor.range(uri, len("first = 1\n"), len("first = 1\nvalue = 1"))
    arguments = [uri, place, "make the value two"]
    done = await editor.client.workspace_execute_command_async(
        types.ExecuteCommandParams("keystroke.edit", arguments)
    )
    assert done is True
    editor.make(editor.applied[-1].edit)
    assert editor.text(uri) == "first = 1\nvalue = 2\nlast = 1\n"


async def test_a_todo_comment_becomes_an_action(editor: Editor) -> None:
    uri = editor.open("todo.py", "# TODO: make the value two\nvalue = 1\n")
    titles = [a.title for a in await editor.actions(uri, 0, only=["refactor.rewrite"])]
    lazy = await editor.client.text_document_code_action_async(
        types.CodeActionParams(
            types.TextDocumentIdentifier(uri), editor.range(uri, 0, 0), types.CodeActionContext([])
        )
    )
    assert titles or any("make the value two" in action.title for action in lazy or ())


async def test_a_rename_reaches_open_buffers_and_files_that_are_not_open(editor: Editor) -> None:
    project = editor.root / "project"
    project.mkdir()
    (project / "shapes.py").write_text("def area(side):\n    return side\n")
    (project / "other.py").write_text("import shapes\n\nprint('😀', shapes.area(2))\n")
    text = "def area(side):\n    return side * side\n"  # not saved
    uri = editor.open("project/shapes.py", text)
    at = editor.place(uri, text.index("area") + 2)
    place = types.PrepareRenameParams(types.TextDocumentIdentifier(uri), at)
    prepared: Any = await editor.client.text_document_prepare_rename_async(place)
    assert prepared.placeholder == "area"
    edit = await editor.client.text_document_rename_async(
        types.RenameParams(types.TextDocumentIdentifier(uri), at, "surface")
    )
    assert edit is not None
    other = (project / "other.py").as_uri()
    editor.texts[other], editor.versions[other] = Document((project / "other.py").read_text()), 1
    editor.make(edit)
    assert editor.text(uri) == "def surface(side):\n    return side * side\n"
    assert editor.text(other) == "import shapes\n\nprint('😀', shapes.surface(2))\n"
    assert "area" in (project / "other.py").read_text()  # the server itself writes nothing
    await eventually(lambda: ["begin", "end"] in shown(editor))


def shown(editor: Editor) -> list[list[str]]:
    """What was told of each piece of work, in order."""
    reports: Any = editor.client.progress_reports
    return [[report.kind for report in told] for told in reports.values()]


async def test_an_editor_that_answers_nothing_while_it_waits_gets_its_rename(tmp_path: Path) -> None:
    """Helix blocks on the answer, so that it cannot make the token that work is shown with."""
    answer = asyncio.Event()

    with serving(scripted_model(lambda prompt: "pass")) as server:
        async with editing(tmp_path, "--gateway", server.url) as editor:
            editor.client.protocol.fm.features.pop(types.WINDOW_WORK_DONE_PROGRESS_CREATE)

            async def later(params: types.WorkDoneProgressCreateParams) -> None:
                await answer.wait()
                editor.client.progress_reports[params.token] = []

            editor.client.feature(types.WINDOW_WORK_DONE_PROGRESS_CREATE)(later)
            text = "def area(side):\n    return side\n\n\nprint(area(2))\n"
            uri = editor.open("shapes.py", text)
            await eventually(editor.connected)
            place = editor.place(uri, text.index("area"))
            params = types.RenameParams(types.TextDocumentIdentifier(uri), place, "surface")
            editor.make(await editor.client.text_document_rename_async(params))
            assert editor.text(uri) == text.replace("area", "surface")
            assert shown(editor) == []
            answer.set()
            await eventually(lambda: shown(editor) == [["begin", "end"]])  # what was made is not left open


async def test_files_change_only_inside_the_folders_that_are_open(editor: Editor, tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text("def area(side):\n    return side\n")
    (tmp_path / "other.py").write_text("import shapes\n\nprint(shapes.area(2))\n")
    uri = editor.open((tmp_path / "shapes.py").as_uri(), "def area(side):\n    return side\n")
    params = types.RenameParams(types.TextDocumentIdentifier(uri), editor.place(uri, 5), "surface")
    with pytest.raises(JsonRpcException, match="outside the workspace"):
        await editor.client.text_document_rename_async(params)
    added = types.WorkspaceFoldersChangeEvent([types.WorkspaceFolder(tmp_path.as_uri(), "second")], [])
    editor.client.workspace_did_change_workspace_folders(types.DidChangeWorkspaceFoldersParams(added))
    edit = await editor.client.text_document_rename_async(params)
    assert edit is not None
    assert len(edit.document_changes or edit.changes or ()) == 2


async def test_what_cannot_be_renamed_says_why(editor: Editor) -> None:
    uri = editor.open("cannot.py", "import os\n\nprint(os.sep)\n")
    at, identity = editor.place(uri, 0), types.TextDocumentIdentifier(uri)
    assert (
        await editor.client.text_document_prepare_rename_async(types.PrepareRenameParams(identity, at))
        is None
    )
    for name, place in (("lambda", editor.place(uri, 8)), ("fine", at)):
        with pytest.raises(JsonRpcException, match="name"):
            await editor.client.text_document_rename_async(types.RenameParams(identity, place, name))


async def test_an_extraction_works_on_a_document_without_a_file(editor: Editor) -> None:
    text = "def f(a, b):\n    return (a + b) * 2\n"
    uri = editor.open("untitled:Untitled-2", text)
    start = text.index("a + b")
    arguments = [uri, editor.range(uri, start, start + len("a + b")), "extract_variable", "added"]
    run = types.ExecuteCommandParams("keystroke.refactor", arguments)
    assert await editor.client.workspace_execute_command_async(run) is True
    editor.make(editor.applied[-1].edit)
    assert editor.text(uri) == "def f(a, b):\n    added = a + b\n    return added * 2\n"


async def test_actions_are_made_when_they_are_chosen(gateway: RunningServer, tmp_path: Path) -> None:
    async with editing(tmp_path, "--gateway", gateway.url, editor="visual_studio_code") as editor:
        text = "import sys\nimport os\n\nprint(os.sep)\n"
        uri = editor.open("untitled:Untitled-3", text)
        await editor.until_codes(uri, bool)
        (action,) = await editor.actions(uri, 0, only=["source.organizeImports"])
        assert action.edit is None
        editor.make((await editor.client.code_action_resolve_async(action)).edit)
        assert "sys" not in editor.text(uri)


async def test_commands_with_nonsense_say_so_and_change_nothing(editor: Editor) -> None:
    before = len(editor.applied)
    for command in ("keystroke.edit", "keystroke.refactor", "keystroke.suppress"):
        params = types.ExecuteCommandParams(command, [{"what": 1}])
        assert await editor.client.workspace_execute_command_async(params) is False
    assert len(editor.applied) == before
    assert editor.client.messages[-1].message.startswith("Keystroke: keystroke.suppress was called")


# The wire


async def test_bytes_that_are_no_message_are_skipped(editor: Editor) -> None:
    await editor.send(b"{not json")
    await editor.send(b"[]")
    await editor.send(b'{"jsonrpc": "2.0", "method": "textDocument/didOpen", "params": 3}')
    uri = editor.open("after.py", "total = ")
    assert await editor.ghost(uri) == "left + right"


async def test_a_request_that_does_not_fit_is_answered(editor: Editor) -> None:
    answer: Future[Any] = Future()
    editor.client.protocol._request_futures["misfit"] = answer
    await editor.send(b'{"jsonrpc": "2.0", "id": "misfit", "method": "textDocument/rename", "params": {}}')
    with pytest.raises(JsonRpcException, match="do not fit"):
        await asyncio.wrap_future(answer)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
async def test_positions_are_counted_in_the_units_agreed_on(
    gateway: RunningServer, tmp_path: Path, encoding: str
) -> None:
    async with editing(tmp_path, "--gateway", gateway.url, encodings=[encoding]) as editor:
        assert editor.encoding == encoding
        uri = editor.open("smile.py", "s = '😀'; y = 1")
        editor.replace(uri, len("s = '😀'; "), len("s = '😀'; y = 1"), "x = ")
        assert await editor.until_ghost(uri) == "after_smile"
        item = await editor.item(uri)
        assert item is not None
        end = editor.place(uri, len(editor.text(uri)))
        assert item.range == types.Range(end, end)
        editor.type(uri, "0; é = ")
        assert await editor.ghost(uri) == "accent"


async def test_an_editor_that_pulls_gets_its_diagnostics_on_request(
    gateway: RunningServer, tmp_path: Path
) -> None:
    async with editing(tmp_path, "--gateway", gateway.url, pulls=True) as editor:
        assert editor.result.capabilities.diagnostic_provider is not None
        uri = editor.open("pulled.py", RISKY)
        codes: list[Any] = []

        async def reported() -> bool:
            params = types.DocumentDiagnosticParams(types.TextDocumentIdentifier(uri))
            report = await editor.client.text_document_diagnostic_async(params)
            codes[:] = [d.code for d in getattr(report, "items", ())]
            return "python-command-injection" in codes

        await eventually(reported)
        assert uri not in editor.client.diagnostics  # told once, not twice
