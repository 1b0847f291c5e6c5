"""Security audit of unsaved text: rules as data, syntax by ast-grep, data flow inside each function.

Auditor("python").audit(text)          one text, once
LiveAudit("python", text).edit(...)    a buffer, kept up to date
"""

from __future__ import annotations

from keystroke.analysis.audit.auditor import Auditor, LiveAudit
from keystroke.analysis.audit.finding import Finding, Fix, Severity
from keystroke.analysis.audit.rules.catalog import LANGUAGES, Rule, all_rules, find_rule, load_rules

__all__ = [
    "LANGUAGES",
    "Auditor",
    "Finding",
    "Fix",
    "LiveAudit",
    "Rule",
    "Severity",
    "all_rules",
    "find_rule",
    "load_rules",
]
