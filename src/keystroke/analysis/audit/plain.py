"""The audit for another process: plain values in, plain values out.

Parsing a large text holds an interpreter for as long as it takes, so whoever serves many runs this where
nobody else waits for it. The audits of a few buffers are kept, each brought up to date by what was edited.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from keystroke.analysis.audit.auditor import LiveAudit
from keystroke.analysis.audit.finding import Finding
from keystroke.errors import KeystrokeError

KEPT = 8  # buffers
TOGETHER = 32  # edits at once from which looking at the whole text anew is cheaper than at each
_audits: OrderedDict[str, LiveAudit] = OrderedDict()


def audit_plain(
    buffer: str, language: str, text: str, edits: Sequence[tuple[int, int, str]]
) -> tuple[str, Any]:
    """("found", findings of `text`) or ("refused", the sentence of what was raised). `edits` led from what
    was last seen of this buffer to `text`; where they do not, the whole text is taken."""
    audit = _audits.pop(buffer, None)
    try:
        if audit is None or audit.language != language:
            audit = LiveAudit(language, text)
        else:
            for start, end, put in edits if len(edits) < TOGETHER else ():
                audit.edit(start, end, put)
            if audit.text != text:
                audit.replace(text)
    except KeystrokeError as error:
        return "refused", error.message
    _audits[buffer] = audit
    while len(_audits) > KEPT:
        _audits.popitem(last=False)
    return "found", msgspec.to_builtins(audit.findings)


def findings(plain: Any) -> tuple[Finding, ...]:
    """What `audit_plain` found, as it was."""
    return msgspec.convert(plain, tuple[Finding, ...])
