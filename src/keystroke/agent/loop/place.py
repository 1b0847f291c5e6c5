"""Which files of a project an instruction is about, and where in them.

Law: the program's choice, made before a model is asked, from names: paths and identifiers in the instruction,
and places in the output of a failing check. Which lines of a file are meant is the business of
`assist/edit/choice`; here the whole project is looked at.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from keystroke.agent.workspace import Overlay
from keystroke.analysis.failures.places import place
from keystroke.analysis.failures.report import failures
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import Region
from keystroke.assist.edit.choice import Choice, choose
from keystroke.assist.edit.mentions import read_mentions
from keystroke.errors import KeystrokeError

_FILES = 400  # that are looked into
_SIZE = 200_000  # characters of a file that is looked into
_NAMED, _DEFINED, _TRACED, _STEM, _USED = 12.0, 5.0, 4.0, 3.0, 0.5
_PATH = re.compile(r"[\w./-]+\.\w{1,8}\b")
_DEFINING = r"\b(?:def|class|function|func|fn|struct|interface|const|let|var)\s+"


def find_files(overlay: Overlay, instruction: str, output: str = "", most: int = 2) -> list[str]:
    """The files an instruction is about, best first; none where nothing answers to it."""
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
    for name in traced(overlay, output):
        # A test shows what is wrong; the source is where it is mended.
        scores[name] += _TRACED / 4 if is_test(name) else _TRACED
    defined = re.compile(rf"{_DEFINING}({'|'.join(map(re.escape, sorted(words)))})\b")
    for name in names[:_FILES] if words else ():
        if language_of(name) is None:
            continue
        text = text_of(overlay, name)
        found = {match[1] for match in defined.finditer(text)}
        used = len({word for word in words if word in text} - found)
        scores[name] += _DEFINED * len(found) * (0.3 if is_test(name) else 1.0) + _USED * min(used, 6)
    best = max(scores.values(), default=0.0)
    ranked = sorted((name for name in scores if scores[name] > 0), key=lambda name: (-scores[name], name))
    return [name for name in ranked if scores[name] >= max(1.5, 0.5 * best)][:most]


def find_regions(overlay: Overlay, files: Sequence[str], instruction: str, output: str = "") -> Choice:
    """The lines to rewrite. Places that a failing check names count as if the instruction named them."""
    lines = traced(overlay, output)
    said = [f'File "{name}", line {number}' for name in files for number in lines.get(name, ())[-2:]]
    return choose({name: text_of(overlay, name) for name in files}, "\n".join([instruction, *said]))


def about(region: Region, text: str) -> str:
    """How a region is spoken of."""
    if region.end is None and region.start == 0:
        return region.path
    end = region.end if region.end is not None else text.count("\n") + 1
    header = next((line.strip() for line in text.split("\n")[region.start : end] if line.strip()), "")
    return f"{region.path}, lines {region.start + 1} to {end}: {header:.60}"


def traced(overlay: Overlay, output: str) -> dict[str, list[int]]:
    """Files of the workspace and their lines that a failing command's output names, innermost last."""
    found: dict[str, list[int]] = {}
    root = overlay.workspace.root
    for failure in failures(output) if output else ():
        for frame in failure.frames:
            name = place(frame, root, Path(root))
            if name is not None:
                found.setdefault(name, []).append(frame.line)
    return found


def text_of(overlay: Overlay, name: str) -> str:
    """A file's text; empty where there is none to be read."""
    try:
        return (overlay.read(name) or "")[:_SIZE]
    except KeystrokeError:
        return ""


def is_test(name: str) -> bool:
    pure = PurePosixPath(name)
    named = pure.name.startswith("test") or pure.stem.endswith(("_test", ".test", ".spec"))
    return named or "tests" in pure.parts
