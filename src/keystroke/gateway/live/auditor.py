"""Findings in large texts, looked for in another process.

Parsing takes the interpreter for itself, half a second for a megabyte, in which no key of anybody is
answered; so large texts are audited where nobody else waits. Small ones are quicker here.
"""

from __future__ import annotations

from collections.abc import Sequence

from keystroke.analysis.audit import Finding
from keystroke.analysis.audit.plain import findings
from keystroke.errors import InputError
from keystroke.gateway.live.key_process import KeyProcess
from keystroke.isolation import Isolated, OverLimit
from keystroke.text import Edit

LARGE = 50_000  # characters: parsed in some 30 ms
SECONDS = 30.0  # four million characters, the most that is audited, take five
MEMORY = 3 << 30
_AUDIT = "keystroke.analysis.audit.plain:audit_plain"


class Auditor(KeyProcess):
    def __init__(self, elsewhere: Isolated | None = None) -> None:
        super().__init__(elsewhere or Isolated(_AUDIT, seconds=SECONDS, memory=MEMORY))

    async def look(self, buffer: str, language: str, text: str, edits: Sequence[Edit]) -> tuple[Finding, ...]:
        """The findings of `text`, which `edits` led to. `buffer` names it for this key. Raises InputError."""
        return await self._run(_look, buffer, language, text, edits)


def _look(
    elsewhere: Isolated, buffer: str, language: str, text: str, edits: Sequence[Edit]
) -> tuple[Finding, ...]:
    plain = [(edit.start, edit.end, edit.text) for edit in edits]
    try:
        kind, said = elsewhere.call(buffer, language, text, plain)
    except OverLimit:
        raise InputError(f"The text could not be audited in {SECONDS:g} s and was left alone.") from None
    if kind == "refused":
        raise InputError(said)
    return findings(said)
