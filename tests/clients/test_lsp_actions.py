"""Quick fixes that an editor lists: those of the whole line, what is under the cursor first."""

from __future__ import annotations

from typing import cast

from lsprotocol import types

from keystroke.analysis.check import check
from keystroke.clients.lsp.actions import Actions
from keystroke.clients.lsp.channel import Channel
from keystroke.clients.lsp.documents import Documents
from keystroke.clients.lsp.findings import Findings
from keystroke.protocol import live_messages as live

URI = "file:///work/a.py"
TEXT = "def greet(name):\n    return nmae.upper() + nmae\n\n\nprint(greet('x'))\n"


def listed(text: str, line: int, column: int, *, to: int | None = None) -> list[str]:
    """The titles of the quick fixes at a position, with the problems that the checker finds."""
    documents, findings = Documents(1 << 20), Findings()
    document = documents.open(types.TextDocumentItem(URI, "python", 1, text))
    problems = [
        live.Problem(
            code=item.code,
            severity="error",
            message=item.message,
            start=item.start,
            end=item.end,
            fixes=[
                live.LiveFix(
                    title=fix.title,
                    edits=[live.BufferEdit(start=e.start, end=e.end, text=e.text) for e in fix.edits],
                )
                for fix in item.fixes
            ],
        )
        for item in check(text)
    ]
    event = live.Problems(id="1", buffer=URI, version=document.revision, problems=problems)
    findings.set_problems(event)
    actions = Actions(documents, cast(Channel, None), findings)  # listing sends nothing
    here = types.Position(line, column)
    range_ = types.Range(here, types.Position(line, column if to is None else to))
    return [action.title for action in actions.list_actions(URI, range_, ["quickfix"])]


def test_a_misspelt_name_gets_its_fix_wherever_the_cursor_is_on_the_line() -> None:
    for column in (0, 4, 12, 15, len("    return nmae.upper() + nmae")):
        assert "Change to `name`" in listed(TEXT, 1, column)
    assert listed(TEXT, 0, 3) == []
    assert listed(TEXT, 4, 0) == []


def test_what_is_under_the_cursor_comes_first() -> None:
    text = "def f(first, second):\n    return frist + secnd\n"
    assert listed(text, 1, 12)[0] == "Change to `first`"
    assert listed(text, 1, 21)[0] == "Change to `second`"
    assert set(listed(text, 1, 0)) >= {"Change to `first`", "Change to `second`"}
