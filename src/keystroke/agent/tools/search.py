"""The tool that finds text in the workspace's files.

It searches the overlay. A query that compiles and cannot take exponential time is a regular expression,
any other is literal text. Secrets, binary files and huge files are skipped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Annotated

import msgspec

from keystroke.agent.tools.call import AgentTool, ToolResult
from keystroke.agent.workspace import Overlay
from keystroke.errors import KeystrokeError

_MATCHES = 40
_WIDTH = 200  # characters of a line that are shown
_SECONDS = 5.0
_SIZE = 1 << 20


class SearchArguments(msgspec.Struct, forbid_unknown_fields=True):
    query: Annotated[str, msgspec.Meta(description="text or regular expression", min_length=1)]
    files: Annotated[str, msgspec.Meta(description="only files like this, for example *.py")] = ""


class SearchTool(AgentTool):
    name = "search"
    description = "Find lines in the workspace's files."
    arguments = SearchArguments
    reads_only = True

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def describe(self, arguments: SearchArguments) -> str:
        return f"search for {arguments.query!r:.60}"

    def call(self, arguments: SearchArguments) -> ToolResult:
        lines: list[str] = []
        for match in find_matches(self._overlay, arguments.query, arguments.files):
            if match is None:
                lines.append(f"… not all files were searched in {_SECONDS:.0f} s; name the files to search")
            elif len(lines) == _MATCHES:
                lines.append("… and more; search for something narrower")
                break
            else:
                path, number, text = match
                lines.append(f"{path}:{number}: {text[:_WIDTH]}")
        return ToolResult("\n".join(lines) or f"nothing matches {arguments.query!r:.80}")


def find_matches(overlay: Overlay, query: str, files: str = "") -> Iterator[tuple[str, int, str] | None]:
    """Path, line number from 1 and text of every matching line; None, and no more, once it took too long."""
    pattern = _compile_query(query)
    end = time.monotonic() + _SECONDS
    for path in overlay.files():
        if files and not (fnmatch(path, files) or fnmatch(path.rpartition("/")[2], files)):
            continue
        if time.monotonic() > end:
            yield None
            return
        try:
            text = overlay.peek(path)
        except KeystrokeError:
            continue  # binary, too large, or forbidden
        if text is None or len(text) > _SIZE or not pattern.search(text):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) <= 10 * _WIDTH and pattern.search(line):
                yield path, number, line.strip()


def _compile_query(query: str) -> re.Pattern[str]:
    from keystroke.analysis.audit.rules.backtracking import (
        backtracks_exponentially,
    )  # here: the audit takes time to load

    flags = re.MULTILINE | (0 if any(c.isupper() for c in query) else re.IGNORECASE)
    try:
        # Several unbounded repetitions can be slow without being exponential.
        if (
            len(query) <= 300
            and not backtracks_exponentially(query)
            and len(re.findall(r"(?<!\\)[*+]|\{\d*,", query)) <= 2
        ):
            return re.compile(query, flags)
    except (re.error, OverflowError, RecursionError):
        pass
    return re.compile(re.escape(query), flags)
