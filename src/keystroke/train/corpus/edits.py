"""Edits as people made them: what changed between consecutive releases of a project.

Law: hunks of one file in the order of its lines, each with the text around it; the same filters and
licences as the corpus. One file per project, so a collection can stop and go on. What to learn from them
is decided elsewhere.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from keystroke.errors import KeystrokeError
from keystroke.train.corpus.archives import python_files
from keystroke.train.corpus.filters import Refusal, clean
from keystroke.train.corpus.harvest import ProjectRecord, read_record
from keystroke.train.corpus.index import PackageIndex, Release

_MAX_HUNKS = 12  # a file that changed in more places was rewritten, not edited
_MAX_LINES = 40
_LARGEST = 60_000  # characters; comparing larger files costs more than it teaches


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines [start, start + len(before)) of the old file became `after`."""

    start: int
    before: list[str]
    after: list[str]


@dataclass(frozen=True, slots=True)
class FileEdit:
    project: str
    licence: str
    path: str
    old_version: str
    new_version: str
    old_text: str
    hunks: list[Hunk]

    def new_text(self) -> str:
        """The old text with every hunk applied."""
        lines = self.old_text.split("\n")
        for hunk in reversed(self.hunks):
            lines[hunk.start : hunk.start + len(hunk.before)] = hunk.after
        return "\n".join(lines)


def file_hunks(old: str, new: str) -> list[Hunk] | None:
    """The hunks between two versions; None where it is no edit worth learning (too many, too large, none)."""
    if old == new or len(old) > _LARGEST or len(new) > _LARGEST:
        return None
    a, b = old.split("\n"), new.split("\n")
    hunks = [
        Hunk(i1, a[i1:i2], b[j1:j2])
        for tag, i1, i2, j1, j2 in SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    small = all(len(h.before) <= _MAX_LINES and len(h.after) <= _MAX_LINES for h in hunks)
    return hunks if hunks and len(hunks) <= _MAX_HUNKS and small else None


def _clean_files(index: PackageIndex, release: Release) -> dict[str, str]:
    data = index.fetch(release.download)
    found = python_files(data, release.download.filename, sdist=release.download.sdist)
    cleaned = {path: clean(path, content) for path, content in found}
    return {path: text for path, text in cleaned.items() if not isinstance(text, Refusal)}


def project_edits(index: PackageIndex, record: ProjectRecord, releases: int) -> Iterator[FileEdit]:
    """Edits between the project's latest `releases`, oldest pair first."""
    project = index.project(record.name)
    if project is None:
        return
    chosen = project.releases[-releases:]
    before: dict[str, str] = {}
    for i, release in enumerate(chosen):
        after = _clean_files(index, release)
        for path in sorted(before.keys() & after.keys()):
            hunks = file_hunks(before[path], after[path])
            if hunks is not None:
                old = chosen[i - 1].version
                yield FileEdit(record.name, record.licence, path, old, release.version, before[path], hunks)
        before = after


def collect(
    index: PackageIndex,
    harvested: Path,
    out: Path,
    *,
    projects: int,
    releases: int,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Collect the edits of up to `projects` harvested projects not yet in `out`; counts over the whole
    folder."""
    out.mkdir(parents=True, exist_ok=True)
    done = 0
    for path in sorted(harvested.glob("*.jsonl.gz")):
        if done >= projects:
            break
        record = read_record(path)
        target = out / path.name
        if record.outcome != "kept":
            continue
        done += 1
        if not target.exists():
            try:
                _write(target, project_edits(index, record, releases))
            except (KeystrokeError, OSError, ValueError):
                continue  # tried again next time
        report("edits", done, projects)
    counts: Counter[str] = Counter()
    for path in sorted(out.glob("*.jsonl.gz")):
        edits = read_edits(path)
        counts["projects"] += bool(edits)
        counts["files"] += len(edits)
        counts["hunks"] += sum(len(e.hunks) for e in edits)
    summary = dict(counts)
    (out / "manifest.json").write_text(json.dumps(summary) + "\n")
    return summary


def _write(path: Path, edits: Iterator[FileEdit]) -> None:
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wt", encoding="utf-8") as stream:
        for edit in edits:
            stream.write(json.dumps(asdict(edit), ensure_ascii=False) + "\n")
    os.replace(partial, path)


def read_edits(path: Path) -> list[FileEdit]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return [FileEdit(**{**row, "hunks": [Hunk(**h) for h in row["hunks"]]}) for row in rows]
