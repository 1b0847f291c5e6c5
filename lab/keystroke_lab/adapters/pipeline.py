"""Collects an adapter's training data in one step: names, releases, edits, examples and a manifest.

A date (`until`) and a seed identify the data. A project is one file and is requested once, so a stopped call
resumes. Names come from Debian and from a draw over the whole index. Held-out and late projects are never
fetched; files of evaluation cases are left out and counted.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from keystroke.agent.evaluation.source_archives import normalise_name
from keystroke_lab.adapters.dataset import Progress, make_examples
from keystroke_lab.adapters.examples import LEARNED
from keystroke_lab.corpus.edits import collect_named
from keystroke_lab.corpus.names import debian_packages, package_names, project_names, shuffled
from keystroke_lab.corpus.npm_edits import NpmRegistry, collect_packages
from keystroke_lab.corpus.package_index import PackageIndex

_SALT = "edits"


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much of everything. Names are drawn by a fixed hash: fewer are a part of more."""

    projects: int = 4000  # names of Python projects that Debian has
    drawn: int = 22_400  # and of any on the index: one in five has edits and a licence
    packages: int = 1600  # names of npm packages
    releases: int = 6  # latest ones of each that are compared
    tokens: int = 64_000_000  # of examples
    heldout: int = 40  # projects whose examples are held out


def python_names(count: int, index: PackageIndex, drawn: int, after: int = 0) -> list[str]:
    """Debian's, then those drawn from the index behind the first `after` of the draw, each once. Raises
    NotFound where Debian's are asked for and this machine has no apt lists."""
    known = shuffled(project_names(debian_packages()), _SALT)[:count] if count else []
    others = shuffled(index.names(), _SALT)[after : after + drawn] if drawn else []
    return list(dict.fromkeys(map(normalise_name, (*known, *others))))


def npm_names(count: int) -> list[str]:
    """Raises NotFound where this machine has no apt lists."""
    return shuffled(package_names(debian_packages("node-")), _SALT)[:count]


def make_data(
    folder: Path,
    model: Path,
    index: PackageIndex,
    registry: NpmRegistry | None,
    names: Sequence[str],
    packages: Sequence[str],
    *,
    until: datetime,
    amounts: Amounts,
    without: Sequence[Path] = (),
    own: Sequence[Path] = (),
    seed: int = 0,
    workers: int = 8,
    processes: int = 1,
    report: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Collect, then write `examples.npz`, `examples-heldout.npz` and `manifest.json` into `folder`; what the
    manifest says. Without a `registry` there are no edits of npm packages. Edits that lie in further folders
    of `collected` are taken along."""
    began = time.monotonic()
    found = folder / "collected"
    counts = {
        "python": dict(
            collect_named(
                index,
                names,
                found / "python",
                releases=amounts.releases,
                until=until,
                workers=workers,
                processes=processes,
                report=lambda _, done, of: report("python", done, of),
            )
        )
    }
    if registry is not None:
        counts["npm"] = dict(
            collect_packages(
                registry,
                packages,
                found / "npm",
                versions=amounts.releases,
                until=until,
                workers=workers,
                processes=processes,
                report=lambda _, done, of: report("npm", done, of),
            )
        )
    collecting = time.monotonic() - began
    made = make_examples(
        model,
        sorted(place for place in found.iterdir() if place.is_dir()),
        own,
        folder / "examples.npz",
        without=without,
        tokens=amounts.tokens,
        heldout=amounts.heldout,
        seed=seed,
        processes=processes,
        report=report,
    )
    said = {
        "until": until.date().isoformat(),
        "seed": seed,
        "learned": LEARNED,
        "collected": counts,
        **made,
        "sha256": hashlib.sha256((folder / "examples.npz").read_bytes()).hexdigest(),
        "seconds": {"collecting": round(collecting), "all": round(time.monotonic() - began)},
    }
    (folder / "manifest.json").write_text(json.dumps(said, indent=1) + "\n")
    return said
