"""Builds the set of release tasks: new tests that fail on the old release's source and pass on the new one's.

Regime: for each package its newest consecutive pairs of small, pure-Python releases whose source archives
hold tests. Of each pair the new tests are run in the sandbox, without a network, on the old source and on the
new one, each twice: a test counts as failing if it failed both times on the old source and passed both times
on the new one. Pairs that change much or only a version number are left out. Ceiling: every task of the set
can be solved, since the new release solves it.

    python -P bench/release_tasks.py --packages bench/data/release_packages.txt --want 60

Needs the package index that pip is configured for; a stopped run resumes. The result names packages, versions
and tests and contains none of their code. Prints a table and one JSON line last.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import itertools
import json
import re
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from keystroke.agent.evaluation.releases import (
    ENVIRONMENT,
    PYTEST,
    ReleaseTask,
    is_test,
    support_files,
    unpack_archive,
    write_tree,
)
from keystroke.agent.sandbox import CommandLimits, Sandbox, SandboxPolicy, find_sandbox
from keystroke.errors import KeystrokeError
from keystroke_lab.corpus.package_index import PackageIndex, Release

OUT = Path(__file__).parents[1] / "src" / "keystroke" / "agent" / "evaluation" / "releases.json"
PAIRS = 14  # of one package that are looked at, newest first
TASKS = 3  # of one package that are kept, so that none dominates
LINES = 80  # of source that a pair may change
FILES = 4
FAILING = 30
_ASIDE = ("docs/", "doc/", "setup.py", "examples/", "example/", "bench", "tools/", "scripts/")
_COMPILED = (".c", ".pyx", ".cpp", ".rs", ".go", ".pxd")
_VERSION = re.compile(r"^\s*(?:__version__|version|VERSION|__version_info__|release)\b", re.IGNORECASE)

_last_words = ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, required=True, help="names, one a line")
    parser.add_argument("--want", type=int, default=60, help="stop at so many tasks")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seen", type=Path, default=Path(".work/release_tasks.seen"), help="packages done")
    parser.add_argument(
        "--verify", action="store_true", help="run the tasks there are once more and keep what holds"
    )
    options = parser.parse_args()
    index, sandbox = PackageIndex(), find_sandbox()
    if not sandbox.confines:
        sys.exit("no sandbox holds on this machine; releases of strangers are not run without one")
    tasks = (
        msgspec.json.decode(options.out.read_bytes(), type=list[ReleaseTask]) if options.out.exists() else []
    )
    if options.verify:
        _write(options.out, verify(tasks, index, sandbox))
        return
    options.seen.parent.mkdir(parents=True, exist_ok=True)
    seen = set(options.seen.read_text().split()) if options.seen.exists() else set()
    began, looked = time.time(), 0
    for name in options.packages.read_text().split():
        if name in seen or len(tasks) >= options.want:
            continue
        try:
            found = tasks_of(name, index, sandbox)
        except KeystrokeError as error:
            print(f"{name}: {error}", flush=True)
            found = []
        looked += 1
        tasks += found
        _write(options.out, tasks)
        with options.seen.open("a") as file:
            file.write(f"{name}\n")
        print(f"{name}: {len(found)} tasks, {len(tasks)} in all", flush=True)
    print(f"\n{'package':24} {'old':>10} {'new':>10} {'failing':>8} {'lines':>6}")
    for task in tasks:
        print(f"{task.package:24} {task.old:>10} {task.new:>10} {len(task.failing):>8} {task.lines:>6}")
    summary = {"release_tasks": len(tasks), "packages": len({t.package for t in tasks})}
    print(json.dumps({**summary, "looked_at": looked, "seconds": round(time.time() - began)}))


def _write(path: Path, tasks: list[ReleaseTask]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(tasks), indent=1) + b"\n")


def tasks_of(name: str, index: PackageIndex, sandbox: Sandbox) -> list[ReleaseTask]:
    project = index.project(name)
    if project is None:
        return []
    releases = [r for r in project.releases if r.download.sdist and r.download.size < 2 << 20]
    trees: dict[str, dict[str, bytes]] = {}

    def tree(release: Release) -> dict[str, bytes]:
        if release.version not in trees:
            trees[release.version] = unpack_archive(index.fetch(release.download))
        return trees[release.version]

    found: list[ReleaseTask] = []
    bare = 0  # archives without tests
    pairs = list(itertools.pairwise(releases))[::-1][:PAIRS]
    for old, new in pairs:
        try:
            task = task_of(name, old, new, tree(old), tree(new), sandbox)
        except KeystrokeError as error:
            print(f"  {name} {old.version} to {new.version}: {error}", flush=True)
            continue
        if isinstance(task, str):
            print(f"  {name} {old.version} to {new.version}: {task}", flush=True)
            bare += task == "no tests"
            if bare == 3:
                break
            continue
        found.append(task)
        if len(found) == TASKS:
            break
    return found


def task_of(
    name: str,
    old: Release,
    new: Release,
    before: dict[str, bytes],
    after: dict[str, bytes],
    sandbox: Sandbox,
) -> ReleaseTask | str:
    """A task, or why the pair makes none."""
    if any(path.endswith(_COMPILED) for path in after):
        return "compiled code"
    tests = [path for path in support_files(after) if path.endswith(".py")]
    if not tests:
        return "no tests"
    fresh = [path for path in tests if before.get(path) != after[path] and _holds_tests(path)]
    if not fresh:
        return "no test changed"
    changed, lines = _changed(before, after)
    if not changed:
        return "only the version changed"
    if len(changed) > FILES or lines > LINES:
        return f"{len(changed)} files and {lines} lines changed"
    merged = before | {path: after[path] for path in support_files(after)}
    new_results = _results(after, fresh, sandbox)
    if not new_results or all(result != "passed" for result in new_results.values()):
        return f"the new release's tests do not run here: {_last_words}"
    old_results = _results(merged, fresh, sandbox)
    failing = [
        t for t, r in new_results.items() if r == "passed" and old_results.get(t, "failed") == "failed"
    ]
    passing = [t for t, r in new_results.items() if r == "passed" and old_results.get(t) == "passed"]
    if not failing or len(failing) > FAILING:
        return f"{len(failing)} tests tell the releases apart"
    if not passing:
        return "the old source does not run here at all"
    # Once more, both: a test that fails by chance makes no task.
    again_new, again_old = _results(after, fresh, sandbox), _results(merged, fresh, sandbox)
    failing = [t for t in failing if again_new.get(t) == "passed" and again_old.get(t, "failed") == "failed"]
    passing = [t for t in passing if again_new.get(t) == "passed" and again_old.get(t) == "passed"]
    if not failing:
        return "the tests fail by chance"
    return ReleaseTask(
        package=name,
        old=old.version,
        new=new.version,
        old_sha256=old.download.sha256,
        new_sha256=new.download.sha256,
        tests=tuple(fresh),
        failing=tuple(failing),
        passing=tuple(passing[:200]),
        changed=tuple(changed),
        lines=lines,
        needs=_needs(after, fresh),
    )


def _holds_tests(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name.startswith("test_") or name.endswith("_test.py") or name in ("tests.py", "test.py")


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> tuple[list[str], int]:
    """Source files that differ in more than a version number, and by how many lines."""
    names, count = [], 0
    for path in sorted({*before, *after}):
        if not path.endswith(".py") or is_test(path) or path.startswith(_ASIDE):
            continue
        old, new = before.get(path, b""), after.get(path, b"")
        if old == new:
            continue
        diff = difflib.unified_diff(
            old.decode("utf-8", "replace").splitlines(), new.decode("utf-8", "replace").splitlines(), n=0
        )
        lines = [line for line in list(diff)[2:] if line[:1] in "+-" and not _VERSION.match(line[1:])]
        if any(line[1:].strip() for line in lines):
            names.append(path)
            count += len(lines)
    return names, count


def _needs(tree: dict[str, bytes], tests: Sequence[str]) -> tuple[str, ...]:
    """Modules from elsewhere that the tests and what they test import at their top. All are here, for the
    tests ran here; those behind a `try` can be done without."""
    own = {part for path in tree for part in path.removesuffix(".py").split("/")}
    found: set[str] = set()
    for path, content in tree.items():
        if path in tests or (path.endswith(".py") and not is_test(path) and not path.startswith(_ASIDE)):
            try:
                body = ast.parse(content).body
            except (SyntaxError, ValueError):
                continue
            found |= {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
            found |= {n.module or "" for n in body if isinstance(n, ast.ImportFrom) and not n.level}
    names = {name.partition(".")[0] for name in found} - own - set(sys.stdlib_module_names)
    return tuple(sorted(name for name in names - {"", "pytest", "setuptools"} if find_spec(name) is not None))


def _results(tree: dict[str, bytes], tests: list[str], sandbox: Sandbox) -> dict[str, str]:
    """What pytest says of each test: passed, failed or skipped, by its name."""
    with tempfile.TemporaryDirectory(prefix="keystroke-release-") as folder:
        root = Path(folder) / "tree"
        write_tree(root, tree)
        report = root / "keystroke-report.xml"
        argv = [sys.executable, *PYTEST, f"--junitxml={report}", "-o", "junit_family=xunit1", *tests]
        limits = CommandLimits(seconds=120, memory=2 << 30)
        ended = sandbox.run(argv, SandboxPolicy(root), limits, env={**ENVIRONMENT, "PYTHONPATH": "src:."})
        global _last_words
        _last_words = " | ".join(ended.output.strip().splitlines()[-3:])[-160:]
        if not report.exists():
            return {}
        results: dict[str, str] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            file, kind, label = case.get("file"), case.get("classname") or "", case.get("name") or ""
            if not file or not label:
                continue
            module = file.removesuffix(".py").replace("/", ".")
            inner = kind.removeprefix(module).strip(".") if kind.startswith(module) else ""
            test = "::".join([file, *(inner.split(".") if inner else []), label])
            state = {child.tag for child in case}
            results[test] = (
                "failed" if state & {"failure", "error"} else "skipped" if "skipped" in state else "passed"
            )
        return results


def verify(tasks: list[ReleaseTask], index: PackageIndex, sandbox: Sandbox) -> list[ReleaseTask]:
    """Run every task there is once more: its tests must fail on the old source and pass on the new one, and
    those that hold on both must. Returns the tasks that held."""
    held = []
    for task in tasks:
        project = index.project(task.package)
        releases = {r.version: r for r in project.releases} if project else {}
        if task.old not in releases or task.new not in releases:
            print(f"{task.id}: the index does not have it any more", flush=True)
            continue
        after = unpack_archive(index.fetch(releases[task.new].download))
        before = unpack_archive(index.fetch(releases[task.old].download))
        merged = before | {path: after[path] for path in support_files(after)}
        new, old = _results(after, list(task.tests), sandbox), _results(merged, list(task.tests), sandbox)
        good = all(new.get(t) == "passed" and old.get(t, "failed") == "failed" for t in task.failing)
        good = good and all(new.get(t) == old.get(t) == "passed" for t in task.passing)
        print(f"{task.id}: {'holds' if good else 'does not hold'}", flush=True)
        if good:
            held.append(msgspec.structs.replace(task, needs=_needs(after, task.tests)))
    print(json.dumps({"release_tasks": len(tasks), "verified": len(held)}))
    return held


if __name__ == "__main__":
    main()
