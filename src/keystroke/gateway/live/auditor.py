"""Audits large texts in another process, so that parsing them does not block the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.analysis.audit import Finding
from keystroke.analysis.audit.worker import decode_findings
from keystroke.gateway.live.key_process import KeyProcess, call_limited
from keystroke.isolation import IsolatedFunction
from keystroke.text import Edit

LARGE = 50_000  # characters: parsed in about 30 ms


class AuditProcess(KeyProcess):
    target = "keystroke.analysis.audit.worker:audit_plain"
    seconds = 30.0  # four million characters, the most that is audited, take five
    memory = 3 << 30

    async def audit(
        self, buffer: str, language: str, text: str, edits: Sequence[Edit]
    ) -> tuple[Finding, ...]:
        """The findings of `text`, which `edits` led to. `buffer` names it for this key. Raises InputError."""
        late = f"The text could not be audited in {self.seconds:g} s and was left alone."

        def look(elsewhere: IsolatedFunction) -> tuple[Finding, ...]:
            plain = [(edit.start, edit.end, edit.text) for edit in edits]
            return decode_findings(call_limited(elsewhere, late, buffer, language, text, plain))

        return await self._run(look)
