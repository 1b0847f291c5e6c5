"""Checks a text in a process that can be terminated."""

from __future__ import annotations

from pathlib import Path

from keystroke.analysis.check import Diagnostic
from keystroke.analysis.check.check_worker import diagnostics_from_plain
from keystroke.gateway.live.key_process import KeyProcess, call_limited


class CheckProcess(KeyProcess):
    target = "keystroke.analysis.check.check_worker:check_in_worker"
    seconds = 10.0  # a file of thousands of lines takes under one
    memory = 1 << 30

    async def check(self, text: str, path: Path | None, root: Path | None) -> tuple[Diagnostic, ...]:
        """Raises InputError for a text that is too long, or takes too long."""
        timeout_message = (
            f"The text could not be checked in {self.seconds:g} s and was left alone; is it data?"
        )
        plain = (text, "" if path is None else str(path), None if root is None else str(root))
        return await self._run(
            lambda function: diagnostics_from_plain(
                call_limited(function, timeout_message, *plain, param="buffer")
            )
        )
