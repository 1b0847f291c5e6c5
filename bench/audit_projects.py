"""Applies the safe fixes of the audit to projects drawn at random and runs the projects' own tests.

  universe   every name of the Python package index that pip is configured for, and the packages of npm that
             `npm-high-impact` lists. `--draw SEED` shuffles both and takes the first projects whose newest
             release has a test suite, 300 to 50,000 lines and at most 3 MB; data/audit_projects.json pins the
             name and version of each. A later draw uses another seed and packages never looked at.
  release    `--release SEED`, with a seed nobody used: draws 20 packages that no reader judged, pins them, and
             measures them at once; alarms and diffs for readers are written to `--out`. Started again with the
             same seed it measures the same packages.
  alarms     findings per 1,000 lines of the projects without their tests.
  fixes      every safe fix is applied alone, and all of a project together. The tests that passed before must
             pass after. They run in the sandbox without a network; the project is installed before, outside.
             A project whose tests do not run here counts as read only: its fixes are listed for a reader.
  tested     `--tested SEED --count N` shuffles the names of data/audit_tested.txt, or of the file that `--names`
             gives, and takes the first N that have tests and at least one safe fix and whose tests run here;
             `fixes_exercised` are those whose line the tests run. After 6 minutes no further fix is tried alone.
  ceiling    a fix that no test covers is not shown to be right by this; readers judge the listed diffs and 50
             alarms drawn by the seed. results/judged/audit.json holds their verdicts for every draw; they count
             for the revision that was read, which is the one before the causes of that draw were ended.

Last line: JSON. `python -m bench.audit_projects [--draw SEED --count N] [--seed N] [--minutes M]
[--out FILE]` or `--release SEED` or `--tested SEED [--names FILE] [--count N]`
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from xml.etree import ElementTree

import platformdirs

from bench.record import record
from keystroke.agent.sandbox import CommandLimits, Sandbox, SandboxPolicy, find_sandbox
from keystroke.analysis.audit import Auditor, Finding
from keystroke.analysis.audit.files import SourceFile, find_sources
from keystroke.analysis.audit.project import ProjectFacts
from keystroke.analysis.audit.report import AuditedFile, apply_fixes, diff
from keystroke.errors import KeystrokeError
from keystroke.text import apply_edits

PINNED = Path(__file__).resolve().parent / "data" / "audit_projects.json"
JUDGED = Path(__file__).resolve().parent / "results" / "judged" / "audit.json"
CACHE = Path(platformdirs.user_cache_dir("keystroke")) / "bench-audit" / "projects"
MAX_ARCHIVE = 3_000_000  # bytes
MIN_LINES = 300
MAX_LINES = 50_000  # more would decide the rate of all projects together, and is mostly generated
TESTED = Path(__file__).resolve().parent / "data" / "audit_tested.txt"
TEST_SECONDS = 120  # for one run of a project's tests
INSTALL_SECONDS = 300  # for one step of the installation
PROJECT_SECONDS = 360  # for the installation and all runs of one project
TESTS = re.compile(
    r"(?:^|/)(?:tests?|spec|__tests__)/|(?:^|/)(?:test_[^/]*|[^/]*_tests?|tests|conftest)\.py$|\.(?:test|spec)\.[jt]sx?$"
)


@dataclass(frozen=True)
class ProjectPin:
    registry: str  # pypi or npm
    name: str
    version: str
    seed: int


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


def _get(url: str, limit: int = 80_000_000) -> bytes:
    """What is at an address; ValueError if it is longer than `limit`."""
    request = urllib.request.Request(url, headers={"Accept": "text/html, */*"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        data: bytes = answer.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"more than {limit} bytes")
    return data


@cache
def _index() -> str:
    """The Python package index that pip uses."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True
    ).stdout.strip()
    if found:
        return found
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)


@cache
def _registry() -> str:
    found = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True)
    return found.stdout.strip().rstrip("/")


