"""Where an instruction is about: which files, and which lines of them.

Law: the program's choice, made before a model is asked, from names: paths and identifiers in the instruction,
and places in the output of a failing check. Pure but for reading files through the overlay.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from keystroke.agent.workspace import Overlay
from keystroke.analysis.failures.places import place
from keystroke.analysis.failures.report import failures
from keystroke.analysis.syntax import language_of, tree, walk
from keystroke.assist.edit import Region
from keystroke.errors import KeystrokeError

WHOLE = 80  # lines; a file that is not longer is rewritten whole
_FILES = 400  # that are looked into
_SIZE = 200_000  # characters of a file that is looked into
_NAMED, _DEFINED, _TRACED, _STEM, _USED = 12.0, 5.0, 4.0, 3.0, 0.5
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,}")
_PATH = re.compile(r"[\w./-]+\.\w{1,8}\b")
_DULL = frozenset(
    {
        "the", "and", "for", "not", "with", "from", "that", "this", "into", "should", "must", "have", "has",
        "was", "are", "its", "when", "then", "than", "all", "any", "only", "fix", "add", "make", "use",
        "change", "function", "method", "class", "file", "test", "tests", "line", "code", "return", "returns",
        "raise", "error", "none", "true", "false", "self", "value", "new", "old", "name", "type", "data",
        "list", "dict", "string", "int", "instead", "also", "does", "where", "which", "pass", "fail", "fails",
        "source", "still", "others", "these",
    }
)  # fmt: skip
_DEFINING = r"\b(?:def|class|function|func|fn|struct|interface|const|let|var)\s+"


@dataclass(frozen=True, slots=True)
class Found:
    """A region and what it is called when it is spoken of."""

    region: Region
    about: str


def find_files(overlay: Overlay, instruction: str, output: str = "", most: int = 2) -> list[str]:
    """The files an instruction is about, best first; none where nothing answers to it."""
    names = overlay.files()
    scores: defaultdict[str, float] = defaultdict(float)
    mentioned = set(_PATH.findall(instruction))
    words = {word for word in _WORD.findall(instruction) if word.lower() not in _DULL}
    for name in names:
        pure = PurePosixPath(name)
        if name in mentioned or pure.name in mentioned:
            scores[name] += _NAMED
        elif pure.stem.lower() in {word.lower() for word in words}:
            scores[name] += _STEM
    for name in _traced(overlay, output):
        # A test shows what is wrong; the source is where it is mended.
        scores[name] += _TRACED / 4 if _is_test(name) else _TRACED
    defined = re.compile(rf"{_DEFINING}({'|'.join(map(re.escape, words))})\b")
    for name in names[:_FILES]:
        if not words or language_of(name) is None:
            continue
        text = _text(overlay, name)
        found = {match[1] for match in defined.finditer(text)}
        used = len({word for word in words if word in text} - found)
        scores[name] += _DEFINED * len(found) * (0.3 if _is_test(name) else 1.0) + _USED * min(used, 6)
    best = max(scores.values(), default=0.0)
    ranked = sorted((name for name in scores if scores[name] > 0), key=lambda name: (-scores[name], name))
    return [name for name in ranked if scores[name] >= max(1.5, 0.5 * best)][:most]


def find_regions(overlay: Overlay, files: Sequence[str], instruction: str, output: str = "") -> list[Found]:
    """The lines to rewrite, best first: a whole small file, else the definitions that are named."""
    words = {word for word in _WORD.findall(instruction) if word.lower() not in _DULL}
    lines = _lines(overlay, output)
    result = []
    for name in files:
        text = _text(overlay, name)
        count = len(text.splitlines())
        if count <= WHOLE:
            result.append(Found(Region(name), name))
            continue
        units = list(_units(text, language_of(name)))
        hit = [unit for unit in units if unit[0].rpartition(".")[2] in words or unit[0] in words]
        hit += [unit for unit in units if any(unit[1] < line <= unit[2] for line in lines.get(name, ()))]
        small = sorted(set(hit), key=lambda unit: unit[2] - unit[1])
        for label, start, end in small[:2]:
            result.append(Found(Region(name, start, end), f"{label} in {name} (lines {start + 1} to {end})"))
        if not small:
            result.append(Found(Region(name), f"{name} ({count} lines)"))
    return result


def _units(text: str, language: str | None) -> Iterator[tuple[str, int, int]]:
    """Definitions: name, first line from 0, line after the last."""
    if language is None:
        return
    for node in walk(tree(text, language)):
        kind = node.kind()
        if not any(word in kind for word in ("function", "method", "class")) or "call" in kind:
            continue
        name = node.field("name")
        if name is not None:
            span = node.range()
            parent = node.parent()
            first = span.start.line
            if parent is not None and "decorated" in parent.kind():
                first = parent.range().start.line
            yield name.text(), first, span.end.line + 1


def _traced(overlay: Overlay, output: str) -> list[str]:
    return list(_lines(overlay, output))


def _lines(overlay: Overlay, output: str) -> dict[str, list[int]]:
    """Files of the workspace and their lines that a failing command's output names."""
    found: dict[str, list[int]] = {}
    root = overlay.workspace.root
    for failure in failures(output) if output else ():
        for frame in failure.frames:
            name = place(frame, root, Path(root))
            if name is not None:
                found.setdefault(name, []).append(frame.line)
    return found


def _text(overlay: Overlay, name: str) -> str:
    try:
        return (overlay.read(name) or "")[:_SIZE]
    except KeystrokeError:
        return ""


def _is_test(name: str) -> bool:
    pure = PurePosixPath(name)
    return (
        pure.name.startswith("test")
        or pure.stem.endswith(("_test", ".test", ".spec"))
        or "tests" in pure.parts
    )
