"""Reads labelled test suites from a folder: which lines or files have a weakness and which do not.

Suites are read as published; nothing of them is stored here. Supported are labels.json ({"path", "bad", "cwe",
"line"}), a table of expected results (name, category, real, cwe), and marks in comments. A label covers a file or
one line of it.
"""

from __future__ import annotations

import csv
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keystroke.analysis.audit import Auditor
from keystroke.analysis.audit.files import language_of
from keystroke.errors import KeystrokeError

# "ruleid: x" and "ok: x" label the next line of code; the other marks label their own line.
_AHEAD = re.compile(r"(?:#|//|/\*|\*|<!--)\s*(?:todo)?(ruleid|ok)\s*:", re.IGNORECASE)
_ALERT = re.compile(r"(?:#|//)\s*\$[^\n]*?(?:\bAlert\b|\bresult=(BAD|OK)\b)")
_BESIDE = re.compile(r"(?:#|//|/\*)[^\n]*?\b(NOT OK|BAD|OK|GOOD)\b")
_COMMENT = re.compile(r"\s*(?:#|//|/\*|\*|<!--|\{/\*|$)")
_FOLDERS = {"bad": True, "true_positives": True, "good": False, "true_negatives": False}
REACH = 8  # lines
_CWE = re.compile(r"(?i)CWE[-_]?0*(\d+)")


@dataclass(frozen=True)
class SuiteLabel:
    path: Path
    bad: bool
    cwe: frozenset[int] = frozenset()
    line: int | None = None  # from 1; None: the whole file
    last: int | None = None  # where a mark ahead of several statements covers them all


def read_suite(folder: Path) -> list[SuiteLabel]:
    """All labels of a folder."""
    if (folder / "labels.json").is_file():
        return list(_listed(folder))
    tables = sorted(folder.glob("expectedresults*.csv"))
    if tables:
        return list(_tabled(folder, tables[-1]))
    return list(_marked(folder))


def half(label: SuiteLabel, folder: Path) -> str:
    """The half of the suite that a label belongs to; depends on the file name alone."""
    name = label.path.relative_to(folder).as_posix()
    return "tuned" if zlib.crc32(name.encode()) % 2 == 0 else "held"


def _listed(folder: Path) -> Iterator[SuiteLabel]:
    for item in json.loads((folder / "labels.json").read_text(encoding="utf-8")):
        yield SuiteLabel(
            folder / item["path"], bool(item["bad"]), frozenset(item.get("cwe", ())), item.get("line")
        )


def _tabled(folder: Path, table: Path) -> Iterator[SuiteLabel]:
    sources = {path.stem: path for path in folder.rglob("*") if language_of(path) is not None}
    with table.open(encoding="utf-8", newline="") as rows:
        for row in csv.reader(rows):
            if len(row) >= 4 and not row[0].startswith("#") and row[0] in sources:
                yield SuiteLabel(sources[row[0]], row[2].strip() == "true", frozenset({int(row[3])}))


def _marked(folder: Path) -> Iterator[SuiteLabel]:
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or language_of(path) is None or ".fixed." in path.name:
            continue
        labels = list(_marks(path))
        if labels:
            yield from labels
            continue
        parts = [part for part in path.relative_to(folder).parts[:-1] if part in _FOLDERS]
        if parts:
            yield SuiteLabel(path, _FOLDERS[parts[-1]])


def _marks(path: Path) -> Iterator[SuiteLabel]:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    named = frozenset(int(number) for number in _CWE.findall(path.parent.as_posix())[-1:])
    found: dict[int, bool] = {}
    ahead_of: set[int] = set()
    for at, line in enumerate(lines, 1):
        ahead = _AHEAD.search(line)
        if ahead is not None:
            target = at + 1
            while target < len(lines) and _COMMENT.match(lines[target - 1]):
                target += 1
            found[target] = found.get(target, False) or ahead[1].lower() == "ruleid"
            ahead_of.add(target)
            continue
        alert = _ALERT.search(line)
        if alert is not None:
            found[at] = alert[1] == "BAD" if alert[1] else "SPURIOUS" not in alert.group()
            continue
        beside = _BESIDE.search(line)
        if beside is not None and not _COMMENT.match(line):
            found[at] = beside[1] in ("NOT OK", "BAD")
    marked = sorted(found)
    for place, at in enumerate(marked):
        # Such a mark stands before the first of the statements that together are weak.
        following = marked[place + 1] - 2 if place + 1 < len(marked) else len(lines)
        last = max(at, min(at + REACH, following)) if found[at] and at in ahead_of else at
        yield SuiteLabel(path, found[at], named, at, last)


def hit(label: SuiteLabel, spans: list[tuple[int, int, frozenset[int]]]) -> bool:
    """Whether a finding is on the lines of a label, or for a whole file has one of its CWE numbers."""
    if label.line is None:
        return any(not label.cwe or label.cwe & cwes for _, _, cwes in spans)
    last = label.last if label.last is not None else label.line
    return any(start <= last and end >= label.line for start, end, _ in spans)


def spans_of(path: Path, offered: Counter[str] | None = None) -> list[tuple[int, int, frozenset[int]]]:
    """First and last line and CWE numbers of each finding in a file; `offered` counts those with a fix."""
    language = language_of(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        findings = Auditor(language).audit(text) if language is not None else ()
    except KeystrokeError:
        findings = ()
    if offered is not None and language is not None:
        offered[f"{family_of(language)} found"] += len(findings)
        offered[f"{family_of(language)} fixed"] += sum(bool(item.fixes) for item in findings)
    return [
        (
            text.count("\n", 0, item.start) + 1,
            text.count("\n", 0, max(item.start, item.end - 1)) + 1,
            frozenset(item.cwes),
        )
        for item in findings
    ]


def suite(name: str, folder: Path) -> dict[str, Any]:
    """Recall and false alarms of one suite by language family and half."""
    files: dict[Path, list[SuiteLabel]] = defaultdict(list)
    for label in read_suite(folder):
        files[label.path].append(label)
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    offered: Counter[str] = Counter()
    for path, labels in files.items():
        spans = spans_of(path, offered)
        for label in labels:
            family = family_of(language_of(path) or "")
            row = rows[f"{family}_{half(label, folder)}"]
            found = hit(label, spans)
            row["bad"] += label.bad
            row["found"] += label.bad and found
            row["good"] += not label.bad
            row["alarms"] += not label.bad and found
    out: dict[str, Any] = {}
    for key, row in sorted(rows.items()):
        recall = row["found"] / max(row["bad"], 1)
        print(f"{name:16} {key:18} {row['found']:5} of {row['bad']:5} weak ({recall:.3f})", end="")
        print(f"  alarms {row['alarms']:4} of {row['good']:4} safe")
        out[key] = {
            "recall": round(recall, 3),
            "weak": row["bad"],
            "alarms": row["alarms"],
            "safe": row["good"],
        }
    for key in sorted({key.split()[0] for key in offered}):
        share = offered[f"{key} fixed"] / max(offered[f"{key} found"], 1)
        print(
            f"{name:16} {key:18} {offered[f'{key} fixed']} of {offered[f'{key} found']} findings have a fix"
        )
        out[f"{key}_fixes_offered_share"] = round(share, 3)
    return {f"suite_{name}": out}


def family_of(language: str) -> str:
    return {"typescript": "javascript", "tsx": "javascript"}.get(language, language)
