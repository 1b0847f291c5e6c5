"""What is known to be wrong with the open documents, as diagnostics and quick fixes.

Keeps the last findings and problems of each document with the revision they were made for, and shows
them carried onto the text of now; what was typed into is left out until it is looked at again. It asks
nobody: whoever hears of findings puts them here.
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
# A suppression must say why. These are the reasons people have; a client that can ask takes any other.
REASONS = ("checked, the input is trusted", "false alarm", "test code")
_HASH_COMMENTS = {"python", "ruby", "shellscript", "yaml", "toml", "dockerfile", "makefile"}


@dataclass(frozen=True, slots=True)
class PlacedFinding:
    """One finding or problem, where it lies now."""

    code: str
    diagnostic: types.Diagnostic
    start: int
    end: int
    fixes: tuple[tuple[str, tuple[Edit, ...]], ...]
    audited: bool
    ready: int = 0  # how many of the fixes, from the first, are more than suggestions


@dataclass(slots=True)
class _About:
    audit: tuple[int, Sequence[live.LiveFinding]] = (-1, ())
    problems: tuple[int, Sequence[live.Problem]] = (-1, ())
    told: list[types.Diagnostic] | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)


class Findings:
    def __init__(self) -> None:
        self._about: dict[str, _About] = {}

    def set_audit(self, event: live.Diagnostics) -> None:
        about = self._about.setdefault(event.buffer, _About())
        if event.version >= about.audit[0]:
            about.audit = (event.version, event.findings)
        for waiter in about.waiting:
            if not waiter.done():
                waiter.set_result(None)
        about.waiting.clear()

    def set_problems(self, event: live.Problems) -> None:
        about = self._about.setdefault(event.buffer, _About())
        if event.version >= about.problems[0]:
            about.problems = (event.version, event.problems)

    def forget(self, uri: str) -> None:
        self._about.pop(uri, None)

    async def wait_until_fresh(self, document: OpenDocument, patience: float) -> None:
        """Wait until the audit of the present revision is known, but not for long."""
        about = self._about.setdefault(document.uri, _About())
        try:
            async with asyncio.timeout(patience):
                while about.audit[0] < document.revision:
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    about.waiting.append(waiter)
                    await waiter
        except TimeoutError:
            return

    def placed(self, document: OpenDocument) -> Iterator[PlacedFinding]:
        """Everything known about a document, carried onto its text of now."""
        about = self._about.get(document.uri)
        if about is None:
            return
        revision, findings = about.audit
        for found in findings:
            origin = f" (data from {found.origin})" if found.origin else ""
            message = f"{found.message.rstrip('.')}{origin}. CWE-{found.cwe}"
            placed = self._placed(document, revision, found, found.rule, message)
            if placed is not None:
                yield placed
        revision, problems = about.problems
        for problem in problems:
            placed = self._placed(document, revision, problem, problem.code, problem.message)
            if placed is not None:
                yield placed

    def diagnostics(self, document: OpenDocument) -> list[types.Diagnostic]:
        return [known.diagnostic for known in self.placed(document)]

    def changed_diagnostics(self, document: OpenDocument) -> list[types.Diagnostic] | None:
        """The diagnostics, where they are not those told last; they count as told from now on."""
        about = self._about.setdefault(document.uri, _About())
        now = self.diagnostics(document)
        if about.told == now:
            return None
        about.told = now
        return now

    @staticmethod
    def _placed(
        document: OpenDocument, revision: int, found: live.LiveFinding | live.Problem, code: str, message: str
    ) -> PlacedFinding | None:
        span = document.carry_span(found.start, found.end, revision)
        if span is None or span[1] > len(document.text):
            return None
        fixes: list[tuple[str, tuple[Edit, ...]]] = []
        for fix in found.fixes:
            edits = document.rebase_edits([Edit(d.start, d.end, d.text) for d in fix.edits], revision)
            if edits:
                fixes.append((fix.title, edits))
        ready = len(fixes)
        for fix in found.suggestions if isinstance(found, live.LiveFinding) else ():
            edits = document.rebase_edits([Edit(d.start, d.end, d.text) for d in fix.edits], revision)
            if edits:
                fixes.append((f"Suggestion: {fix.title}", edits))
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


def suppression_edit(document: OpenDocument, offset: int, rule: str, reason: str) -> Edit | None:
    """The comment that suppresses a rule for the line of `offset`; None where no comment can stand."""
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
