"""The audit for a worker process: arguments and results are plain values that can be pickled.

Parsing a large text blocks the interpreter, so a server runs this in another process. The audits of the last
few buffers are kept and updated by edits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from keystroke.analysis.audit.auditor import LiveAudit
from keystroke.analysis.audit.finding import Finding
from keystroke.errors import KeystrokeError

MAX_BUFFERS = 8  # buffers
MAX_INCREMENTAL_EDITS = 32  # with more edits at once, auditing the whole text is cheaper
_audits: OrderedDict[str, LiveAudit] = OrderedDict()


def audit_plain(
    buffer: str, language: str, text: str, edits: Sequence[tuple[int, int, str]]
) -> tuple[str, Any]:
    """("found", findings of `text`) or ("refused", an error message).

    `edits` lead from the last text of this buffer to `text`; if they do not, the whole text is audited.
    """
    audit = _audits.pop(buffer, None)
    try:
        if audit is None or audit.language != language:
            audit = LiveAudit(language, text)
        else:
            for start, end, put in edits if len(edits) < MAX_INCREMENTAL_EDITS else ():
                audit.edit(start, end, put)
            if audit.text != text:
                audit.replace(text)
    except KeystrokeError as error:
        return "refused", error.message
    _audits[buffer] = audit
    while len(_audits) > MAX_BUFFERS:
        _audits.popitem(last=False)
    return "found", msgspec.to_builtins(audit.findings)


def decode_findings(plain: Any) -> tuple[Finding, ...]:
    """The findings that `audit_plain` returned."""
    return msgspec.convert(plain, tuple[Finding, ...])
