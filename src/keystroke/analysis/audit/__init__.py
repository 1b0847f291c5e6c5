"""Security audit of source text: declarative rules, ast-grep syntax, data flow inside each function.

Auditor("python").audit(text) audits one text; LiveAudit("python", text).edit(...) follows a buffer.
"""

from __future__ import annotations

from keystroke.analysis.audit.auditor import Auditor, LiveAudit
from keystroke.analysis.audit.finding import AuditFix, Finding, Severity
from keystroke.analysis.audit.rules.catalog import LANGUAGES, Rule, all_rules, find_rule, load_rules

__all__ = [
    "LANGUAGES",
    "AuditFix",
    "Auditor",
    "Finding",
    "LiveAudit",
    "Rule",
    "Severity",
    "all_rules",
    "find_rule",
    "load_rules",
]
