"""Harvested projects to shards ready for training, and the manifest that accounts for every file.

The same harvest gives the same corpus, byte for byte. Of near-copies the older project's is kept; a held-out
file that resembles a training file is dropped from the held-out part, never the other way round. Training
files that contain lines of an evaluation case are dropped. Worker processes read files; one process decides
what is kept, in order.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from keystroke.errors import InputError, NotFound
from keystroke_lab.corpus.dedup import Deduplicator, Signature, line_hashes, signature_of
from keystroke_lab.corpus.harvest import ProjectRecord, read_project, read_record
from keystroke_lab.corpus.languages import LANGUAGES, language_of
from keystroke_lab.corpus.overlap import EvaluationLines
from keystroke_lab.corpus.shards import SUFFIX, read_shard, shard_paths, write_shard
from keystroke_lab.corpus.split import CorpusPart, part_of
from keystroke_lab.pretraining.documents import SourceText

PIECE = 8_000_000  # characters: seconds of a worker, so that training need not wait long for its first
Report = Callable[[str, int, int], None]
MANIFEST = "manifest.json"
LISTING = "files.jsonl.gz"
SIGNATURES = "signatures.npy"  # of every kept file, so that a corpus can grow without being read again


@dataclass(frozen=True, slots=True)
class HarvestedProject:
    path: Path
    record: ProjectRecord
    part: CorpusPart

    def characters(self, language: str) -> int:
        """Harvested of one language. A record that does not say is of the days when all was Python."""
        return (self.record.languages or {"python": self.record.characters}).get(language, 0)

    @property
    def shuffled(self) -> bytes:
        """A fixed order that has nothing to do with names or dates."""
        return hashlib.blake2b(self.record.name.encode(), digest_size=8, salt=b"order").digest()


def harvested_projects(folders: Sequence[Path]) -> list[HarvestedProject]:
    """Kept projects, each once, oldest first; training projects before the others."""
    found: dict[str, HarvestedProject] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.jsonl.gz")):
            record = read_record(path)
            if record.outcome == "kept" and record.name not in found:
                part = part_of(record.name, datetime.fromisoformat(record.first_released))
                found[record.name] = HarvestedProject(path, record, part)
    if not found:
        raise NotFound(f"no harvested projects in {', '.join(map(str, folders))}; run the harvest first")
    return sorted(
        found.values(), key=lambda h: (h.part is not CorpusPart.TRAIN, h.record.first_released, h.record.name)
    )


def build(
    folders: Sequence[Path],
    out: Path,
    *,
    without: Sequence[Path] = (),
    workers: int = 1,
    report: Report = lambda *_: None,
) -> dict[str, Any]:
    """Write `out/train`, `out/heldout`, `out/late` and the manifest; the manifest's summary. What stands in
    the case files `without` is not trained on."""
    projects = harvested_projects(folders)
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST).unlink(missing_ok=True)  # what it accounts for is about to be overwritten
    seen, files = Deduplicator(), Counter[str]()
    keep = _compare(projects, out, seen, [], files, EvaluationLines.from_files(without), workers, report)
    pieces = _write_pieces(projects, keep, out, [], workers, report)
    return _finish(out, seen, _summary(projects, files, pieces))


def grow(
    folders: Sequence[Path],
    out: Path,
    *,
    without: Sequence[Path] = (),
    workers: int = 1,
    report: Report = lambda *_: None,
) -> dict[str, Any]:
    """Add what `folders` hold and the corpus in `out` has not: new pieces beside the old ones, which stay as
    they are. Here a file that resembles any part of the corpus is left out, held-out parts included. The
    manifest changes last and says how much of the other files counts, so a growth cut short leaves the
    corpus as it was."""
    manifest = read_manifest(out)
    projects = harvested_projects(folders)
    files: Counter[str] = Counter(manifest["files"])
    listed = _listed(out, files.total())
    kept = sum(number for what, number in files.items() if what.endswith(" kept"))
    seen = _remembered(out, manifest["pieces"], kept, report)
    keep = _compare(projects, out, seen, listed, files, EvaluationLines.from_files(without), workers, report)
    projects = [p for p in projects if keep.get(p.record.name)]
    pieces = _write_pieces(projects, keep, out, manifest["pieces"], workers, report)
    names = {json.loads(line)[1] for line in listed}
    added = _summary([p for p in projects if p.record.name not in names], files, pieces)
    for counts in ("projects", "licences", "refused_files", "characters"):
        total = Counter(manifest[counts])
        total.update(added[counts])
        added[counts] = dict(total.most_common())
    added["pieces"] = manifest["pieces"] + pieces
    return _finish(out, seen, added)


def _finish(out: Path, seen: Deduplicator, summary: dict[str, Any]) -> dict[str, Any]:
    """Make the new corpus the one that counts; the manifest is what decides."""
    with (out / f"{SIGNATURES}.partial").open("wb") as stream:
        np.save(stream, seen.signatures())
    (out / f"{MANIFEST}.partial").write_text(json.dumps(summary, indent=1) + "\n")
    for name in (SIGNATURES, LISTING, MANIFEST):
        os.replace(out / f"{name}.partial", out / name)
    accounted = {row["piece"] for row in summary["pieces"]}
    for part in CorpusPart:
        for path in shard_paths(out / part):
            if f"{part}/{path.name}" not in accounted:
                path.unlink()
    return summary


def _listed(out: Path, count: int) -> list[str]:
    """The first `count` lines of the listing: one for each file compared before."""
    try:
        with gzip.open(out / LISTING, "rt", encoding="utf-8") as stream:
            lines = list(islice(stream, count))
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{out / LISTING} cannot be read ({error}); build the corpus again") from error
    if len(lines) < count:
        raise InputError(f"{out / LISTING} has lost lines; build the corpus again")
    return lines


def _remembered(out: Path, pieces: list[dict[str, Any]], kept: int, report: Report) -> Deduplicator:
    """A comparer that knows the corpus in `out`; from its pieces where no signatures are stored."""
    try:
        signatures = np.load(out / SIGNATURES)
        if len(signatures) >= kept:
            return Deduplicator(signatures[:kept])
    except (OSError, ValueError):
        pass
    seen = Deduplicator()
    for i, row in enumerate(pieces):
        for source in read_shard(out / row["piece"]):
            seen.remember(source.text)
        report("remember", i + 1, len(pieces))
    return seen


@dataclass(frozen=True, slots=True)
class _File:
    """What is to be known of a harvested file to decide about it."""

    path: str
    sha256: str
    characters: int
    signature: Signature
    evaluated: bool
    licence: str


def _inspect(evaluated: EvaluationLines, path: Path) -> list[_File]:
    """The project's files. Runs in a worker process: most of a comparison is reading and hashing."""
    found = []
    for file in read_project(path)[1]:
        hashes = line_hashes(file.text)
        mark = signature_of(hashes)
        held = evaluated.occurs_in_hashes(hashes)
        found.append(_File(file.path, file.sha256, len(file.text), mark, held, file.licence))
    return found


