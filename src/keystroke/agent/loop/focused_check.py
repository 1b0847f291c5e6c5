"""The part of a slow test command that a change must pass first: the tests that fail now.

Only plain commands of pytest are narrowed. Whatever passes is checked with the whole command afterwards.
"""

from __future__ import annotations

import re
import shlex

from keystroke.agent.sandbox import CompletedCommand

_SLOW_S = 3.0  # seconds of the whole command below which narrowing it costs more than it saves
_MOST = 20  # tests named on a command line
_PYTEST = re.compile(r"(?:[\w./-]+ -m )?(?:[\w./-]*/)?pytest(?: -{1,2}[\w=.-]+)*")
_FAILING = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)", re.MULTILINE)


def focused_command(line: str, before: CompletedCommand | None) -> str | None:
    """The command for the tests that failed in `before`; None where narrowing does not help."""
    if before is None or before.ok or before.seconds < _SLOW_S or not _PYTEST.fullmatch(line.strip()):
        return None
    tests = list(dict.fromkeys(_FAILING.findall(before.output)))
    return f"{line.strip()} {shlex.join(tests)}" if 0 < len(tests) <= _MOST else None
