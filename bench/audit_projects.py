"""Applies the safe fixes of the audit to projects drawn at random and runs the projects' own tests.

  universe   every name of the Python package index that pip is configured for, and the packages of npm that
             `npm-high-impact` lists. `--draw SEED` shuffles both and takes the first projects whose newest
             release has a test suite, 300 to 50,000 lines and at most 3 MB; data/audit_projects.json pins the
             name and version of each. A later draw uses another seed and packages never looked at.
  release    `--release SEED`, with a seed nobody used: draws 20 packages that no reader judged, pins them, and
             measures them at once; alarms and diffs for readers are written to `--out`. Started again with the
             same seed it measures the same packages.
  alarms     findings per 1,000 lines of the projects without their tests.
  fixes      every safe fix is applied alone, and all of a project together. A fix is wrong if a test that passed
             before fails with it, passes without it and fails with it again. Tests run in the sandbox without a
             network; the project is installed before, outside (project_tests.py). A project whose tests do not
             run here, or whose compiled code is the same with the fix, counts as read only.
  tested     `--tested SEED --count N` shuffles the names of data/audit_tested.txt, or of the files that `--names`
             gives, one file after the other (NAME==VERSION pins a version, npm:NAME is of npm), and takes the
             first N that have tests and at least one safe fix and whose tests run here, three at once; names with
             safe fixes come from audit_scan.py. `fixes_exercised` are those whose line the tests run. After 6
             minutes no further fix is tried alone.
  ceiling    a fix that no test covers is not shown to be right by this; readers judge the listed diffs and 50
             alarms drawn by the seed. results/judged/audit.json holds their verdicts for every draw; they count
             for the revision that was read, which is the one before the causes of that draw were ended.

Last line: JSON. `python -m bench.audit_projects [--draw SEED --count N] [--seed N] [--minutes M]
[--out FILE]` or `--release SEED` or `--tested SEED [--names FILE...] [--count N]`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

from bench.project_archives import (
    CACHE,
    JUDGED,
    ProjectPin,
    draw,
    fetch_project,
    find_candidate,
    judged_names,
    read_pins,
    sources,
    write_pins,
)
from bench.project_tests import TEST_SECONDS, ProjectTests, interpreters, is_compiled, slowdown
from bench.record import record
from keystroke.agent.sandbox import Sandbox, find_sandbox
from keystroke.analysis.audit import Auditor, Finding
from keystroke.analysis.audit.project import ProjectFacts
from keystroke.analysis.audit.report import AuditedFile, apply_fixes, diff
from keystroke.errors import KeystrokeError
from keystroke.text import apply_edits

TESTED = Path(__file__).resolve().parent / "data" / "audit_tested.txt"
PROVED_AT_ONCE = 3
PROJECT_SECONDS = 360  # of a free core, for the installation and all runs of one project


@dataclass
class ProjectOutcome:
    pin: ProjectPin
    lines: int = 0
    alarms: list[dict[str, Any]] = field(default_factory=list)
    safe: int = 0
    tested: bool = False  # the tests ran and passed before
    why: str = ""  # the tests did not run
    exercised: int = 0  # safe fixes in lines that the tests run
    alone: int = 0  # safe fixes after which the tests ran with this fix alone
    wrong: list[str] = field(default_factory=list)  # fixes after which a test fails
    diffs: list[str] = field(default_factory=list)


# Fixes


def audit_project(pin: ProjectPin, root: Path) -> tuple[ProjectOutcome, list[AuditedFile]]:
    outcome = ProjectOutcome(pin)
    facts = ProjectFacts(root)
    files: list[AuditedFile] = []
    for source in sources(root):
        name = source.path.relative_to(root).as_posix()
        outcome.lines += source.text.count("\n")
        try:
            findings = Auditor(source.language, project=facts).audit(source.text)
        except KeystrokeError:
            continue
        file = AuditedFile(name, source.text, findings)
        files.append(file)
        for item in findings:
            outcome.alarms.append(
                {
                    "project": f"{pin.registry}:{pin.name}=={pin.version}",
                    "path": name,
                    "line": file.line_and_column(item.start)[0],
                    "rule": item.rule,
                    "severity": item.severity.value,
                    "grade": item.grade.value,
                    "text": source.text[item.start : item.end][:160],
                }
            )
        outcome.safe += sum(bool(item.fixes) for item in findings)
        outcome.diffs += [
            f"{name}:{file.line_and_column(item.start)[0]} {item.rule}\n"
            + diff(name, source.text, apply_edits(source.text, item.fixes[0].edits))
            for item in findings
            if item.fixes
        ]
    return outcome, files


def prove(outcome: ProjectOutcome, root: Path, files: list[AuditedFile], sandbox: Sandbox) -> None:
    """Runs the tests before the fixes, after all together and, while there is time, after each one alone."""
    until = time.monotonic() + PROJECT_SECONDS * slowdown()
    fixed = [(file, item) for file in files for item in file.findings if item.fixes]
    measured = sorted({file.path for file, _ in fixed})
    before: set[str] = set()
    pythons = interpreters(root) if outcome.pin.registry == "pypi" else []
    for interpreter in pythons or [sys.executable]:
        tests = ProjectTests(outcome.pin, root, sandbox, interpreter)
        if not tests.exist():
            outcome.why = "it has no tests"
            return
        tests.remove()
        if not tests.install():
            outcome.why = f"it cannot be installed: {tests.problem}"
            continue
        outcome.why = "none of its tests passes"
        # What runs before has half of the time that the same tests have after, so none is out of time only
        # then.
        for _ in range(6):
            before = tests.passed(measured, TEST_SECONDS // 2)
            if not tests.install_missing():
                break
        if before:
            break
    if not before:
        return
    outcome.why = ""
    run = tests.lines_run()
    exercised = [
        not run.get(file.path, set()).isdisjoint(
            range(file.line_and_column(item.start)[0], file.line_and_column(item.end)[0] + 1)
        )
        for file, item in fixed
    ]
    together = {file.path: apply_fixes(file)[0] for file in files if apply_fixes(file)[1]}
    digest = tests.build() if any(map(is_compiled, together)) else ""
    outcome.tested = check_texts(outcome, tests, together, before, digest, "all together")
    if not outcome.tested:
        return
    outcome.exercised = sum(exercised)
    if len(fixed) == 1:
        outcome.alone = 1
        return
    for file, item in fixed:
        if time.monotonic() > until:
            break
        outcome.alone += check_texts(
            outcome, tests, {file.path: _fixed(file, item)}, before, digest, item.rule
        )


def _fixed(file: AuditedFile, finding: Finding) -> str:
    return apply_edits(file.text, finding.fixes[0].edits)


@contextlib.contextmanager
def _changed(root: Path, texts: dict[str, str]) -> Iterator[None]:
    """Files with other texts for a while."""
    original = {path: (root / path).read_bytes() for path in texts}
    try:
        for path, text in texts.items():
            (root / path).write_bytes(text.encode("utf-8", "surrogateescape"))
        yield
    finally:
        for path, data in original.items():
            (root / path).write_bytes(data)


def check_texts(
    outcome: ProjectOutcome,
    tests: ProjectTests,
    texts: dict[str, str],
    before: set[str],
    digest: str,
    what: str,
) -> bool:
    """Whether the tests ran with these texts. A test that fails with them, passes without and fails with them
    again is noted; `digest` is that of the compiled code without them."""
    compiled = any(map(is_compiled, texts))

    def failures(among: set[str]) -> tuple[set[str], str]:
        with _changed(tests.root, texts):
            built = tests.build() if compiled else "not compiled"
            return (among - tests.passed() if built not in ("", digest) else among), built

    if compiled and not digest:
        outcome.why = "it cannot be built again"
        return False
    failed, built = failures(before)
    if compiled and tests.build() != digest:
        outcome.why = "it cannot be built again"
        return False
    if built == digest:
        outcome.why = "its compiled code does not change with the fix"
        return False
    if failed and (failed := failed & tests.passed()) and built:
        failed, _ = failures(failed)
        if compiled:
            tests.build()
    if failed:
        said = ", ".join(sorted(failed)[:3]) if built else "it does not build"
        outcome.wrong.append(f"{what}: {', '.join(texts)}: {said}")
    return True


def prove_tested(seed: int, lists: list[list[str]], count: int, minutes: float) -> dict[str, Any]:
    """Proves the safe fixes of `count` of the named packages by their own tests.

    What is done is kept in the cache, so that a run that has no more time is continued by the next one.
    """
    state = CACHE.parent / f"tested-{seed}.json"
    done: dict[str, dict[str, Any]] = json.loads(state.read_text()) if state.is_file() else {}
    known = {pin.name for pin in read_pins()} | {name for _, name in judged_names()}
    left: list[str] = []
    for names in lists:
        names = sorted(set(names))
        random.Random(seed).shuffle(names)
        left += [name for name in names if name not in done and name not in known]
    until = time.monotonic() + minutes * 60
    sandbox = find_sandbox()
    proving, writing = Semaphore(PROVED_AT_ONCE), Lock()

    def prove_name(name: str) -> None:
        if sum(entry["tested"] for entry in done.values()) >= count or time.monotonic() > until:
            return
        outcome = _prove_package(name, seed, sandbox, proving)
        with writing:
            done[name] = asdict(outcome) | {"alarms": []}
            if outcome.safe or len(done) % 50 == 0:
                state.write_text(json.dumps(done))

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(prove_name, left):
            pass
    state.write_text(json.dumps(done))
    return _proved(done)


def _prove_package(name: str, seed: int, sandbox: Sandbox, proving: Semaphore) -> ProjectOutcome:
    registry = "npm" if name.startswith("npm:") else "pypi"
    name, _, version = name.removeprefix("npm:").partition("==")
    pin = find_candidate(registry, name, seed, version)
    root = fetch_project(pin) if pin is not None else None
    if pin is None or root is None:
        return ProjectOutcome(ProjectPin(registry, name, version, seed))
    outcome, files = audit_project(pin, root)
    if outcome.safe:
        with proving:
            prove(outcome, root, files, sandbox)
            ProjectTests(pin, root, sandbox).remove()
        said = f"{outcome.exercised} exercised" if outcome.tested else outcome.why
        print(f"{pin.name}=={pin.version}: {outcome.safe} safe fixes, {said}", *outcome.wrong, flush=True)
    else:
        shutil.rmtree(CACHE / registry / f"{pin.name.replace('/', '+')}-{pin.version}", ignore_errors=True)
    return outcome


def _proved(done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    tested = [entry for entry in done.values() if entry["tested"]]
    return {
        "packages": [_pinned(entry) for entry in tested],
        "looked_at": len(done),
        "with_tests": sum(bool(entry["lines"]) for entry in done.values()),
        "with_safe_fixes": sum(bool(entry["safe"]) for entry in done.values()),
        "projects_tested": len(tested),
        "fixes_tested": sum(entry["safe"] for entry in tested),
        "fixes_tested_alone": sum(entry["alone"] for entry in tested),
        "fixes_exercised": sum(entry["exercised"] for entry in tested),
        "fixes_wrong": sum(len(entry["wrong"]) for entry in tested),
        "not_counted": [
            f"{_pinned(entry)}: {entry['why']}"
            for entry in done.values()
            if entry["safe"] and not entry["tested"]
        ],
    }


def _pinned(entry: dict[str, Any]) -> str:
    before = "npm:" if entry["pin"]["registry"] == "npm" else ""
    return f"{before}{entry['pin']['name']}=={entry['pin']['version']}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", type=int, metavar="SEED", help="draw projects and pin them")
    parser.add_argument("--release", type=int, metavar="SEED", help="draw, pin and measure unread projects")
    parser.add_argument("--count", type=int, help="projects to draw: 60, for a release 20")
    parser.add_argument("--seed", type=int, help="only the projects of this draw")
    parser.add_argument("--minutes", type=float, default=40, help="stop testing further projects after this")
    parser.add_argument("--out", type=Path, help="write the alarms and diffs for readers here")
    parser.add_argument(
        "--tested", type=int, metavar="SEED", help="prove fixes by the tests of known packages"
    )
    parser.add_argument(
        "--names", type=Path, nargs="+", default=[TESTED], help="the names that --tested draws from, in turn"
    )
    given = parser.parse_args(arguments)
    if given.release is not None:
        pins = [pin for pin in read_pins() if pin.seed == given.release]
        if not pins:
            pins = draw(given.release, given.count or 20)
            write_pins(read_pins() + pins)
        readable = given.out or CACHE.parent / f"release-{given.release}.json"
        found = measure(pins, given.minutes, readable)
        print(f"for readers: {readable}")
        print(json.dumps({"seed": given.release} | found))  # no result of its own before it is read
        return
    count = given.count or 60
    if given.tested is not None:
        lists = [file.read_text(encoding="utf-8").split() for file in given.names]
        record("audit-tested", prove_tested(given.tested, lists, count, given.minutes))
        return
    if given.draw is not None:
        pins = read_pins() + draw(given.draw, count)
        write_pins(pins)
        print(f"{len(pins)} projects are pinned")
        return
    pins = [pin for pin in read_pins() if given.seed in (None, pin.seed)]
    record("audit-projects", measure(pins, given.minutes, given.out) | judged(given.seed))


def judged(seed: int | None) -> dict[str, Any]:
    """What readers said of the alarms and safe fixes of a draw, or of all draws."""
    if not JUDGED.is_file():
        return {}
    draws = json.loads(JUDGED.read_text(encoding="utf-8"))["draws"]
    known = [draw for draw in draws if seed in (None, draw["seed"])]
    alarms = [item["verdict"] for draw in known for item in draw["alarms"]]
    fixes = [item["verdict"] for draw in known for item in draw["fixes"]]
    if not alarms:
        return {}
    both = [
        (item["verdict"], item["second"]) for draw in known for item in draw["alarms"] if "second" in item
    ]
    out = _shares(alarms) | {"fixes_judged": len(fixes), "fixes_judged_wrong": fixes.count("wrong")}
    if both:
        agreed = sum((one == "false") == (other == "false") for one, other in both)
        out["second_reader"] = _shares([other for _, other in both]) | {
            "agreed_share": round(agreed / len(both), 3),
            "same_verdict_share": round(sum(one == other for one, other in both) / len(both), 3),
        }
    return out


def _shares(verdicts: list[str]) -> dict[str, Any]:
    true, arguable = verdicts.count("true"), verdicts.count("arguable")
    return {
        "judged": len(verdicts),
        "true_share": round(true / len(verdicts), 3),
        "true_or_arguable_share": round((true + arguable) / len(verdicts), 3),
    }


def measure(pins: list[ProjectPin], minutes: float, readable: Path | None = None) -> dict[str, Any]:
    """Audits the projects; tests them until `minutes` have passed; writes what readers judge to `readable`."""
    sandbox = find_sandbox()
    until = time.monotonic() + minutes * 60
    done: list[ProjectOutcome] = []
    for pin in pins:
        root = fetch_project(pin)
        if root is None:
            continue
        outcome, files = audit_project(pin, root)
        if outcome.safe and time.monotonic() < until:
            prove(outcome, root, files, sandbox)
        done.append(outcome)
        rate = 1000 * len(outcome.alarms) / max(outcome.lines, 1)
        state = "tested" if outcome.tested else "read" if outcome.safe else "-"
        print(
            f"{pin.registry:5} {pin.name:40} {outcome.lines:7} lines {rate:6.2f} {outcome.safe:3} safe {state}"
        )
        for line in outcome.wrong:
            print(f"      WRONG {line}")
    if readable is not None:
        readable.write_text(
            json.dumps(
                {"alarms": [a for o in done for a in o.alarms], "diffs": [d for o in done for d in o.diffs]}
            ),
            encoding="utf-8",
        )
    lines = sum(outcome.lines for outcome in done)
    alarms = sum(len(outcome.alarms) for outcome in done)
    return {
        "projects": len(done),
        "lines": lines,
        "alarms_per_kloc": round(1000 * alarms / max(lines, 1), 3),
        "fixes_safe": sum(outcome.safe for outcome in done),
        "safe_share": round(sum(outcome.safe for outcome in done) / max(alarms, 1), 3),
        "projects_tested": sum(outcome.tested for outcome in done),
        "fixes_tested": sum(outcome.safe for outcome in done if outcome.tested),
        "fixes_wrong": sum(len(outcome.wrong) for outcome in done),
    }


if __name__ == "__main__":
    main()
