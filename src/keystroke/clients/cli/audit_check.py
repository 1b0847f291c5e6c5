"""Runs a project's own checks around the fixes of the audit and keeps only fixes after which they still pass.

A check that fails before any fix says nothing and is left out. All fixes are tried together first; if a check
fails then, each fix is tried alone on top of those kept so far. An interrupted run restores the files.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from keystroke.analysis.audit.report import AuditedFile, apply_fixes
from keystroke.clients.cli.command_runner import run_captured
from keystroke.errors import InputError

AUTO = "auto"  # the value of --check that stands for the checks of the project


def project_checks(root: Path) -> list[list[str]]:
    """The type checker, compiler and tests of a project that are at hand, in this order."""
    return [*_python_checks(root), *_javascript_checks(root), *_compiler_checks(root)]


def _tool(name: str, root: Path, *folders: str) -> str | None:
    inside = (root / folder / name for folder in folders)
    return next((str(path) for path in inside if path.is_file()), None) or shutil.which(name)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _python_checks(root: Path) -> Iterator[list[str]]:
    places = (".venv/bin", "venv/bin")
    settings = "".join(_read(root / name) for name in ("pyproject.toml", "setup.cfg", "mypy.ini"))
    mypy = _tool("mypy", root, *places)
    if mypy and re.search(r"(?m)^\[(?:tool\.)?mypy\]", settings):
        yield [mypy] if re.search(r"(?m)^(?:files|packages)\s*=", settings) else [mypy, "."]
    pytest = _tool("pytest", root, *places)
    if pytest and any(next(root.glob(shape), None) for shape in ("test*/**/test_*.py", "test_*.py")):
        yield [pytest, "-q", "-x"]


def _javascript_checks(root: Path) -> Iterator[list[str]]:
    try:
        package = json.loads(_read(root / "package.json") or "{}")
        test = str(package.get("scripts", {}).get("test", ""))
    except (ValueError, AttributeError):
        return
    compiler = _tool("tsc", root, "node_modules/.bin")
    if compiler and (root / "tsconfig.json").is_file():
        yield [compiler, "--noEmit"]
    if test and "no test specified" not in test and shutil.which("npm"):
        yield ["npm", "test", "--silent"]


def _compiler_checks(root: Path) -> Iterator[list[str]]:
    if (root / "go.mod").is_file() and shutil.which("go"):
        yield from (["go", "vet", "./..."], ["go", "test", "./..."])
    if (root / "gradlew").is_file():
        yield ["./gradlew", "--offline", "--quiet", "test"]
    elif (root / "pom.xml").is_file() and shutil.which("mvn"):
        yield ["mvn", "--offline", "--quiet", "test"]
    targets = re.findall(r"(?m)^(all|check|test)\s*:", _read(root / "Makefile"))
    if targets and shutil.which("make"):
        yield from (["make", name] for name in ("all", "check", "test") if name in targets)


class FixCheck:
    """Tries fixes with the commands that pass before them; InputError if there is none.

    `note` is told what runs and what is left out; `write` stores the text of a file.
    """

    def __init__(
        self,
        command: str,
        root: Path,
        seconds: float,
        note: Callable[[str], None],
        write: Callable[[AuditedFile, str, str], None],
    ) -> None:
        self._root = root
        self._seconds = seconds
        self._note = note
        self._write = write
        known = project_checks(root) if command == AUTO else [command]
        if not known:
            raise InputError(f"{root} has no check that can be run here; name one with --check CMD")
        self._commands = [item for item in known if self._passes_before(item)]
        if not self._commands:
            raise InputError("the check fails before any fix, so it cannot judge fixes; nothing was written")

    def keep_passing(self, files: Sequence[AuditedFile]) -> list[AuditedFile]:
        """Write the fixes after which the checks pass; returns the files with only the fixed findings."""
        with self._restore_on_error(files):
            fixable = [file for file in files if apply_fixes(file)[1]]
            for file in fixable:
                self._write(file, file.text, apply_fixes(file)[0])
            if self._passes():
                return fixable
            for file in fixable:
                self._write(file, apply_fixes(file)[0], file.text)
            return [kept for kept in map(self._keep_passing_fixes, fixable) if kept.findings]

    def _keep_passing_fixes(self, file: AuditedFile) -> AuditedFile:
        kept, text = replace(file, findings=()), file.text
        for finding in file.findings:
            tried = replace(file, findings=(*kept.findings, finding))
            after = apply_fixes(tried)[0]
            if after == text:
                continue
            self._write(file, text, after)
            if self._passes():
                kept, text = tried, after
            else:
                self._write(file, after, text)
                line = file.line_and_column(finding.start)[0]
                self._note(f"{file.path}:{line}: {finding.rule} was not fixed: the check fails after it")
        return kept

    @contextmanager
    def _restore_on_error(self, files: Sequence[AuditedFile]) -> Iterator[None]:
        before = {file.path: Path(file.path).read_bytes() for file in files}
        try:
            yield
        except BaseException:
            for path, data in before.items():
                Path(path).write_bytes(data)
            raise

    def _passes_before(self, command: str | list[str]) -> bool:
        shown = command if isinstance(command, str) else shlex.join(command)
        self._note(f"running {shown}")
        if self._run(command):
            return True
        self._note(f"{shown} fails before any fix and is left out")
        return False

    def _passes(self) -> bool:
        return all(map(self._run, self._commands))

    def _run(self, command: str | list[str]) -> bool:
        return run_captured(command, self._root, self._seconds).code == 0
