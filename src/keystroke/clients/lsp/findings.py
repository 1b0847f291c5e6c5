"""Audit findings and problems of the open documents, as diagnostics and quick fixes.

Keeps the latest ones of each document with their revision and maps them onto the current text; those whose
span was edited are hidden until the next check. Makes no requests itself.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lsprotocol import types

from keystroke.clients.lsp.documents import OpenDocument
from keystroke.protocol import live_messages as live
from keystroke.text import Edit

SOURCE = "keystroke"
_SEVERITY = {
    "critical": types.DiagnosticSeverity.Error,
    "high": types.DiagnosticSeverity.Error,
    "medium": types.DiagnosticSeverity.Warning,
    "low": types.DiagnosticSeverity.Information,
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "information": types.DiagnosticSeverity.Information,
    "hint": types.DiagnosticSeverity.Hint,
}
# A suppression needs a reason. These are offered; a client that can prompt accepts any other.
REASONS = ("checked, the input is trusted", "false alarm", "test code")
_HASH_COMMENTS = {"python", "ruby", "shellscript", "yaml", "toml", "dockerfile", "makefile"}


@dataclass(frozen=True, slots=True)
class PlacedFinding:
    """A finding or problem at its current position."""

    code: str
    diagnostic: types.Diagnostic
    start: int
    end: int
    fixes: tuple[tuple[str, tuple[Edit, ...]], ...]
    audited: bool
    ready: int = 0  # the first so many fixes are safe to apply; the others are suggestions


@dataclass(slots=True)
class _DocumentFindings:
    audit: tuple[int, Sequence[live.LiveFinding]] = (-1, ())
    problems: tuple[int, Sequence[live.Problem]] = (-1, ())
    reported: list[types.Diagnostic] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)  # an audit has come


class Findings:
    def __init__(self) -> None:
        self._documents: dict[str, _DocumentFindings] = {}

    def set_audit(self, event: live.Diagnostics) -> None:
        state = self._documents.setdefault(event.buffer, _DocumentFindings())
        if event.version >= state.audit[0]:
            state.audit = (event.version, event.findings)
        state.news.set()

    def set_problems(self, event: live.Problems) -> None:
        state = self._documents.setdefault(event.buffer, _DocumentFindings())
        if event.version >= state.problems[0]:
            state.problems = (event.version, event.problems)

    def forget(self, uri: str) -> None:
        self._documents.pop(uri, None)

    async def wait_until_fresh(self, document: OpenDocument, timeout_s: float) -> None:
        """Wait for the audit of the current revision, at most `timeout_s` seconds."""
        state = self._documents.setdefault(document.uri, _DocumentFindings())
        try:
            async with asyncio.timeout(timeout_s):
                while state.audit[0] < document.revision:
                    state.news.clear()
                    await state.news.wait()
        except TimeoutError:
            return

    def current_findings(self, document: OpenDocument) -> Iterator[PlacedFinding]:
        """All findings and problems of a document at their current positions."""
        state = self._documents.get(document.uri)
        if state is None:
            return
        revision, findings = state.audit
        for found in findings:
            origin = f" (data from {found.origin})" if found.origin else ""
            message = f"{found.message.rstrip('.')}{origin}. CWE-{found.cwe}"
            finding = self._place(document, revision, found, found.rule, message)
            if finding is not None:
                yield finding
        revision, problems = state.problems
        for problem in problems:
            finding = self._place(document, revision, problem, problem.code, problem.message)
            if finding is not None:
                yield finding

    def diagnostics(self, document: OpenDocument) -> list[types.Diagnostic]:
        return [known.diagnostic for known in self.current_findings(document)]

    def changed_diagnostics(self, document: OpenDocument) -> list[types.Diagnostic] | None:
        """The diagnostics if they differ from those returned last, else None."""
        state = self._documents.setdefault(document.uri, _DocumentFindings())
        now = self.diagnostics(document)
        if state.reported == now:
            return None
        state.reported = now
        return now

    @staticmethod
    def _place(
        document: OpenDocument, revision: int, found: live.LiveFinding | live.Problem, code: str, message: str
    ) -> PlacedFinding | None:
        span = document.carry_span(found.start, found.end, revision)
        if span is None or span[1] > len(document.text):
            return None

        def rebase(fixes: Sequence[live.LiveFix], prefix: str = "") -> list[tuple[str, tuple[Edit, ...]]]:
            proposed = [
                (f"{prefix}{_title(fix)}", [Edit(d.start, d.end, d.text) for d in fix.edits]) for fix in fixes
            ]
            moved = [(title, document.rebase_edits(edits, revision)) for title, edits in proposed]
            return [(title, edits) for title, edits in moved if edits]

        fixes = rebase(found.fixes)
        ready = len(fixes)
        if isinstance(found, live.LiveFinding):
            fixes += rebase(found.suggestions, "Suggestion: ")
        diagnostic = types.Diagnostic(
            range=document.range(*span),
            message=message,
            severity=_SEVERITY[found.severity],
            code=code,
            source=SOURCE,
        )
        return PlacedFinding(
            code, diagnostic, *span, tuple(fixes), isinstance(found, live.LiveFinding), ready
        )


def _title(fix: live.LiveFix) -> str:
    """The title of a quick fix, with what it may change if it is a suggestion."""
    return f"{fix.title} (may change: {fix.changes})" if fix.changes else fix.title


def suppression_edit(document: OpenDocument, offset: int, rule: str, reason: str) -> Edit | None:
    """An edit that inserts a suppression comment above the line of `offset`; None where none is possible."""
    reason = " ".join(reason.split())
    line = document.document.position(offset, "utf-32").line
    if not reason or (line and document.document.line(line - 1).rstrip().endswith("\\")):
        return None
    start, end = document.document.line_span(line)
    indent = re.match(r"[ \t]*", document.text[start:end])
    mark = "#" if document.language in _HASH_COMMENTS else "//"
    ending = "\r\n" if "\r\n" in document.text else "\n"
    return Edit(
        start, start, f"{indent[0] if indent else ''}{mark} keystroke: ignore[{rule}] {reason}{ending}"
    )
