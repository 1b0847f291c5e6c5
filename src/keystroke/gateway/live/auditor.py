"""Audits large texts in another process, so that parsing them does not block the event loop."""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.analysis.audit import Finding
from keystroke.analysis.audit.worker import decode_findings
from keystroke.gateway.live.key_process import KeyProcess
from keystroke.isolation import IsolatedFunction
from keystroke.text import Edit

LARGE = 50_000  # characters: parsed in about 30 ms
SECONDS = 30.0  # four million characters, the most that is audited, take five
MEMORY = 3 << 30
_AUDIT = "keystroke.analysis.audit.worker:audit_plain"


class AuditProcess(KeyProcess):
    def __init__(self, elsewhere: IsolatedFunction | None = None) -> None:
        super().__init__(elsewhere or IsolatedFunction(_AUDIT, seconds=SECONDS, memory=MEMORY))

    async def audit(
        self, buffer: str, language: str, text: str, edits: Sequence[Edit]
    ) -> tuple[Finding, ...]:
        """The findings of `text`, which `edits` led to. `buffer` names it for this key. Raises InputError."""
        return await self._run(self._look, buffer, language, text, edits)

    @classmethod
    def _look(
        cls, elsewhere: IsolatedFunction, buffer: str, language: str, text: str, edits: Sequence[Edit]
    ) -> tuple[Finding, ...]:
        late = f"The text could not be audited in {SECONDS:g} s and was left alone."
        plain = [(edit.start, edit.end, edit.text) for edit in edits]
        return decode_findings(cls._call(elsewhere, late, buffer, language, text, plain))
