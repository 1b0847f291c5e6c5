"""Shortens the output of a failing command to the part that explains the failure.

From a report of pytest it keeps the first distinct failures, each with the lines of the test that led to it;
from any other output the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LIMIT = 2000  # characters; small models do not profit from more
_MOST = 4  # failures
_SOURCE = 9  # lines of a test that are kept above the one that failed
_SAID = 8  # lines of the error message
_HEAD = re.compile(r"^(?:_{3,} .+ _{3,}|_ .+ _)$")
_SECTION = re.compile(r"^=+ (?P<name>[\w ]+?) =+$")
_COUNTS = re.compile(r"^=*\s*(?:\d+ (?:failed|passed|errors?|skipped|xfailed|warnings?)\b[, ]*)+ in .*$")
_PLACE = re.compile(r"^[^\s:][^:\n]*\.py:\d+: ")
_NOISE = re.compile(r"^self = <.*>$")


def summarize_output(output: str, limit: int = LIMIT) -> str:
    """The distinct failures with the final counts, or the end of the output if no report is recognised."""
    reports = distinct_reports(output, limit)
    if not reports:
        text = output.strip()
        return text if len(text) <= limit else f"…{text[-limit:]}"
    lines = output.strip().split("\n")
    counts = next((line.strip("= ") for line in reversed(lines) if _COUNTS.match(line)), "")
    kept: list[str] = []
    room = limit - len(counts)
    for report in reports:
        if kept and len(report) > room:
            break
        kept.append(report[:room])
        room -= len(report) + 2
    return "\n\n".join([*kept, *([counts] if counts else [])])


def distinct_reports(output: str, limit: int = LIMIT) -> list[str]:
    """The first failures of a report with different messages."""
    reports: dict[str, str] = {}
    for messages, report in _split_reports(output.strip().split("\n")):
        reports.setdefault(messages, report[:limit])
    return list(reports.values())[:_MOST]


def _split_reports(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Message and lines of each failure in a report of pytest."""
    inside = False
    part: list[str] | None = None
    for line in [*lines, "=== end ==="]:
        section = _SECTION.match(line)
        if section or (inside and _HEAD.match(line)):
            if part and (report := _parse_report(part)) is not None:
                yield report
            part = None
            if section:
                inside = section["name"].strip() in ("FAILURES", "ERRORS")
                continue
            part = []
        elif part is not None:
            part.append(line)


def _parse_report(part: list[str]) -> tuple[str, str] | None:
    """Message and lines of one failure; None without a message."""
    messages = [n for n, line in enumerate(part) if line.startswith("E  ")]
    if not messages:
        return None
    # The outermost frame is the test, the innermost is where it failed.
    ends = [n for n, line in enumerate(part) if line.startswith(">")]
    shown: list[str] = []
    for end in dict.fromkeys([*ends[:1], *ends[-1:]]):
        source = [line for line in part[: end + 1] if line.strip() and not _NOISE.match(line)]
        frame = next((n for n, line in enumerate(reversed(source)) if _is_definition(line)), len(source) - 1)
        shown += source[-min(frame + 1, _SOURCE) :]
    words = [part[n] for n in messages][:_SAID]
    places = [line for line in part if _PLACE.match(line)]
    return " ".join(words[0].split()), "\n".join([*dict.fromkeys(shown), *words, *places[-1:]])


def _is_definition(line: str) -> bool:
    return line.lstrip("> ").startswith(("def ", "async def "))