def _python_archive(name: str, version: str = "") -> tuple[str, str] | None:
    """The version and address of a source archive: of this version, or the newest."""
    page = _get(f"{_index().rstrip('/')}/{name}/").decode()
    found: list[tuple[tuple[int, ...], str, str]] = []
    for address, file in re.findall(r'<a href="([^"#]+)[^>]*>([^<]+)</a>', page):
        release = re.fullmatch(r".+?-([0-9]+(?:\.[0-9]+)*)\.tar\.gz", file)
        if release is not None and (not version or release[1] == version):
            found.append((tuple(map(int, release[1].split("."))), release[1], address))
    return max(found)[1:] if found else None


def _script_archive(name: str, version: str = "") -> tuple[str, str] | None:
    page = json.loads(_get(f"{_registry()}/{name}/{version or 'latest'}"))
    return str(page["version"]), str(page["dist"]["tarball"])


def fetch_project(pin: ProjectPin) -> Path | None:
    """The unpacked release, from the cache or the registry; None if it cannot be had."""
    folder = CACHE / pin.registry / f"{pin.name.replace('/', '+')}-{pin.version}"
    if not folder.is_dir():
        with contextlib.suppress(URLError, OSError, ValueError, KeyError, TimeoutError, tarfile.TarError):
            find = _python_archive if pin.registry == "pypi" else _script_archive
            found = find(pin.name, pin.version)
            if found is not None:
                _unpack(_get(found[1], limit=MAX_ARCHIVE), folder)
    inside = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return inside[0] if len(inside) == 1 else folder if inside else None


def _unpack(data: bytes, folder: Path) -> None:
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(part, filter="data")
    part.rename(folder)


def has_tests(root: Path) -> bool:
    """Whether a release has a test suite that can be started, and enough code."""
    names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    if not any(TESTS.search(name) for name in names):
        return False
    if (root / "package.json").is_file() and not any(name.endswith(".py") for name in names):
        try:
            declared = json.loads((root / "package.json").read_text(encoding="utf-8"))
            command = str(declared.get("scripts", {}).get("test", ""))
        except (ValueError, AttributeError):  # no table, or scripts that are none
            return False
        if not re.search(r"mocha|jest|tape|node|ava|vitest|tap", command):
            return False
    return MIN_LINES <= sum(source.text.count("\n") for source in sources(root)) <= MAX_LINES


def sources(root: Path) -> Iterator[SourceFile]:
    """The source files of a release without its tests."""
    for item in find_sources(root):
        if isinstance(item, SourceFile) and not TESTS.search(item.path.relative_to(root).as_posix()):
            yield item


