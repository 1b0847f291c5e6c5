"""Installs a project with what its tests need, and runs its tests in the sandbox without a network.

The installation runs outside, with `uv` where it is at hand and pip otherwise. What tests need is what the
project declares for them (extras, groups, environments of tox, hatch and nox, files of requirements), and the
modules and plugins that a run does not find. Compiled code is built again for every text that is tested.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import email
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from bench.project_archives import TESTS, ProjectPin
from keystroke.agent.sandbox import CommandLimits, Sandbox, SandboxPolicy
from keystroke.agent.sandbox.policy import OUTPUT_BYTES

# Of a free core; where others use the machine, a limit is as much longer as its work takes longer.
TEST_SECONDS = 40  # for one run of a project's tests
ONE_TEST_SECONDS = 15
INSTALL_SECONDS = 90  # for one step of the installation
MAX_SLOWDOWN = 20
_OWN_MINOR = sys.version_info[1]
_VENV = ".audit-venv"
_REPORT = ".audit-tests.xml"
_OUTPUT = ".audit-tests.txt"  # says what is missing where there is no report
_COVERAGE = ".audit-coverage"
_V8_COVERAGE = ".audit-v8-coverage"
_OWN_SETTINGS = "--rcfile=/dev/null"  # the project's may name other folders
# Old projects import pkg_resources, which later versions do not have.
_SETUPTOOLS = "setuptools<81"
_TEST_TOOLS = (
    "pytest>=8",
    "pytest-asyncio",
    "pytest-mock",
    "pytest-timeout",
    "coverage",
    _SETUPTOOLS,
    "wheel",
)
_NO_PATHS = {"CFLAGS": "-g0", "CXXFLAGS": "-g0"}  # so that the same text is compiled to the same bytes
_EXTRAS = "test,tests,testing,dev,develop,development,pytest,unittest,ci"
# A project's own options may name plugins that are not here; one broken module must not hide the others.
_PYTEST = (
    *("-q", "-p", "no:cacheprovider", "-o", "addopts=", "--continue-on-collection-errors"),
    f"--junitxml={_REPORT}",
    # They wait for servers that the sandbox does not reach, until no time is left for the others.
    *("--ignore-glob=*/integration/*", "--ignore-glob=*/e2e/*"),
)


class ProjectTests:
    """The tests of one unpacked release, and the environment that they run in."""

    def __init__(
        self, pin: ProjectPin, root: Path, sandbox: Sandbox, interpreter: str = sys.executable
    ) -> None:
        self.pin = pin
        self.root = root
        self.sandbox = sandbox
        self.interpreter = interpreter  # the Python that the environment is made with
        self.python = root / _VENV / "bin" / "python"
        self._script = pin.registry != "pypi"
        self._tried: set[str] = set()  # wheels of missing modules
        self.problem = ""  # what the last step of the installation that failed said

    def exist(self) -> bool:
        """Whether a test is written anywhere; folders of tests may hold nothing but data."""
        return self._script or any(
            TEST.search(path.read_text(encoding="utf-8", errors="replace"))
            for path in self.root.rglob("*.py")
            if _VENV not in path.parts and TESTS.search(path.relative_to(self.root).as_posix())
        )

    def install(self) -> bool:
        """Installs the project and what its tests need; False if they have no environment."""
        if self._script:
            install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
            return (self.root / "node_modules").is_dir() or self._quiet(install)
        place = self.root / _VENV
        if not (place / "ready").exists():
            shutil.rmtree(place, ignore_errors=True)
            if not self._make_environment(place):
                shutil.rmtree(place, ignore_errors=True)
                return False
            self._install_project()
            for name in _requirement_files(self.root):
                self._quiet([*self._pip(), "-r", name])
            self._install_each(sorted(declared_requirements(self.root)))
            self._quiet([*self._pip(), *_TEST_TOOLS])  # a pinned old pytest does not run with its plugins
            (place / "ready").touch()
        return True

    def remove(self) -> None:
        for name in (_VENV, "node_modules", _V8_COVERAGE) if self._script else (_VENV,):
            shutil.rmtree(self.root / name, ignore_errors=True)

    def passed(self, measured: list[str] | None = None, seconds: int = TEST_SECONDS) -> set[str]:
        """The tests that pass; `measured`: files whose lines are recorded."""
        report = self.root / _REPORT
        report.unlink(missing_ok=True)
        slow = slowdown()
        seconds = int(seconds * slow)
        if self._script:
            shutil.rmtree(self.root / _V8_COVERAGE, ignore_errors=True)
            command = ["npm", "test", "--silent"]
        else:
            traced: list[str] = []
            if measured:
                traced = ["-m", "coverage", "run", _OWN_SETTINGS, f"--data-file={_COVERAGE}"]
                traced.append(f"--include={','.join(measured)}")
            command = [str(self.python), *traced, "-m", "pytest", *_PYTEST, *self._own_options()]
            command += [f"--timeout={ONE_TEST_SECONDS * slow:.0f}", f"--session-timeout={seconds}"]
        limits = CommandLimits(seconds=seconds + 40)
        extra = {"NODE_V8_COVERAGE": str(self.root / _V8_COVERAGE)} if self._script else {}
        ended = self.sandbox.run(command, SandboxPolicy(self.root), limits, env=extra)
        (self.root / _OUTPUT).write_text(ended.output, encoding="utf-8", errors="replace")
        if self._script:
            if not self.lines_run():
                return set()
            # Of a long output the middle is missing.
            named = script_tests_passed(ended.output) if ended.printed <= OUTPUT_BYTES else set()
            return named | ({"npm test"} if ended.code == 0 else set())
        try:
            cases = ElementTree.fromstring(report.read_bytes()).iter("testcase")
        except (OSError, ElementTree.ParseError):
            return set()
        return {f"{case.get('classname')}.{case.get('name')}" for case in cases if not len(case)}

    def _own_options(self) -> Iterator[str]:
        """Options that the project does not give itself: other names of test files, settings of Django."""
        declared = ""
        for name in ("pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini"):
            with contextlib.suppress(OSError):
                declared += (self.root / name).read_text(encoding="utf-8", errors="replace")
        if "python_files" not in declared:
            yield from ("-o", "python_files=test*.py *_test.py *_tests.py")
        if "pytest-django" in self._tried and (settings := self.django_settings()):
            yield f"--ds={settings}"

    def django_settings(self) -> str:
        """The settings that the project names where its tests or programs start, or else those that it has
        for tests, or for an example."""
        files = [
            path.relative_to(self.root)
            for path in sorted(self.root.rglob("*settings*"))
            if _SETTINGS_FILE.fullmatch(path.name) and _VENV not in path.parts
        ]
        modules = [".".join(path.with_suffix("").parts).removeprefix("src.") for path in files]
        places = ("tox.ini", "runtests.py", "run_tests.py", "manage.py", "*/manage.py", "conftest.py")
        for path in (path for place in places for path in sorted(self.root.glob(place))):
            with contextlib.suppress(OSError):
                found = _SETTINGS.search(path.read_text(encoding="utf-8", errors="replace"))
                for module in modules if found else ():
                    if found and f".{module}".endswith(f".{found[1]}"):
                        return module
        return min(modules, key=lambda module: ("test" not in module, len(module)), default="")

    def lines_run(self) -> dict[str, set[int]]:
        """The lines that the last measured run executed, by file; of scripts only those of the project."""
        if self._script:
            return script_lines_run(self.root, self.root / _V8_COVERAGE)
        out = self.root / ".audit-coverage.json"
        report = [str(self.python), "-m", "coverage", "json", _OWN_SETTINGS, f"--data-file={_COVERAGE}"]
        if not self._quiet([*report, "-o", str(out)]):
            return {}
        files = json.loads(out.read_text(encoding="utf-8"))["files"]
        return {Path(name).as_posix(): set(entry["executed_lines"]) for name, entry in files.items()}

    def build(self) -> str:
        """Builds compiled code again and returns a digest of it; "" if that fails."""
        for path in self.root.rglob("*"):
            if is_compiled(path.name) and _VENV not in path.parts:
                path.touch()  # a header that changed is no reason for setuptools to build
        if not self._quiet([*self._pip("--reinstall"), "--no-deps", "-e", str(self.root)]):
            return ""
        digest = hashlib.sha256()
        places = [self.root, *(self.root / _VENV / "lib").glob("python*/site-packages")]
        for path in sorted(path for place in places for path in place.rglob("*.so")):
            if _VENV not in path.parts or path.parts[-2] == "site-packages":
                digest.update(path.read_bytes())
        return digest.hexdigest()

    def install_missing(self) -> bool:
        """Installs modules and plugins that the last run did not find; False if there are none.

        Only wheels: a guessed name must not run code of its own while it is installed.
        """
        told = ""
        for name in (_REPORT, _OUTPUT):
            with contextlib.suppress(OSError):
                told += (self.root / name).read_text(encoding="utf-8", errors="replace")
        told = told.replace("&apos;", "'").replace("&#x27;", "'")
        modules = {name for name in _MODULE.findall(told) if not (self.root / name).exists()}
        wheels = {_DISTRIBUTIONS.get(name, name.replace("_", "-")) for name in modules}
        wheels |= {_PLUGINS[name] for name in _FIXTURE.findall(told) if name in _PLUGINS}
        if "ImproperlyConfigured: Requested setting" in told or "AppRegistryNotReady" in told:
            wheels.add("pytest-django")
        missing = wheels - self._tried if not self._script else set()
        self._tried |= missing
        for wheel in sorted(missing)[:8]:
            self._quiet([*self._pip(), "--only-binary", ":all:", wheel])
        return bool(missing)

    def _make_environment(self, place: Path) -> bool:
        if _uv():
            made = self._quiet([_uv(), "venv", "-q", "--python", self.interpreter, str(place)])
        else:
            made = self._quiet([self.interpreter, "-m", "venv", str(place)])
        return made and self._quiet([*self._pip(), *_TEST_TOOLS])

    def _install_project(self) -> None:
        """Installs the project in place with what it requires, or, if that fails, as much of it as can be."""
        for what in (f"{self.root}[{_EXTRAS}]", str(self.root)):
            for old in (True, False):
                if self._quiet([*self._pip(), "-e", what], old):
                    return
        if not self._quiet([*self._pip(), "--no-deps", "-e", str(self.root)], True):
            for place in (self.root / _VENV / "lib").glob("python*/site-packages"):
                (place / "audit.pth").write_text(f"{self.root}\n{self.root / 'src'}\n", encoding="utf-8")
        self._install_each(sorted(required(self.root)))

    def _install_each(self, wanted: list[str]) -> None:
        """Installs all at once, or each on its own if one of them cannot be had."""
        if wanted and not self._quiet([*self._pip(), *wanted]):
            for one in wanted[:40]:
                self._quiet([*self._pip(), one])

    def _pip(self, *options: str) -> list[str]:
        if _uv():
            return [_uv(), "pip", "install", "-q", "--python", str(self.python), *options]
        again = ["--force-reinstall"] if "--reinstall" in options else []
        return [str(self.python), "-m", "pip", "install", "-q", "--prefer-binary", *again]

    def _quiet(self, command: list[str], old: bool = False) -> bool:
        """Whether a command succeeds; `old`: what it builds is built with a setuptools of old projects."""
        # Copies: what a test writes into its environment must not reach uv's cache.
        environment = os.environ | {"UV_LINK_MODE": "copy", "UV_NO_SOURCES": "1", "UV_NO_CONFIG": "1"}
        environment |= _NO_PATHS | {"UV_HTTP_TIMEOUT": "300"}
        if old:
            constraints = self.root / ".audit-constraints.txt"
            constraints.write_text(_SETUPTOOLS + "\n", encoding="utf-8")
            environment |= {"UV_BUILD_CONSTRAINT": str(constraints), "PIP_CONSTRAINT": str(constraints)}
        try:
            limit = INSTALL_SECONDS * slowdown()
            ended = subprocess.run(
                command, cwd=self.root, capture_output=True, timeout=limit, env=environment
            )
        except (subprocess.TimeoutExpired, OSError) as error:
            self.problem = type(error).__name__
            return False
        if ended.returncode:
            said = ended.stderr.decode("utf-8", "replace").strip().splitlines() or [""]
            self.problem = said[-1].strip()[:160]
        return ended.returncode == 0


def script_tests_passed(output: str) -> set[str]:
    """The tests that Node.js, mocha, tape or tap say have passed; one that failed elsewhere is left out."""
    told = re.sub(r"\x1b\[[0-9;]*m", "", output)
    return {name for name in _PASSED.findall(told) if name not in _FAILED.findall(told)}


def script_lines_run(root: Path, reports: Path) -> dict[str, set[int]]:
    """The lines of a project's own scripts that ran, by the coverage that Node.js writes."""
    out: dict[str, set[int]] = {}
    for report in reports.glob("*.json"):
        try:
            scripts = json.loads(report.read_text(encoding="utf-8"))["result"]
        except (OSError, ValueError, KeyError):
            continue
        for script in scripts:
            path = Path(unquote(urlsplit(str(script.get("url", ""))).path))
            if not path.is_relative_to(root) or "node_modules" in path.parts or not path.is_file():
                continue
            lines = _lines_counted(path.read_bytes().decode("utf-8", "replace"), script["functions"])
            out.setdefault(path.relative_to(root).as_posix(), set()).update(lines)
    return {name: lines for name, lines in out.items() if lines}


