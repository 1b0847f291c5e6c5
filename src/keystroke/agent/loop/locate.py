"""Finds the files and lines of a project that an instruction is about, without a model.

Uses paths and identifiers in the instruction, and locations and names in the output of a failing check. A
test that must pass shows the fault but is not changed. `assist/edit/choice` selects the lines within a file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from keystroke.agent.workspace import Overlay
from keystroke.analysis.failures.report import find_failures
from keystroke.analysis.failures.workspace_paths import workspace_path
from keystroke.analysis.outline import outline, walk_units
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import Region
from keystroke.assist.edit.choice import RegionChoice, choose_regions, regions_for
from keystroke.assist.edit.mentions import read_mentions
from keystroke.errors import KeystrokeError

_FILES = 400  # searched
_SIZE = 200_000  # characters searched in a file
_REGIONS = 3  # that words of a failure may name; more is chance
_NAMED, _DEFINED, _TRACED, _STEM, _USED = 12.0, 5.0, 4.0, 3.0, 0.5
_PATH = re.compile(r"[\w./-]+\.\w{1,8}\b")
_PASSING = re.compile(r"\b(?:pass(?:es|ing)?|green|succeeds?|fail(?:s|ed|ing|ures?)?)\b", re.IGNORECASE)
_TESTS_MEANT = re.compile(
    r"\b(?:add|write|create|extend|rename|delete|remove|change|update|rewrite|correct)\s+"
    r"(?:(?!so\b|that\b|until\b|to\b)\w+\s+){0,2}tests?\b",
    re.IGNORECASE,
)
_IMPORT = re.compile(r"^\s*(?:import|from|use|#include|mod)\b|\brequire\(|\bimport\(|\bfrom\s+['\"]")
_DEFINING = r"\b(?:def|class|function|func|fn|struct|interface|const|let|var)\s+"

_MOST_FILES = 2


def find_files(overlay: Overlay, instruction: str, output: str = "") -> list[str]:
    """The files an instruction is about, best first; empty where none matches."""
    names = overlay.files()
    scores: defaultdict[str, float] = defaultdict(float)
    mentioned = set(_PATH.findall(instruction))
    words = {m.text.rpartition(".")[2] for m in read_mentions(instruction) if m.code or len(m.text) > 3}
    lower = {word.lower() for word in words}
    for name in names:
        pure = PurePosixPath(name)
        if name in mentioned or pure.name in mentioned:
            scores[name] += _NAMED
        elif pure.stem.lower() in lower:
            scores[name] += _STEM
    failing = traced_lines(overlay, output)
    for name in failing:
        scores[name] += _TRACED / 4 if is_test(name) else _TRACED
    tests = [name for name in names if is_test(name) and (name in failing or scores[name] >= _NAMED)]
    if _PASSING.search(instruction) and not _TESTS_MEANT.search(instruction):
        tried = imported_sources(overlay, tests, names)
        for name in tried:
            scores[name] += _TRACED
        if tried:
            names = [name for name in names if name not in tests]
            scores = defaultdict(float, {name: scores[name] for name in names})
    defined = re.compile(rf"{_DEFINING}({'|'.join(map(re.escape, sorted(words)))})\b")
    for name in names[:_FILES] if words else ():
        if language_of(name) is None:
            continue
        text = read_text(overlay, name)[:_SIZE]
        found = {match[1] for match in defined.finditer(text)}
        used = len({word for word in words if word in text} - found)
        scores[name] += _DEFINED * len(found) * (0.3 if is_test(name) else 1.0) + _USED * min(used, 6)
    best = max(scores.values(), default=0.0)
    ranked = sorted((name for name in scores if scores[name] > 0), key=lambda name: (-scores[name], name))
    return [name for name in ranked if scores[name] >= max(1.5, 0.5 * best)][:_MOST_FILES]


def find_regions(overlay: Overlay, files: Sequence[str], instruction: str, output: str = "") -> RegionChoice:
    """The lines to rewrite. Locations in a failing check's output count as if the instruction named them;
    where nothing else decides, so do functions whose names occur in that output."""
    lines = traced_lines(overlay, output)
    texts = {name: read_text(overlay, name) for name in files}
    locations = [f'File "{name}", line {number}' for name in files for number in lines.get(name, ())[-2:]]
    choice = choose_regions(texts, "\n".join([instruction, *locations]))
    if choice.certain or not output:
        return choice
    words = set(re.findall(r"[A-Za-z_]\w*", output))
    regions: list[Region] = []
    for name, text in texts.items():
        units = walk_units(outline(text, language_of(name)))
        named = [unit for unit in units if not unit.members and unit.short in words]
        regions += regions_for(name, named, text)
    return RegionChoice(tuple(regions), True) if 0 < len(regions) <= _REGIONS else choice


def describe_region(region: Region, text: str) -> str:
    """A region in one line, for the user."""
    if region.end is None and region.start == 0:
        return region.path
    end = region.end if region.end is not None else text.count("\n") + 1
    header = next((line.strip() for line in text.split("\n")[region.start : end] if line.strip()), "")
    return f"{region.path}, lines {region.start + 1} to {end}: {header:.60}"


def traced_lines(overlay: Overlay, output: str) -> dict[str, list[int]]:
    """Files and lines of the workspace in a failing command's output, innermost last."""
    found: dict[str, list[int]] = {}
    root = overlay.workspace.root
    for failure in find_failures(output) if output else ():
        for frame in failure.frames:
            name = workspace_path(frame, root, Path(root))
            if name is not None:
                found.setdefault(name, []).append(frame.line)
    return found


def imported_sources(overlay: Overlay, tests: Sequence[str], names: Sequence[str]) -> list[str]:
    """The source files that tests import, by the names in their import lines."""
    lines = [line for test in tests for line in read_text(overlay, test).splitlines() if _IMPORT.search(line)]
    words = {word for line in lines for word in re.findall(r"\w+", line)}
    sources = [PurePosixPath(name) for name in names if not is_test(name) and language_of(name) is not None]
    modules = [str(path) for path in sources if path.stem in words]
    # A package itself only where none of its modules is named.
    return modules or [str(p) for p in sources if p.stem in ("__init__", "index") and p.parent.name in words]


def read_text(overlay: Overlay, name: str) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return overlay.read(name) or ""
    except KeystrokeError:
        return ""


def is_test(name: str) -> bool:
    pure = PurePosixPath(name)
    named = pure.name.startswith("test") or pure.stem.endswith(("_test", ".test", ".spec"))
    return named or "tests" in pure.parts
