"""Collected edits to shards ready for training, and the manifest that accounts for them.

The same collection gives the same shards, byte for byte. Near-copies of a change are kept once, and a
held-out change that resembles a training one is dropped from the held-out part. Training files that contain
lines of an evaluation case are dropped. Projects are shuffled and capped, so the first shards are a fair
sample.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from keystroke.errors import InputError, NotFound
from keystroke_lab.corpus.dedup import Deduplicator
from keystroke_lab.corpus.overlap import EvaluationLines
from keystroke_lab.corpus.trajectories import FileEdit, read_edits, write_edits

PIECE = 20_000_000  # characters
PROJECT_LIMIT = 400_000  # characters of whole files kept of one project
SUFFIX = ".jsonl.bz2"


def collected_projects(folder: Path) -> list[Path]:
    """Files of collected projects in an order that has nothing to do with their names."""
    paths = folder.glob("*.jsonl.gz")
    return sorted(
        paths, key=lambda p: hashlib.blake2b(p.name.encode(), digest_size=8, salt=b"pieces").digest()
    )


def select_edits(edits: list[FileEdit], seen: Deduplicator, left_out: Counter[str]) -> list[FileEdit]:
    """What is kept of one project's edits, in their order: new changes, of releases with at least two hunks,
    files with several hunks first where there are too many."""
    new = [edit for edit in edits if seen.is_new(edit.changed)]
    left_out["near_copy"] += len(edits) - len(new)
    related: list[FileEdit] = []
    for _, group in groupby(new, key=lambda e: (e.release_from, e.release_to)):
        pair = list(group)
        if sum(len(edit.hunks) for edit in pair) > 1:
            related.extend(pair)
        else:
            left_out["alone"] += len(pair)
    room = PROJECT_LIMIT
    kept: set[int] = set()
    for i in sorted(range(len(related)), key=lambda i: (len(related[i].hunks) < 2, i)):
        if len(related[i].before) <= room:
            room -= len(related[i].before)
            kept.add(i)
        else:
            left_out["over_cap"] += 1
    return [edit for i, edit in enumerate(related) if i in kept]


def pack(
    train: Path,
    heldout: Path,
    out: Path,
    *,
    characters: int = 0,
    without: Sequence[Path] = (),
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Write `out/train/*.jsonl.bz2`, `out/heldout.jsonl.bz2` and the manifest, which is returned.
    `characters` bounds the training part; 0 takes all. What stands in the case files `without` is not
    trained on."""
    both = {p.name for p in train.glob("*.jsonl.gz")} & {p.name for p in heldout.glob("*.jsonl.gz")}
    if both:
        raise InputError(
            f"{sorted(both)[0].removesuffix('.jsonl.gz')} is among the projects to train on and those held"
            " out; delete one of the two files"
        )
    paths = collected_projects(train)
    if not paths:
        raise NotFound(f"no collected edits in {train}; collect some first")
    seen, left_out = Deduplicator(), Counter[str]()
    evaluated = EvaluationLines.from_files(without)

    def projects(some: list[Path], limit: int, apart: EvaluationLines) -> Iterator[list[FileEdit]]:
        size = 0
        for i, path in enumerate(some):
            every = read_edits(path)
            unseen = [e for e in every if not any(map(apart.occurs_in, (e.before, e.after())))]
            left_out["evaluated"] += len(every) - len(unseen)
            edits = select_edits(unseen, seen, left_out)
            size += sum(_size(edit) for edit in edits)
            yield edits
            report("pack", i + 1, len(some))
            if limit and size >= limit:
                return

    (out / "train").mkdir(parents=True, exist_ok=True)
    for old in (out / "train").glob(f"*{SUFFIX}"):
        old.unlink()
    rows = []
    counts: dict[str, Counter[str]] = {"train": Counter(), "heldout": Counter()}
    licences: Counter[str] = Counter()
    for i, piece in enumerate(_pieces(projects(paths, characters, evaluated))):
        rows.append(_write(out / "train" / f"{i:04d}{SUFFIX}", piece, out))
        _count(counts["train"], piece)
        licences.update(edit.licence for edit in piece)
    rest = [edit for edits in projects(collected_projects(heldout), 0, EvaluationLines(())) for edit in edits]
    rows.append(_write(out / f"heldout{SUFFIX}", rest, out))
    _count(counts["heldout"], rest)
    summary: dict[str, Any] = {part: dict(count) for part, count in counts.items()}
    summary |= {"left_out": dict(left_out), "licences": dict(licences.most_common()), "pieces": rows}
    (out / "manifest.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _size(edit: FileEdit) -> int:
    return len(edit.before) + len(edit.changed)


def _pieces(projects: Iterable[list[FileEdit]]) -> Iterator[list[FileEdit]]:
    piece: list[FileEdit] = []
    size = 0
    for edits in projects:
        piece.extend(edits)
        size += sum(_size(edit) for edit in edits)
        if size >= PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _count(counts: Counter[str], edits: list[FileEdit]) -> None:
    counts["projects"] += len({edit.project for edit in edits})
    counts["releases"] += len({(e.project, e.release_from, e.release_to) for e in edits})
    counts["files"] += len(edits)
    counts["several_hunks"] += sum(1 for edit in edits if len(edit.hunks) > 1)
    counts["hunks"] += sum(len(edit.hunks) for edit in edits)
    counts["characters"] += sum(_size(edit) for edit in edits)


def _write(path: Path, edits: list[FileEdit], out: Path) -> dict[str, Any]:
    size = write_edits(path, edits)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "piece": str(path.relative_to(out)),
        "files": len(edits),
        "bytes": size,
        "sha256": digest,
    }