def _compare(
    projects: list[HarvestedProject],
    out: Path,
    seen: Deduplicator,
    listed: list[str],
    files: Counter[str],
    evaluated: EvaluationLines,
    workers: int,
    report: Report,
) -> dict[str, set[str]]:
    """Paths to keep of each project. Every file not `listed` is counted and listed with what came of it."""
    rows = list(map(json.loads, listed))
    known, sizes = {row[5] for row in rows}, Counter[str]()
    for row in rows:
        sizes[row[1]] += row[6]
    # A project all of whose characters are listed has nothing new and need not be read.
    projects = [p for p in projects if sizes[p.record.name] != p.record.characters]
    keep: dict[str, set[str]] = {}
    with (
        gzip.open(out / f"{LISTING}.partial", "wt", encoding="utf-8", compresslevel=6) as listing,
        ProcessPoolExecutor(workers) as pool,
    ):
        listing.writelines(listed)
        inspected = pool.map(partial(_inspect, evaluated), [p.path for p in projects], chunksize=8)
        for i, (project, found) in enumerate(zip(projects, inspected, strict=True)):
            record, kept = project.record, keep.setdefault(project.record.name, set())
            for file in found:
                if file.sha256 in known:
                    continue
                held = file.evaluated and project.part is CorpusPart.TRAIN
                new = not held and seen.is_new_signature(file.signature)
                outcome = "evaluated" if held else "kept" if new else "near-copy"
                files[f"{project.part} {outcome}"] += 1
                if new:
                    kept.add(file.path)
                row = [
                    project.part,
                    record.name,
                    record.version,
                    file.licence or record.licence,
                    file.path,
                    file.sha256,
                    file.characters,
                    new,
                ]
                listing.write(json.dumps(row) + "\n")
            report("compare", i + 1, len(projects))
    return keep


def _write_pieces(
    projects: list[HarvestedProject],
    keep: dict[str, set[str]],
    out: Path,
    before: list[dict[str, Any]],
    workers: int,
    report: Report,
) -> list[dict[str, Any]]:
    """Pieces of what is kept, each of one language, numbered on from those there were `before`."""
    jobs: list[tuple[Path, str, list[tuple[Path, set[str]]]]] = []
    for part in CorpusPart:
        (out / part).mkdir(exist_ok=True)
        of_part = sorted((p for p in projects if p.part is part), key=lambda p: p.shuffled)
        for language in LANGUAGES:
            first = sum(row["piece"].startswith(f"{part}/{language}-") for row in before)
            for i, group in enumerate(_groups(of_part, language), start=first):
                path = out / part / f"{language}-{i:04d}{SUFFIX}"
                jobs.append((path, language, [(p.path, keep[p.record.name]) for p in group]))
    pieces = []
    with ProcessPoolExecutor(workers) as pool:
        for done, row in enumerate(pool.map(_write_one, *zip(*jobs, strict=True)) if jobs else ()):
            pieces.append(row)
            report("write", done + 1, len(jobs))
    return pieces


def _groups(projects: list[HarvestedProject], language: str) -> Iterator[list[HarvestedProject]]:
    group: list[HarvestedProject] = []
    size = 0
    for project in projects:
        held = project.characters(language)
        if not held:
            continue
        group.append(project)
        size += held
        if size >= PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_one(path: Path, language: str, members: list[tuple[Path, set[str]]]) -> dict[str, Any]:
    sources = [
        SourceText(record.name, file.path, file.text)
        for harvested_path, kept in members
        for record, files in [read_project(harvested_path)]
        for file in files
        if file.path in kept and (language_of(file.path, file.text) or "python") == language
    ]
    size = write_shard(path, sources)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    characters = sum(len(s.text) for s in sources)
    return {
        "piece": f"{path.parent.name}/{path.name}",
        "files": len(sources),
        "characters": characters,
        "bytes": size,
        "sha256": digest,
    }


def _summary(
    projects: list[HarvestedProject], files: Counter[str], pieces: list[dict[str, Any]]
) -> dict[str, Any]:
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
            for part in CorpusPart
        },
        "pieces": pieces,
    }


def read_manifest(out: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((out / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{out} holds no corpus ({error}); build one with `keystroke train corpus`"
        ) from error
    return manifest
