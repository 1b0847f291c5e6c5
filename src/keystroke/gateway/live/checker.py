"""Problems of a text, looked for in a process that can be ended.

A text that cannot be checked in time is an error in one sentence.
"""

from __future__ import annotations

from pathlib import Path

from keystroke.analysis.check import Diagnostic
from keystroke.analysis.check.plain import diagnostics
from keystroke.errors import InputError
from keystroke.gateway.live.key_process import KeyProcess
from keystroke.isolation import Isolated, OverLimit

SECONDS = 10.0  # a file of thousands of lines takes under one
MEMORY = 1 << 30
_CHECK = "keystroke.analysis.check.plain:check_plain"


class Checker(KeyProcess):
    def __init__(self, elsewhere: Isolated | None = None) -> None:
        super().__init__(elsewhere or Isolated(_CHECK, seconds=SECONDS, memory=MEMORY))

    async def asked(self, text: str, path: Path | None, root: Path | None) -> tuple[Diagnostic, ...]:
        """Raises InputError for a text that is too long, or takes too long."""
        return await self._run(problems, text, path, root)


def problems(elsewhere: Isolated, text: str, path: Path | None, root: Path | None) -> tuple[Diagnostic, ...]:
    """What a process finds. Blocks; raises as `Checker.asked`."""
    try:
        kind, said = elsewhere.call(
            text, "" if path is None else str(path), None if root is None else str(root)
        )
    except OverLimit:
        raise InputError(
            f"The text could not be checked in {SECONDS:g} s and was left alone; is it data?", param="buffer"
        ) from None
    if kind == "refused":
        raise InputError(said, param="buffer")
    return diagnostics(said)
