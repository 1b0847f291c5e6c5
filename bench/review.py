"""Precision and recall of `keystroke review`: findings that are defects, and defects that are found.

Regime: 60 labelled diffs (30 introduce a defect, 16 are correct changes, 14 are refactorings), or with
`--held` 31 others on which nothing was tuned (17 introduce a defect, 4 fix one, 4 are intended changes,
6 are refactorings), each reviewed alone, with a model or without. A finding counts as right if
its diff introduces a defect and it points at changed lines; every finding in a harmless diff is a
false alarm. Ceiling: precision 1, every defect. Each answer of the model is kept (`--record`), so a stopped
run resumes; diffs that were not reviewed are not counted, and the number of reviewed ones is printed.

    python -m bench.review --model coder --record answers.jsonl --seconds 240
    python -m bench.review --model none      # checks, rules and examples alone
    python -m bench.review --model none --held
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.edits import Recorder
from bench.record import record
from bench.review_cases import LabelledDiff, read_diffs, read_held
from keystroke.assist.edit import ModelWriter, Writer
from keystroke.assist.review import ReviewFinding, review
from keystroke.config import load_settings
from keystroke.engine.generation import GenerationParams
from keystroke.engine.load import load_model

MOST_TOKENS = 240


def reviewed(diff: LabelledDiff, writer: Writer | None, *, remark: bool) -> list[ReviewFinding]:
    """The findings of one diff, in a folder that holds nothing but its file."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / diff.path).parent.mkdir(parents=True, exist_ok=True)
        (root / diff.path).write_text(diff.after, "utf-8")
        items = list(review([diff.changed()], root, writer, remark=remark))
    return [item for item in items if isinstance(item, ReviewFinding)]


def is_right(diff: LabelledDiff, finding: ReviewFinding) -> bool:
    """Whether a finding points at the defect that the diff brings in."""
    return diff.defect and finding.line in diff.changed().lines


def ran(
    diffs: Sequence[LabelledDiff], writer: Writer | None, given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Each diff that could be reviewed, as long as there is time."""
    deadline = time.monotonic() + given.seconds
    for number, diff in enumerate(diffs, 1):
        if time.monotonic() > deadline:
            return
        began = time.perf_counter()
        try:
            found = reviewed(diff, writer, remark=not given.no_remarks)
        except LookupError:  # without a model only recorded answers are read
            continue
        took = time.perf_counter() - began
        print(f"{number}/{len(diffs)} {diff.id} ({diff.kind}): {len(found)} in {took:.1f} s", file=sys.stderr)
        yield {
            "diff": diff.id,
            "kind": diff.kind,
            "defect": diff.defect,
            "seconds": round(took, 2),
            "findings": [
                {"source": f.source, "line": f.line, "message": f.message, "right": is_right(diff, f)}
                for f in found
            ],
        }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    findings = [finding for row in rows for finding in row["findings"]]
    good = [finding for finding in findings if finding["right"]]
    defects = [row for row in rows if row["defect"]]
    quiet = [row for row in rows if not row["defect"]]
    return {
        "diffs": len(rows),
        "findings": len(findings),
        "precision": round(len(good) / len(findings), 4) if findings else None,
        "defects": len(defects),
        "defects_found": sum(any(f["right"] for f in row["findings"]) for row in defects),
        "harmless": len(quiet),
        "harmless_alarmed": sum(bool(row["findings"]) for row in quiet),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="coder", help="a model by name or path; none: no model reviews")
    parser.add_argument("--record", type=Path, help="answers are kept here and not asked for again")
    parser.add_argument("--replay", action="store_true", help="only answers that are recorded, no model")
    parser.add_argument("--no-remarks", action="store_true", help="the model only judges examples")
    parser.add_argument("--seconds", type=float, default=240.0, help="no diff is begun after this")
    parser.add_argument("--held", action="store_true", help="the second set, on which nothing was tuned")
    parser.add_argument("--case", action="append", default=[], help="only diffs whose name holds this")
    parser.add_argument("--save", type=Path, help="every diff with its findings, one JSON line each")
    given = parser.parse_args()
    # Defects and harmless diffs in turn: a run that is cut has seen both.
    diffs = sorted(read_held() if given.held else read_diffs(), key=lambda diff: (_rank(diff), diff.kind))
    diffs = [diff for diff in diffs if not given.case or any(part in diff.id for part in given.case)]
    rows = measured(given, diffs)
    for row in rows:
        for finding in row["findings"]:
            mark = "right" if finding["right"] else "WRONG"
            print(f"{mark} {row['diff']}:{finding['line']} {finding['source']}: {finding['message']}")
    if given.save:
        given.save.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    whole = summary(rows)
    sources = sorted({f["source"] for row in rows for f in row["findings"]})
    print(f"{'':10}" + "".join(f"{key:>18}" for key in whole))
    for name in ("all", *sources):
        part = [
            {**row, "findings": [f for f in row["findings"] if name in ("all", f["source"])]} for row in rows
        ]
        print(f"{name:10}" + "".join(f"{value!s:>18}" for value in summary(part).values()))
    record(
        "review",
        {
            "bench": "review",
            "set": "held" if given.held else "first",
            "model": given.model,
            "remarks": not given.no_remarks,
            "of": len(diffs),
            **whole,
        },
    )
    return 0 if rows else 1


def _as_far_as_it_went(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them, or those before Ctrl-C."""
    done: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):
        done.extend(rows)
    return done


def _rank(diff: LabelledDiff) -> int:
    return hashlib.sha256(diff.id.encode()).digest()[0]


def measured(given: argparse.Namespace, diffs: Sequence[LabelledDiff]) -> list[dict[str, Any]]:
    if given.model == "none" and not given.replay:
        return _as_far_as_it_went(ran(diffs, None, given))
    if given.replay:
        return _as_far_as_it_went(ran(diffs, Recorder(None, given.record), given))
    path = Path(given.model)
    model = load_model(path if path.exists() else given.model, load_settings({"engine.context": 8192}))
    try:
        writer = ModelWriter(model, GenerationParams(max_tokens=MOST_TOKENS))
        return _as_far_as_it_went(ran(diffs, Recorder(writer, given.record), given))
    finally:
        model.engine.close()


if __name__ == "__main__":
    sys.exit(main())
