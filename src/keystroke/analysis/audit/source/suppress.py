"""Suppression comments: `# keystroke: ignore[rule-id] reason`, on the line of the finding or the line above.

A suppression without a rule or a reason suppresses nothing and is itself a finding.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from keystroke.analysis.audit.finding import Finding, Severity

UNEXPLAINED = "suppression-without-reason"
_COMMENT = re.compile(r"(?:#|//|/\*)[ \t]*keystroke:[ \t]*ignore(?:\[([^\]\n]*)\])?([^\n]*)")
_OTHERS = re.compile(r"(?:#|//)[ \t]*(?:nosec\b|noqa:[ \t]*(?:[A-Z]+\d+[, ]*)*S\d+|#nosec\b)")


def suppress(text: str, findings: Sequence[Finding], honour_others: bool = False) -> tuple[Finding, ...]:
    """The findings that no comment in `text` suppresses, and those about the comments themselves."""
    if "keystroke:" not in text and not honour_others:
        return tuple(findings)
    starts = [0, *(found.end() for found in re.finditer(r"\n", text))]

    def line(offset: int) -> int:
        return bisect_right(starts, offset) - 1

    quiet: dict[int, set[str]] = {}
    out: list[Finding] = []
    for found in _COMMENT.finditer(text):
        at = line(found.start())
        rules = {name.strip() for name in (found[1] or "").split(",") if name.strip()}
        reason = found[2].replace("*/", "").strip(" \t\r-:")
        if not reason or not rules:
            missing = "a reason" if rules else "the rule in brackets"
            out.append(
                Finding(
                    UNEXPLAINED,
                    1116,
                    Severity.LOW,
                    f"A suppression without {missing} is void; write `keystroke: ignore[rule-id] why`.",
                    found.start(),
                    found.end(),
                )
            )
            continue
        alone = not text[starts[at] : found.start()].strip()
        quiet.setdefault(at + 1 if alone else at, set()).update(rules)
    if honour_others:
        for found in _OTHERS.finditer(text):
            quiet.setdefault(line(found.start()), set()).add("*")
    for finding in findings:
        named = quiet.get(line(finding.start), set()) | quiet.get(
            line(max(finding.start, finding.end - 1)), set()
        )
        if finding.rule not in named and "*" not in named:
            out.append(finding)
    return tuple(sorted(out, key=lambda item: (item.start, item.end, item.rule)))
