"""Problems of a text, looked for in a process that can be ended.

Law: one process for each key, so that a hostile text of one never holds up another's; it goes when the last
connection of its key goes. A text that cannot be checked in time is an error in one sentence.
"""

from __future__ import annotations

from pathlib import Path
from weakref import WeakValueDictionary

from keystroke.analysis.check import Diagnostic
from keystroke.analysis.check.plain import diagnostics
from keystroke.errors import InputError
from keystroke.isolation import Isolated, OverLimit

SECONDS = 10.0  # a file of thousands of lines takes under one
MEMORY = 1 << 30
_CHECK = "keystroke.analysis.check.plain:check_plain"


class Checker:
    """Use `checker_of`. `problems` blocks: call it in a thread."""

    def __init__(self) -> None:
        self._elsewhere = Isolated(_CHECK, seconds=SECONDS, memory=MEMORY)

    def problems(self, text: str, path: Path | None, root: Path | None) -> tuple[Diagnostic, ...]:
        """Raises InputError for a text that is too long, or takes too long."""
        try:
            kind, said = self._elsewhere.call(
                text, "" if path is None else str(path), None if root is None else str(root)
            )
        except OverLimit:
            raise InputError(
                f"The text could not be checked in {SECONDS:g} s and was left alone; is it data?",
                param="buffer",
            ) from None
        if kind == "refused":
            raise InputError(said, param="buffer")
        return diagnostics(said)


_checkers: WeakValueDictionary[str, Checker] = WeakValueDictionary()


def checker_of(key: str) -> Checker:
    """The key's own; hold on to it for as long as it may be asked."""
    found = _checkers.get(key)
    if found is None:
        found = _checkers[key] = Checker()
    return found
