"""From harvested projects to pieces ready for training, and the manifest that accounts for every file.

Law: the same harvest gives the same corpus, byte for byte. Near-copies go to the older project; a held-out
file that resembles a training file is dropped from the held-out part, never the other way round. Nothing
is downloaded here.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from keystroke.errors import InputError, NotFound
from keystroke.train.corpus.dedup import Deduplicator
from keystroke.train.corpus.harvest import ProjectRecord, read_project, read_record
from keystroke.train.corpus.split import Part, part_of
from keystroke.train.documents import Source
from keystroke.train.pieces import SUFFIX, write_piece

PIECE = 20_000_000  # characters


@dataclass(frozen=True, slots=True)
class Harvested:
    path: Path
    record: ProjectRecord
    part: Part

    @property
    def shuffled(self) -> bytes:
        """A fixed order that has nothing to do with names or dates."""
        return hashlib.blake2b(self.record.name.encode(), digest_size=8, salt=b"order").digest()


def harvested(folders: Sequence[Path]) -> list[Harvested]:
    """Kept projects, each once, oldest first; training projects before the others."""
    found: dict[str, Harvested] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.jsonl.gz")):
            record = read_record(path)
            if record.outcome == "kept" and record.name not in found:
                part = part_of(record.name, datetime.fromisoformat(record.first_released))
                found[record.name] = Harvested(path, record, part)
    if not found:
        raise NotFound(f"no harvested projects in {', '.join(map(str, folders))}; run the harvest first")
    return sorted(
        found.values(), key=lambda h: (h.part is not Part.TRAIN, h.record.first_released, h.record.name)
    )


def build(
    folders: Sequence[Path],
    out: Path,
    *,
    workers: int = 1,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Write `out/train`, `out/heldout`, `out/late` and the manifest; the manifest's summary."""
    projects = harvested(folders)
    keep: dict[str, set[str]] = {}
    seen, files = Deduplicator(), Counter[str]()
    out.mkdir(parents=True, exist_ok=True)
    with gzip.open(out / "files.jsonl.gz", "wt", encoding="utf-8", compresslevel=6) as listing:
        for i, project in enumerate(projects):
            record, sources = read_project(project.path)
            kept = keep[record.name] = set()
            for file in sources:
                new = seen.is_new(file.text)
                files[f"{project.part} {'kept' if new else 'near-copy'}"] += 1
                if new:
                    kept.add(file.path)
                row = [
                    project.part,
                    record.name,
                    record.version,
                    record.licence,
                    file.path,
                    file.sha256,
                    len(file.text),
                    new,
                ]
                listing.write(json.dumps(row) + "\n")
            report("compare", i + 1, len(projects))
    pieces = _write_pieces(projects, keep, out, workers, report)
    summary = _summary(projects, files, pieces)
    (out / "manifest.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _write_pieces(
    projects: list[Harvested],
    keep: dict[str, set[str]],
    out: Path,
    workers: int,
    report: Callable[[str, int, int], None],
) -> list[dict[str, Any]]:
    jobs: list[tuple[Path, list[tuple[Path, set[str]]]]] = []
    for part in Part:
        (out / part).mkdir(exist_ok=True)
        for old in (out / part).glob(f"*{SUFFIX}"):
            old.unlink()
        for i, group in enumerate(
            _groups(sorted((p for p in projects if p.part is part), key=lambda p: p.shuffled))
        ):
            jobs.append((out / part / f"{i:04d}{SUFFIX}", [(p.path, keep[p.record.name]) for p in group]))
    pieces = []
    with ProcessPoolExecutor(workers) as pool:
        for done, row in enumerate(pool.map(_write_one, *zip(*jobs, strict=True))):
            pieces.append(row)
            report("write", done + 1, len(jobs))
    return pieces


def _groups(projects: list[Harvested]) -> Iterator[list[Harvested]]:
    group: list[Harvested] = []
    size = 0
    for project in projects:
        group.append(project)
        size += project.record.characters
        if size >= PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_one(path: Path, members: list[tuple[Path, set[str]]]) -> dict[str, Any]:
    sources = [
        Source(record.name, file.path, file.text)
        for harvested_path, kept in members
        for record, files in [read_project(harvested_path)]
        for file in files
        if file.path in kept
    ]
    size = write_piece(path, sources)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    characters = sum(len(s.text) for s in sources)
    return {
        "piece": f"{path.parent.name}/{path.name}",
        "files": len(sources),
        "characters": characters,
        "bytes": size,
        "sha256": digest,
    }


def _summary(projects: list[Harvested], files: Counter[str], pieces: list[dict[str, Any]]) -> dict[str, Any]:
    refused: Counter[str] = Counter()
    for project in projects:
        refused.update(project.record.refused)
    return {
        "projects": dict(Counter(str(p.part) for p in projects)),
        "licences": dict(Counter(p.record.licence for p in projects).most_common()),
        "files": dict(sorted(files.items())),
        "refused_files": dict(refused.most_common()),
        "characters": {
            part: sum(row["characters"] for row in pieces if row["piece"].startswith(f"{part}/"))
            for part in Part
        },
        "pieces": pieces,
    }


def read_manifest(out: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{out} holds no corpus ({error}); build one with `keystroke train corpus`"
        ) from error
    return manifest
