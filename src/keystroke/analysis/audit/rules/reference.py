"""Writes the rule reference from the rules.

python -m keystroke.analysis.audit.rules.reference docs/audit/rules.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from keystroke.analysis.audit.rules.catalog import Rule, load_rules

_TITLES = {
    "python": "Python",
    "javascript": "JavaScript and TypeScript",
    "cpp": "C and C++",
    "go": "Go",
    "java": "Java",
}


def reference() -> str:
    lines = [
        "# Audit rules",
        "",
        "Written by `python -m keystroke.analysis.audit.rules.reference docs/audit/rules.md`; do not edit.",
        "",
    ]
    total = 0
    weaknesses: set[int] = set()
    for language, title in _TITLES.items():
        rules = load_rules(language)
        total += len(rules)
        for rule in rules:
            weaknesses |= {
                rule.cwe,
                *rule.also,
                *(condition.cwe for condition in rule.conditions if condition.cwe),
            }
        lines += [
            f"## {title}",
            "",
            "| rule | CWE | severity | what it finds | fix |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| [`{rule.id}`](#{rule.id}) | {_numbers(rule)} | {rule.severity.value} | {rule.title} "
            f"| {'yes' if rule.fixes else ''} |"
            for rule in rules
        ]
        lines.append("")
        for rule in rules:
            lines += _section(rule)
    lines[2] = f"{total} rules for {len(weaknesses)} CWE numbers. " + lines[2]
    return "\n".join(lines).rstrip() + "\n"


def _numbers(rule: Rule) -> str:
    return ", ".join(str(number) for number in dict.fromkeys((rule.cwe, *rule.also)))


def _section(rule: Rule) -> list[str]:
    fence = {"javascript": "javascript", "cpp": "cpp"}.get(rule.language, rule.language)
    lines = [f"### {rule.id}", "", f"{rule.message} {rule.why}", ""]
    lines += ["Found:", "", f"```{fence}", rule.tests.bad[0].strip("\n"), "```", ""]
    lines += ["Not found:", "", f"```{fence}", rule.tests.good[0].strip("\n"), "```", ""]
    if rule.fixes:
        lines += [f"Fix: {'; '.join(fix.title for fix in rule.fixes)}.", ""]
    lines += [" · ".join(f"<{link}>" for link in rule.references), ""]
    return lines


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