def draw(seed: int, count: int) -> list[ProjectPin]:
    """Projects at random: two thirds from the Python index, one third from npm."""
    pick = random.Random(seed)
    page = _get(f"{_index().rstrip('/')}/").decode()
    python = sorted(set(re.findall(r'<a href="(?:[^"]*/)?([^"/]+)/"', page)))
    _, address = _script_archive("npm-high-impact") or ("", "")
    with tarfile.open(fileobj=io.BytesIO(_get(address))) as archive:
        member = archive.extractfile("package/lib/top.js")
        assert member is not None
        script = sorted(set(re.findall(r"'([^']+)'", member.read().decode())))
    pick.shuffle(python)
    pick.shuffle(script)
    known = {(pin.registry, pin.name) for pin in read_pins()} | _judged_names()
    out: list[ProjectPin] = []
    for registry, names, wanted in (("pypi", python, count - count // 3), ("npm", script, count // 3)):
        found: list[ProjectPin] = []
        with ThreadPoolExecutor(8) as pool:
            for at in range(0, len(names), 32):
                part = [name for name in names[at : at + 32] if (registry, name) not in known]
                for pin in pool.map(lambda name, kind=registry: _candidate(kind, name, seed), part):
                    if pin is not None and len(found) < wanted:
                        found.append(pin)
                if len(found) >= wanted:
                    break
        out += found
    return out


def _judged_names() -> set[tuple[str, str]]:
    """The packages of which a reader has judged an alarm or a fix."""
    draws = json.loads(JUDGED.read_text(encoding="utf-8"))["draws"] if JUDGED.is_file() else []
    items = [item["project"] for draw in draws for item in (*draw["alarms"], *draw["fixes"])]
    return {(registry, name.rpartition("==")[0]) for registry, _, name in (i.partition(":") for i in items)}


def _candidate(registry: str, name: str, seed: int) -> ProjectPin | None:
    """The newest release of a package, if it has tests; an answer that does not come is asked for twice."""
    for last in (False, True):
        try:
            found = (_python_archive if registry == "pypi" else _script_archive)(name)
            break
        except (URLError, OSError, ValueError, KeyError, TimeoutError) as error:
            if last or getattr(error, "code", 0) == 404:
                return None
    if found is None:
        return None
    pin = ProjectPin(registry, name, found[0], seed)
    root = fetch_project(pin)
    try:
        fits = root is not None and has_tests(root)
    except (KeystrokeError, OSError):
        fits = False
    if not fits:
        shutil.rmtree(CACHE / registry / f"{name.replace('/', '+')}-{found[0]}", ignore_errors=True)
    return pin if fits else None


def read_pins(path: Path = PINNED) -> list[ProjectPin]:
    if not path.is_file():
        return []
    return [ProjectPin(**item) for item in json.loads(path.read_text(encoding="utf-8"))]


def _write_pins(pins: list[ProjectPin]) -> None:
    PINNED.write_text(json.dumps([asdict(pin) for pin in pins], indent=1) + "\n", encoding="utf-8")


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
    until = time.monotonic() + PROJECT_SECONDS
    command = _prepare(outcome.pin, root)
    if command is None:
        outcome.why = "it cannot be installed"
        return
    fixed = [(file, item) for file in files for item in file.findings if item.fixes]
    suite = partial(_passed, sandbox, root, command)
    missing: set[str] = set()
    for _ in range(3 if outcome.pin.registry == "pypi" else 0):
        suite(collect=True)
        if not _install_missing(root, missing):
            break
    # What runs before has half of the time that the same tests have after, so none is out of time only then.
    suite_before = partial(suite, sorted({file.path for file, _ in fixed}), TEST_SECONDS // 2)
    before = suite_before()
    if outcome.pin.registry == "pypi" and _install_missing(root, missing):
        before = suite_before()
    outcome.tested = bool(before)
    if not before:
        outcome.why = "none of its tests passes"
        return
    run = _lines_run(root, command)
    outcome.exercised = sum(
        not run.get(file.path, set()).isdisjoint(
            range(file.line_and_column(item.start)[0], file.line_and_column(item.end)[0] + 1)
        )
        for file, item in fixed
    )
    together = {file.path: apply_fixes(file)[0] for file in files if apply_fixes(file)[1]}
    _check(outcome, root, together, before, suite, "all together")
    for file, item in fixed:
        if time.monotonic() > until or not outcome.tested:
            break
        outcome.alone += 1
        _check(outcome, root, {file.path: _fixed(file, item)}, before, suite, item.rule)


def _fixed(file: AuditedFile, finding: Finding) -> str:
    return apply_edits(file.text, finding.fixes[0].edits)


def _check(
    outcome: ProjectOutcome,
    root: Path,
    texts: dict[str, str],
    before: set[str],
    suite: Callable[[], set[str]],
    what: str,
) -> None:
    original = {path: (root / path).read_bytes() for path in texts}
    compiled = outcome.pin.registry == "pypi" and not all(path.endswith(".py") for path in texts)
    build = [*_pip(root / ".audit-venv" / "bin" / "python"), "--no-deps", "-e", str(root)]
    try:
        for path, text in texts.items():
            (root / path).write_bytes(text.encode("utf-8", "surrogateescape"))
        built = not compiled or _quiet(build, root)
        failed = before - suite() if built else before
    finally:
        for path, data in original.items():
            (root / path).write_bytes(data)
        rebuilt = not compiled or _quiet(build, root)
    if not rebuilt:  # what the tests ran was neither of the two
        outcome.tested, outcome.why = False, "it cannot be built again"
        return
    # Tests that also fail without the fix now and then say nothing.
    if failed and (failed := failed & suite()):
        said = ", ".join(sorted(failed)[:3]) if built else "it does not build"
        outcome.wrong.append(f"{what}: {', '.join(texts)}: {said}")


def _prepare(pin: ProjectPin, root: Path) -> list[str] | None:
    """Installs what the tests need, outside the sandbox, and returns the command that runs them."""
    if pin.registry == "pypi":
        place = root / ".audit-venv"
        python = place / "bin" / "python"
        if not (place / "ready").exists():
            shutil.rmtree(place, ignore_errors=True)
            pip = _pip(python)
            steps = [[sys.executable, "-m", "venv", str(place)], [*pip, *_TEST_TOOLS]]
            if not all(_quiet(step, root) for step in steps) or not _install_project(pin, root, python):
                shutil.rmtree(place, ignore_errors=True)
                return None
            for name in _TEST_REQUIREMENTS:
                if (root / name).is_file():
                    _quiet([*pip, "-r", name], root)
            _quiet([*pip, *_grouped_requirements(root)], root)
            (place / "ready").touch()
        return [str(python), "-m", "pytest", *_PYTEST]
    if not (root / "node_modules").is_dir() and not _quiet(
        ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"], root
    ):
        return None
    return ["npm", "test", "--silent"]


def _grouped_requirements(root: Path) -> list[str]:
    """The requirements that pyproject.toml groups for tests and development."""
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    groups = table.get("dependency-groups", {})
    found = [item for name in ("test", "tests", "testing", "dev") for item in groups.get(name, ())]
    return [item for item in found if isinstance(item, str)]


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "install", "-q", "--prefer-binary"]


def _install_project(pin: ProjectPin, root: Path, python: Path) -> bool:
    """Installs the project in place; if that cannot be built, its dependencies and the folders of its code."""
    if _quiet([*_pip(python), "-e", f"{root}[test,tests,testing,dev]"], root):
        return True
    if _quiet([*_pip(python), "-e", str(root)], root):
        return True
    if not _quiet([*_pip(python), "--only-binary", ":all:", f"{pin.name}=={pin.version}"], root):
        return False
    _quiet([str(python), "-m", "pip", "uninstall", "-q", "-y", pin.name], root)
    for place in (python.parents[1] / "lib").glob("python*/site-packages"):
        (place / "audit.pth").write_text(f"{root}\n{root / 'src'}\n", encoding="utf-8")
    return True


_MODULE = re.compile(r"No module named '([A-Za-z_]\w*)")
_FIXTURE = re.compile(r"fixture '(\w+)' not found")
_PLUGINS = dict.fromkeys(("db", "client", "rf", "settings", "django_user_model"), "pytest-django")
_PLUGINS |= {
    "httpx_mock": "pytest-httpx",
    "aiohttp_client": "pytest-aiohttp",
    "requests_mock": "requests-mock",
}
_PLUGINS |= {"httpserver": "pytest-httpserver", "benchmark": "pytest-benchmark", "snapshot": "syrupy"}
_DISTRIBUTIONS = {"yaml": "pyyaml", "dateutil": "python-dateutil", "bs4": "beautifulsoup4", "PIL": "pillow"}
_DISTRIBUTIONS |= {"pkg_resources": "setuptools<81", "sklearn": "scikit-learn", "jwt": "pyjwt"}


def _install_missing(root: Path, tried: set[str]) -> bool:
    """Installs modules and plugins that the last run did not find, modules by their names; False if none.

    Only wheels: a guessed name must not run code of its own while it is installed.
    """
    python = root / ".audit-venv" / "bin" / "python"
    told = ""
    for name in (_REPORT, _OUTPUT):
        with contextlib.suppress(OSError):
            told += (root / name).read_text(encoding="utf-8", errors="replace").replace("&apos;", "'")
    missing = {name for name in _MODULE.findall(told) if not (root / name).exists()}
    wheels = {_DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in missing}
    wheels |= {_PLUGINS[name] for name in _FIXTURE.findall(told) if name in _PLUGINS}
    if "ImproperlyConfigured: Requested setting" in told:
        wheels.add("pytest-django")
    missing = wheels - tried
    tried |= missing
    for wheel in sorted(missing)[:8]:
        _quiet([*_pip(python), "--only-binary", ":all:", wheel], root)
    return bool(missing)


def _quiet(command: list[str], root: Path) -> bool:
    try:
        return subprocess.run(command, cwd=root, capture_output=True, timeout=INSTALL_SECONDS).returncode == 0
    except (subprocess.TimeoutExpired, OSError):
        return False


_REPORT = ".audit-tests.xml"
_OUTPUT = ".audit-tests.txt"  # says what is missing where there is no report
_TEST_TOOLS = ("pytest", "pytest-asyncio", "pytest-mock", "pytest-timeout", "coverage", "setuptools", "wheel")
# A project's own options may name plugins that are not here; one broken module must not hide the others.
_PYTEST = (
    *("-q", "-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors"),
    *("--timeout=30", f"--junitxml={_REPORT}"),
    # They wait for servers that the sandbox does not reach, until no time is left for the others.
    *("--ignore-glob=*/integration/*", "--ignore-glob=*/e2e/*"),
)
_COVERAGE = ".audit-coverage"
_OWN_SETTINGS = "--rcfile=/dev/null"  # the project's may name other folders
_TEST_REQUIREMENTS = (
    *("requirements-test.txt", "requirements-tests.txt", "requirements_test.txt", "test-requirements.txt"),
    *("tests/requirements.txt", "test_requirements.txt", "requirements/test.txt", "requirements/tests.txt"),
)


def _passed(
    sandbox: Sandbox,
    root: Path,
    command: list[str],
    measured: list[str] | None = None,
    seconds: int = TEST_SECONDS,
    collect: bool = False,
) -> set[str]:
    """The tests that pass; `measured`: files whose lines that run are recorded; `collect`: none is run."""
    report = root / _REPORT
    report.unlink(missing_ok=True)
    if "pytest" in command:
        command = [*command, f"--session-timeout={seconds}", *(["--collect-only"] if collect else [])]
    if measured and "pytest" in command:
        traced = ["-m", "coverage", "run", _OWN_SETTINGS, f"--data-file={_COVERAGE}"]
        traced.append(f"--include={','.join(measured)}")
        command = [command[0], *traced, *command[1:]]
    ended = sandbox.run(command, SandboxPolicy(root), CommandLimits(seconds=seconds + 40))
    (root / _OUTPUT).write_text(ended.output, encoding="utf-8", errors="replace")
    if "pytest" not in command:
        return {"npm test"} if ended.code == 0 else set()
    try:
        cases = ElementTree.fromstring(report.read_bytes()).iter("testcase")
    except (OSError, ElementTree.ParseError):
        return set()
    return {f"{case.get('classname')}.{case.get('name')}" for case in cases if not len(case)}


def _lines_run(root: Path, command: list[str]) -> dict[str, set[int]]:
    """The lines that the tests ran, by file."""
    out = root / ".audit-coverage.json"
    report = [command[0], "-m", "coverage", "json", _OWN_SETTINGS, f"--data-file={_COVERAGE}"]
    if not _quiet([*report, "-o", str(out)], root):
        return {}
    files = json.loads(out.read_text(encoding="utf-8"))["files"]
    return {Path(name).as_posix(): set(entry["executed_lines"]) for name, entry in files.items()}


def prove_tested(seed: int, names: list[str], count: int, minutes: float) -> dict[str, Any]:
    """Proves the safe fixes of `count` of the named packages by their own tests.

    What is done is kept in the cache, so that a run that has no more time is continued by the next one.
    """
    state = CACHE.parent / f"tested-{seed}.json"
    done: dict[str, dict[str, Any]] = json.loads(state.read_text()) if state.is_file() else {}
    names = sorted(set(names))
    random.Random(seed).shuffle(names)
    known = {pin.name for pin in read_pins() if pin.registry == "pypi"}
    left = [name for name in names if name not in done and name not in known]
    until = time.monotonic() + minutes * 60
    sandbox = find_sandbox()
    with ThreadPoolExecutor(8) as pool:
        for at in range(0, len(left), 32):
            part = left[at : at + 32]
            for name, pin in zip(
                part, pool.map(lambda name: _candidate("pypi", name, seed), part), strict=True
            ):
                if sum(entry["tested"] for entry in done.values()) >= count or time.monotonic() > until:
                    break
                done[name] = asdict(_prove_package(name, pin, seed, sandbox))
            state.write_text(json.dumps(done))
            if sum(entry["tested"] for entry in done.values()) >= count or time.monotonic() > until:
                break
    return _proved(done)


def _prove_package(name: str, pin: ProjectPin | None, seed: int, sandbox: Sandbox) -> ProjectOutcome:
    root = fetch_project(pin) if pin is not None else None
    if pin is None or root is None:
        return ProjectOutcome(ProjectPin("pypi", name, "", seed))
    outcome, files = audit_project(pin, root)
    if outcome.safe:
        prove(outcome, root, files, sandbox)
        said = f"{outcome.exercised} exercised" if outcome.tested else outcome.why
        print(f"{name}=={pin.version}: {outcome.safe} safe fixes, {said}", *outcome.wrong, flush=True)
        shutil.rmtree(root / ".audit-venv", ignore_errors=True)
    else:
        shutil.rmtree(CACHE / "pypi" / f"{name}-{pin.version}", ignore_errors=True)
    return outcome


def _proved(done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    tested = [entry for entry in done.values() if entry["tested"]]
    return {
        "packages": [f"{entry['pin']['name']}=={entry['pin']['version']}" for entry in tested],
        "looked_at": len(done),
        "with_tests": sum(bool(entry["lines"]) for entry in done.values()),
        "with_safe_fixes": sum(bool(entry["safe"]) for entry in done.values()),
        "projects_tested": len(tested),
        "fixes_tested": sum(entry["safe"] for entry in tested),
        "fixes_tested_alone": sum(entry["alone"] for entry in tested),
        "fixes_exercised": sum(entry["exercised"] for entry in tested),
        "fixes_wrong": sum(len(entry["wrong"]) for entry in tested),
    }


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
    parser.add_argument("--names", type=Path, default=TESTED, help="the names that --tested draws from")
    given = parser.parse_args(arguments)
    if given.release is not None:
        pins = [pin for pin in read_pins() if pin.seed == given.release]
        if not pins:
            pins = draw(given.release, given.count or 20)
            _write_pins(read_pins() + pins)
        readable = given.out or CACHE.parent / f"release-{given.release}.json"
        found = measure(pins, given.minutes, readable)
        print(f"for readers: {readable}")
        print(json.dumps({"seed": given.release} | found))  # no result of its own before it is read
        return
    count = given.count or 60
    if given.tested is not None:
        names = given.names.read_text(encoding="utf-8").split()
        record("audit-tested", prove_tested(given.tested, names, count, given.minutes))
        return
    if given.draw is not None:
        pins = read_pins() + draw(given.draw, count)
        _write_pins(pins)
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
