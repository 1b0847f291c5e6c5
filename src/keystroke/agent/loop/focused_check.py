"""The part of a slow test command that a change must pass first: the tests that fail now, or those of the
changed files.

Only plain commands of pytest are narrowed. A change that passes is checked with the whole command afterwards.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from keystroke.agent.loop.locate import imported_sources, is_test
from keystroke.agent.sandbox import CompletedCommand
from keystroke.agent.workspace import Overlay

_SLOW_S = 3.0  # seconds of the whole command below which narrowing it costs more than it saves
_MOST = 20  # tests named on a command line
_PYTEST = re.compile(r"((?:[\w./-]+ -m )?(?:[\w./-]*/)?pytest)((?: [\w./:=,-]+)*)")
_VALUED = frozenset({"-k", "-m", "-p", "-n", "-c", "-o", "-W", "-r"})  # options that take a value
_FAILING = re.compile(r"^(?:FAILED|ERROR) (\S+::\S+)", re.MULTILINE)


def focused_command(
    line: str, before: CompletedCommand | None, affected: Callable[[], Sequence[str]] = tuple
) -> str | None:
    """The command for the tests that failed in `before` or, where none did, for the files `affected`; None
    where narrowing does not help."""
    plain = _PYTEST.fullmatch(line.strip())
    if before is None or before.seconds < _SLOW_S or plain is None:
        return None
    words: list[str] = plain[2].split()
    options = [
        word
        for at, word in enumerate(words)
        if word.startswith("-") or (at and words[at - 1] in _VALUED) or "=" in word
    ]
    if any(not _is_path(word) for word in words if word not in options):
        return None  # perhaps the value of an option
    named = [word for word in words if word not in options]
    tests = affected() if before.ok else list(dict.fromkeys(_FAILING.findall(before.output)))
    if not 0 < len(tests) <= _MOST or (before.ok and named):
        return None
    return shlex.join([*plain[1].split(), *options, *tests])


def affected_tests(overlay: Overlay, path: str) -> list[str]:
    """The test files that import a source file."""
    names = overlay.files()
    files = [name for name in names if is_test(name) and _is_module(name)]
    return [name for name in files if path in imported_sources(overlay, [name], names)]


def _is_path(word: str) -> bool:
    return "::" in word or "/" in word or word.endswith(".py") or word in ("tests", "test", ".")


def _is_module(name: str) -> bool:
    stem = PurePosixPath(name).stem
    return name.endswith(".py") and (stem.startswith("test_") or stem.endswith("_test"))