def _lines_counted(text: str, functions: list[dict[str, Any]]) -> set[int]:
    """The numbers of the lines that a range with a count begins in; inner ranges come behind outer ones."""
    ran = bytearray(len(text))
    for function in functions:
        for part in function["ranges"]:
            start, end = part["startOffset"], min(part["endOffset"], len(text))
            ran[start:end] = (b"\x01" if part["count"] else b"\x00") * max(end - start, 0)
    out: set[int] = set()
    at = 0
    for number, line in enumerate(text.split("\n"), 1):
        first = at + len(line) - len(line.lstrip())
        if line.strip() and ran[first]:
            out.add(number)
        at += len(line) + 1
    return out


def interpreters(root: Path) -> list[str]:
    """At most two Pythons for a project, by the versions that it declares: the running one where it fits and
    an old one, which old projects need, or else the nearest that fits."""
    declared = ""
    with contextlib.suppress(OSError):
        told = email.message_from_bytes((root / "PKG-INFO").read_bytes())
        declared = str(told.get("Requires-Python", ""))
    try:
        fits = SpecifierSet(declared)
    except InvalidSpecifier:
        fits = SpecifierSet()
    newer = () if fits.contains(f"3.{_OWN_MINOR}.99") else (_OWN_MINOR + 1, _OWN_MINOR + 2, _OWN_MINOR + 3)
    found: list[str] = []
    for minor in dict.fromkeys((_OWN_MINOR, *newer, 9, 8, 10)):
        path = sys.executable if minor == _OWN_MINOR else shutil.which(f"python3.{minor}")
        if path and fits.contains(f"3.{minor}.99"):
            found.append(path)
    return found[:2]


