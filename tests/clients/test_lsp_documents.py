"""Open documents and findings of the language server, without a process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types

from keystroke.clients.lsp.documents import HISTORY, Documents, OpenDocument
from keystroke.clients.lsp.findings import Findings, suppression_edit
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

TEXTS = st.text("ab\n😀é", max_size=12)


def opened(text: str, language: str = "python", uri: str = "file:///work/a.py") -> OpenDocument:
    return Documents(1 << 20).open(types.TextDocumentItem(uri, language, 1, text))


def typed(document: OpenDocument, start: int, end: int, text: str) -> None:
    place = document.range(start, end)
    change = types.TextDocumentContentChangePartial(range=place, text=text)
    document.apply_changes(document.version + 1, [change])


@given(TEXTS, st.data())
def test_a_span_carried_over_edits_still_holds_its_text(text: str, data: st.DataObject) -> None:
    document = opened(text)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    for _ in range(data.draw(st.integers(0, 4))):
        size = len(document.text)
        first = data.draw(st.integers(0, size))
        last = data.draw(st.integers(first, size))
        typed(document, first, last, data.draw(TEXTS))
    carried = document.carry_span(start, end, 0)
    if carried is not None:
        assert document.text[slice(*carried)] == text[start:end]


def test_what_happened_too_long_ago_is_not_guessed_at() -> None:
    document = opened("x = 1\n")
    for _ in range(HISTORY + 1):
        typed(document, 0, 0, "#")
    assert document.carry_span(0, 1, 0) is None
    assert document.rebase_edits([Edit(0, 1, "y")], 0) is None
    assert document.carry_span(0, 1, document.revision - 1) == (1, 2)


def test_half_characters_are_replaced_and_positions_stay_right() -> None:
    document = opened("a\ud83db\U0001f600c")
    assert document.text == "a\ufffdb\U0001f600c"
    assert document.offset(types.Position(0, 5)) == 4


def test_a_document_belongs_to_the_innermost_root() -> None:
    documents = Documents(1 << 20)
    documents.roots = ["/work", "/work/inner", "/works"]
    assert documents.root_of("/work/inner/a.py") == "/work/inner"
    assert documents.root_of("/work/a.py") == "/work"
    assert documents.root_of("/elsewhere/a.py") is None
    assert documents.root_of(None) == "/work"


def test_findings_typed_into_are_left_out_and_fixes_move_along() -> None:
    document = opened("import os\nrun(x)\nrun(y)\n")
    findings = Findings()
    fix = live.LiveFix(title="mend", edits=[live.BufferEdit(21, 22, "safe")])
    found = [
        live.LiveFinding(rule="first", cwe=1, severity="high", message="m", start=10, end=16),
        live.LiveFinding(rule="second", cwe=1, severity="low", message="m", start=17, end=23, fixes=[fix]),
    ]
    findings.set_audit(live.Diagnostics(buffer=document.uri, version=0, findings=found))
    assert [k.code for k in findings.current_findings(document)] == ["first", "second"]
    typed(document, 14, 14, "0")
    typed(document, 0, 0, "# top\n")
    (left,) = findings.current_findings(document)
    assert left.code == "second"
    assert document.text[left.start : left.end] == "run(y)"
    assert left.fixes == (("mend", (Edit(28, 29, "safe"),)),)


def test_diagnostics_that_did_not_change_are_not_told_twice() -> None:
    document, findings = opened("run(x)\n"), Findings()
    found = [live.LiveFinding(rule="r", cwe=1, severity="high", message="m", start=0, end=6)]
    findings.set_audit(live.Diagnostics(buffer=document.uri, version=0, findings=found))
    assert findings.changed_diagnostics(document) is not None
    assert findings.changed_diagnostics(document) is None
    typed(document, 0, 6, "")
    assert findings.changed_diagnostics(document) == []


def test_a_suppression_stands_above_its_line_with_its_indentation_and_line_end() -> None:
    document = opened("if x:\r\n\trun(x)\r\n", "c")
    assert suppression_edit(document, 8, "some-rule", " it is\nfine ") == Edit(
        7, 7, "\t// keystroke: ignore[some-rule] it is fine\r\n"
    )
    assert suppression_edit(document, 8, "some-rule", "  ") is None
    assert suppression_edit(opened("x = 1 + \\\n  run(x)\n"), 14, "some-rule", "why") is None
