"""Checks a text in a process that can be terminated."""

from __future__ import annotations

from pathlib import Path

from keystroke.analysis.check import Diagnostic
from keystroke.analysis.check.check_worker import diagnostics_from_plain
from keystroke.gateway.live.key_process import KeyProcess
from keystroke.isolation import IsolatedFunction

SECONDS = 10.0  # a file of thousands of lines takes under one
MEMORY = 1 << 30
_CHECK = "keystroke.analysis.check.check_worker:check_in_worker"


class CheckProcess(KeyProcess):
    def __init__(self, elsewhere: IsolatedFunction | None = None) -> None:
        super().__init__(elsewhere or IsolatedFunction(_CHECK, seconds=SECONDS, memory=MEMORY))

    async def check(self, text: str, path: Path | None, root: Path | None) -> tuple[Diagnostic, ...]:
        """Raises InputError for a text that is too long, or takes too long."""
        return await self._run(self._find, text, path, root)

    @classmethod
    def _find(
        cls, elsewhere: IsolatedFunction, text: str, path: Path | None, root: Path | None
    ) -> tuple[Diagnostic, ...]:
        late = f"The text could not be checked in {SECONDS:g} s and was left alone; is it data?"
        plain = ("" if path is None else str(path), None if root is None else str(root))
        return diagnostics_from_plain(cls._call(elsewhere, late, text, *plain, param="buffer"))