def slowdown() -> float:
    """How many times longer work takes now than on a free core, from 1 to 20; waits while it takes longer."""
    while True:
        wall, own = time.perf_counter(), time.thread_time()
        while (used := time.thread_time() - own) < 0.05:
            pass
        if (times := (time.perf_counter() - wall) / used) <= MAX_SLOWDOWN:
            return max(times, 1.0)
        time.sleep(5)


def _uv() -> str:
    return shutil.which("uv") or ""


_COMPILED_FROM = frozenset((".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".pyx"))


def is_compiled(path: str) -> bool:
    return Path(path).suffix in _COMPILED_FROM


_DURATION = r"(?:[ \t]+#[^\n]*|[ \t]+\([\d.,]+ ?m?s\))?[ \t]*$"
_PASSED = re.compile(r"(?m)^[ \t]*(?:[✔✓√]|ok \d+(?: -)?)[ \t]+(.+?)" + _DURATION)
_FAILED = re.compile(r"(?m)^[ \t]*(?:[✖✗×]|not ok \d+(?: -)?)[ \t]+(.+?)" + _DURATION)
TEST = re.compile(r"(?m)^\s*(?:async )?def test|^class \w*Test|>>> ")
_SETTINGS = re.compile(r"DJANGO_SETTINGS_MODULE\W{1,6}([A-Za-z_][\w.]*)")
_SETTINGS_FILE = re.compile(r"(?:tests?_?)?settings(?:_?tests?)?(?:\.py)?")
_MODULE = re.compile(r"No module named '([A-Za-z_]\w*)")
_FIXTURE = re.compile(r"fixture '(\w+)' not found")
_PLUGINS = dict.fromkeys(("db", "client", "rf", "settings", "django_user_model"), "pytest-django")
_PLUGINS |= {
    "httpx_mock": "pytest-httpx",
    "aiohttp_client": "pytest-aiohttp",
    "requests_mock": "requests-mock",
    "freezer": "pytest-freezer",
    "fs": "pyfakefs",
    "faker": "faker",
    "subtests": "pytest-subtests",
    "datadir": "pytest-datadir",
    "shared_datadir": "pytest-datadir",
}
_PLUGINS |= {"httpserver": "pytest-httpserver", "benchmark": "pytest-benchmark", "snapshot": "syrupy"}
_DISTRIBUTIONS = {"yaml": "pyyaml", "dateutil": "python-dateutil", "bs4": "beautifulsoup4", "PIL": "pillow"}
_DISTRIBUTIONS |= {"pkg_resources": _SETUPTOOLS, "sklearn": "scikit-learn", "jwt": "pyjwt"}
_DISTRIBUTIONS |= {"rest_framework": "djangorestframework", "django_filters": "django-filter"}
_DISTRIBUTIONS |= {"corsheaders": "django-cors-headers", "crispy_forms": "django-crispy-forms"}
_DISTRIBUTIONS |= {"OpenSSL": "pyopenssl", "Crypto": "pycryptodome", "serial": "pyserial", "zmq": "pyzmq"}
_DISTRIBUTIONS |= {"skimage": "scikit-image", "attr": "attrs", "opaque_keys": "edx-opaque-keys"}
_DISTRIBUTIONS |= {"cv2": "opencv-python-headless", "dotenv": "python-dotenv", "git": "gitpython"}


# What a project declares for its tests


_FOR_TESTS = re.compile(r"(?i)^(?:.*[-_.])?(?:tests?|testing|dev|develop|development|pytest|ci)(?:[-_.].*)?$")


def _requirement_files(root: Path) -> list[str]:
    """The files of requirements whose names speak of tests or development."""
    found = []
    for path in sorted((*root.glob("*.txt"), *root.glob("requirements/*.txt"), *root.glob("test*/*.txt"))):
        name = path.relative_to(root).as_posix()
        if "requirements" in name and _FOR_TESTS.match(name.removesuffix(".txt").replace("/", "-")):
            found.append(name)
    return found[:6]


def required(root: Path) -> set[str]:
    """The requirements of a project by the metadata of its release, without extras."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        told = email.message_from_bytes((root / "PKG-INFO").read_bytes())
        found.update(item for item in told.get_all("Requires-Dist", []) if "extra ==" not in item)
    for path in root.glob("*.egg-info/requires.txt"):
        found.update(path.read_text(encoding="utf-8").partition("[")[0].split("\n"))
    return {item.strip() for item in found if item.strip()}


def declared_requirements(root: Path) -> set[str]:
    """The requirements that a project declares for tests, without extras, which are installed with it."""
    found: set[str] = set()
    with contextlib.suppress(OSError, ValueError):
        found.update(_from_pyproject(tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))))
    for name in ("setup.cfg", "tox.ini"):
        settings = configparser.RawConfigParser(strict=False)
        with contextlib.suppress(configparser.Error, OSError, ValueError):
            settings.read(root / name, encoding="utf-8")
            for section in settings.sections():
                listed = settings.get(section, "tests_require", fallback="")
                if section.startswith("testenv"):
                    listed += "\n" + settings.get(section, "deps", fallback="")
                found.update(line.strip() for line in listed.splitlines())
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        for node in ast.walk(ast.parse((root / "setup.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "tests_require":
                with contextlib.suppress(ValueError, TypeError):
                    found.update(ast.literal_eval(node.value))
    # Conditions, variables and files of tox are left out.
    return {
        item
        for item in found
        if isinstance(item, str) and re.fullmatch(r"\w[\w.\-]*[^:{}$/]*", item) and item != "python"
    }


def _from_pyproject(table: dict[str, Any]) -> Iterator[str]:
    tools = table.get("tool", {})
    groups = table.get("dependency-groups", {}) | tools.get("pdm", {}).get("dev-dependencies", {})
    for name, items in groups.items():
        if _FOR_TESTS.match(name):
            yield from _group(groups, items)
    yield from tools.get("uv", {}).get("dev-dependencies", [])
    for name, environment in tools.get("hatch", {}).get("envs", {}).items():
        if _FOR_TESTS.match(name) or name == "default":
            yield from environment.get("dependencies", [])
            yield from environment.get("extra-dependencies", [])
    poetry = tools.get("poetry", {})
    yield from poetry.get("dev-dependencies", {})
    for name, group in poetry.get("group", {}).items():
        if _FOR_TESTS.match(name):
            yield from group.get("dependencies", {})


def _group(groups: dict[str, Any], items: list[Any]) -> Iterator[str]:
    for item in items:
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict) and item.get("include-group") in groups:
            yield from (one for one in groups[item["include-group"]] if isinstance(one, str))
