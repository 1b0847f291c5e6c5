"""Locates a failure in the project and looks for advice and fixes.

Nothing is run. A fix is checked as far as text allows: the file still parses and has no new error, and the
diagnostic behind the failure is gone if there is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from keystroke.analysis.check.candidates import declare_outside
from keystroke.analysis.check.check import check
from keystroke.analysis.check.diagnostic import Diagnostic, Fix, Level
from keystroke.analysis.check.knowledge import PACKAGES
from keystroke.analysis.check.modules import Project
from keystroke.analysis.check.scope import parse_source
from keystroke.analysis.failures.failure import Failure, Language, StackFrame
from keystroke.analysis.failures.runtime_fixes import runtime_fixes
from keystroke.analysis.failures.workspace_paths import workspace_path
from keystroke.analysis.project_files import python_files
from keystroke.text import apply_edits

_FILES = 400  # files that are searched for the definition of a method
_ELSEWHERE = ("unresolved-import", "unknown-import-name", "undefined-local")  # not on the failing line
ReadText = Callable[[str], str | None]  # the text of a workspace file, None if it cannot be read


@dataclass(frozen=True, slots=True)
class Repair:
    """A fix of one file. `checked`: how it was checked, "parse" or "check"; it was not run."""

    path: str
    fix: Fix
    checked: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure with its position in the project: `path` is relative to the workspace, `line` and `column`
    count from 1 (0: unknown), `code` is the text of that line."""

    failure: Failure
    path: str = ""
    line: int = 0
    advice: str = ""
    repairs: tuple[Repair, ...] = ()
    column: int = 0
    code: str = ""

    @property
    def title(self) -> str:
        message = f": {self.failure.message}" if self.failure.message else ""
        return f"{self.failure.kind}{message}"


def diagnose(failure: Failure, root: Path, cwd: Path, read_text: ReadText) -> Diagnosis:
    """Locate a failure in the workspace at `root` and look for fixes. `cwd` is where the program ran."""
    for frame in reversed(failure.frames):
        name = workspace_path(frame, root, cwd, search=failure.language is not Language.PYTHON)
        text = read_text(name) if name else None
        if name and text is not None:
            break
    else:
        return Diagnosis(failure, advice=_give_advice(failure))
    lines = text.splitlines()
    code = lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""
    if failure.language is not Language.PYTHON or failure.compiled:
        return Diagnosis(failure, name, frame.line, column=frame.column, code=code)
    project = Project(root)
    repairs: list[Repair] = []
    results: set[str] = set()  # two fixes may reach the same text by different edits
    for fix, checked in _checked_fixes(failure, frame, text, root / name, project):
        if (result := apply_edits(text, fix.edits)) not in results:
            results.add(result)
            repairs.append(Repair(name, fix, checked))
        if len(repairs) == 3:
            break
    repairs += _repairs_in_other_files(failure, root, cwd, read_text, project) if not repairs else []
    return Diagnosis(failure, name, frame.line, _give_advice(failure), tuple(repairs[:3]), frame.column, code)


def _checked_fixes(
    failure: Failure, frame: StackFrame, text: str, path: Path, project: Project
) -> Iterator[tuple[Fix, str]]:
    found = check(text, path, project=project, fixes=False)
    for diagnostic in _matching_diagnostics(failure, frame, text, found):
        complete = check(text, path, project=project)
        for item in complete:
            if (item.code, item.start) == (diagnostic.code, diagnostic.start):
                yield from ((fix, "check") for fix in item.fixes)
    source = parse_source(text)
    if source is None:
        return
    tried: Iterator[Fix] = runtime_fixes(failure, frame.line, source, project, path)
    if failure.kind == "UnboundLocalError" and (name := re.search(r"'(\w+)'", failure.message)):
        tried = declare_outside(source, name[1], frame.line)
    yield from ((fix, "parse") for fix in tried if _is_harmless(fix, text, path, project, found))


def _is_harmless(fix: Fix, text: str, path: Path, project: Project, before: tuple[Diagnostic, ...]) -> bool:
    """Whether the text parses with a fix and has no more errors than before."""
    after = check(apply_edits(text, fix.edits), path, project=project, fixes=False)
    worse = sum(item.level is Level.ERROR for item in after) > sum(i.level is Level.ERROR for i in before)
    return not worse and not any(item.code == "syntax-error" for item in after)


def _matching_diagnostics(
    failure: Failure, frame: StackFrame, text: str, found: tuple[Diagnostic, ...]
) -> Iterator[Diagnostic]:
    """The diagnostics that describe the failure."""
    names = set(re.findall(r"'([\w.]+)'", failure.message))
    for item in found:
        line = text.count("\n", 0, item.start) + 1
        if item.level is not Level.ERROR and item.code not in ("missing-self", "unknown-self-attribute"):
            continue
        if item.code == "syntax-error" and failure.kind in ("SyntaxError", "IndentationError", "TabError"):
            yield item
        elif item.subject and item.subject in names:
            if line == frame.line or item.code in _ELSEWHERE:
                yield item
        elif (
            item.code == "missing-self"
            and failure.kind == "TypeError"
            and f"{item.subject}()" in failure.message
        ):
            yield item


def _repairs_in_other_files(
    failure: Failure, root: Path, cwd: Path, read_text: ReadText, project: Project
) -> list[Repair]:
    """Fixes in other files: a missing `self` is fixed at the definition, not at the call."""
    wanted = re.search(r"([\w.]+)\(\) (?:takes|got|missing)", failure.message)
    if failure.kind != "TypeError" or wanted is None:
        return []
    for path in islice(python_files(root), _FILES):
        text = read_text(path)
        if text is None or wanted[1].rpartition(".")[2] not in text:
            continue
        for item in check(text, root / path, project=project):
            if item.code == "missing-self" and f"{item.subject}()" in failure.message:
                return [Repair(path, fix, "check") for fix in item.fixes]
    return []


def _give_advice(failure: Failure) -> str:
    """Advice for failures that no edit fixes."""
    message = failure.message
    if failure.kind == "ModuleNotFoundError" and (name := re.search(r"No module named '([\w.]+)'", message)):
        package = PACKAGES.get(name[1]) or PACKAGES.get(name[1].partition(".")[0])
        return f"if it is a package, install it: pip install {package or name[1].partition('.')[0]}"
    if failure.kind == "FileNotFoundError" and (path := re.search(r"'([^']+)'", message)):
        return f"nothing lies at {path[1]}; relative paths start at the folder the program runs in"
    if failure.kind == "RecursionError":
        return "a function calls itself without end; look for the call that should have stopped"
    return ""
