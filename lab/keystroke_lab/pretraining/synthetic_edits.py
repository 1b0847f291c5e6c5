"""Synthetic edits of ordinary files: one change carried through a text.

The texts before and after are both plausible, and each hunk can be predicted from the others: a name changed,
an argument given to every call, a parameter dropped with its arguments, an import and its uses, a line
repeated in every similar place. The same file and random generator give the same edit.
"""

from __future__ import annotations

import keyword
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from keystroke_lab.corpus.hunks import EditHunk
from keystroke_lab.corpus.trajectories import FileEdit

LINES = (24, 140)  # of the file that is looked at: an edit's places are near each other
PLACES = (2, 9)  # lines that change
_APART = 3000  # characters of a file for each edit
_MOST = 12
_WORD = re.compile(r"[A-Za-z_]\w{2,}")
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_DOTTED = re.compile(r"(?<![\w.])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.([A-Za-z_]\w{2,})\b")
_ARGUMENT = re.compile(r",\s*([a-z_]\w*)\s*=\s*(?:[\w.\"'-]+|\w+\([\w.\"']*\))(?=\s*[,)])")
_PARAMETER = r",\s*{}\b(?:\s*:\s*[\w.\[\] |\"']+)?(?:\s*=\s*[\w.\"'-]+)?(?=\s*[,)])"
_TOO_COMMON = frozenset(keyword.kwlist) | frozenset(
    ["self", "cls", "str", "int", "len", "list", "dict", "bool", "float", "print", "args", "kwargs"]
)

Lines = list[str]
GAP = "\0"  # in place of a line that is not there


def synthetic_edits(project: str, path: str, text: str, rng: random.Random) -> Iterator[FileEdit]:
    """As many as the length of `text` is worth."""
    for _ in range(min(_MOST, 1 + len(text) // _APART)):
        edit = synthetic_edit(project, path, text, rng)
        if edit is not None:
            yield edit


def synthetic_edit(project: str, path: str, text: str, rng: random.Random) -> FileEdit | None:
    """A change of a part of `text`; None where the way drawn does not lead to one."""
    lines = text.split("\n")
    size = rng.randint(*LINES)
    first = rng.randrange(max(1, len(lines) - size))
    lines = lines[first : first + size]
    other = rng.choice(_WAYS)(lines, rng)
    if other is None:
        return None
    before, after = (other, lines) if rng.random() < 0.6 else (lines, other)
    hunks = _hunks(before, after)
    if not PLACES[0] <= len(hunks) <= PLACES[1]:
        return None
    return FileEdit(project, "", "", "", path, "\n".join(_flat(before)), hunks)


def _hunks(before: Lines, after: Lines) -> list[EditHunk]:
    """The hunks between two texts of as many lines, gaps counted."""
    hunks: list[EditHunk] = []
    at, joined = 0, False
    for old, new in zip(before, after, strict=True):
        was = [] if old == GAP else [old]
        if old != new:
            became = [] if new == GAP else [new]
            if joined:
                hunks[-1].old.extend(was)
                hunks[-1].new.extend(became)
            else:
                hunks.append(EditHunk(at, was, became))
        if old != GAP or new != GAP:
            joined = old != new
        at += len(was)
    return hunks


def _flat(lines: Lines) -> Lines:
    return [line for line in lines if line != GAP]


def _each(lines: Lines, change: Callable[[str], str]) -> Lines | None:
    """Every line changed in the same way; None where too few or too many lines are."""
    found = [change(line) for line in lines]
    changed = sum(a != b for a, b in zip(lines, found, strict=True))
    return found if PLACES[0] <= changed <= 2 * PLACES[1] else None


def _renamed(lines: Lines, rng: random.Random) -> Lines | None:
    """A name has another spelling wherever it stands."""
    where: dict[str, int] = Counter(w for line in lines for w in set(_WORD.findall(line)))
    names = [w for w, n in sorted(where.items()) if PLACES[0] <= n <= PLACES[1] and w not in _TOO_COMMON]
    if not names:
        return None
    name = rng.choice(names)
    other = _spelled_otherwise(name, sorted(where), rng)
    if other in where or other in _TOO_COMMON or not other.isidentifier():
        return None
    pattern = re.compile(rf"\b{re.escape(name)}\b")
    return _each(lines, lambda line: pattern.sub(other, line))


def _spelled_otherwise(name: str, words: Sequence[str], rng: random.Random) -> str:
    """A name with a part of it changed, added or left out, or another one altogether."""
    parts = _PART.findall(name)
    strange = [p for p in _PART.findall(rng.choice(words)) if len(p) > 2]
    if not parts or not strange:
        return f"{name}_"
    part = rng.choice(strange)
    at, drawn = rng.randrange(len(parts)), rng.random()
    if drawn < 0.35 or len(parts) == 1:
        new = [*parts[:at], part, *parts[at + 1 :]] if rng.random() < 0.5 else [*parts, part]
    elif drawn < 0.6:
        new = [*parts[:at], *parts[at + 1 :]]
    elif drawn < 0.85:
        new = [*parts[: at + 1], part, *parts[at + 1 :]]
    else:
        return f"_{name}" if not name.startswith("_") else name.lstrip("_")
    lead = name[: len(name) - len(name.lstrip("_"))]
    if "_" in name.strip("_") or name.islower():
        return lead + "_".join(p.lower() for p in new)
    if name.isupper():
        return lead + "_".join(p.upper() for p in new)
    joined = "".join(p[:1].upper() + p[1:] for p in new)
    return lead + (joined if name[:1].isupper() else joined[:1].lower() + joined[1:])


def _qualified(lines: Lines, rng: random.Random) -> Lines | None:
    """What is reached through a module or an object is reached directly, or through another."""
    code = [line for line in lines if not line.lstrip().startswith(("import ", "from "))]
    where: dict[tuple[str, str], int] = Counter((m[1], m[2]) for line in code for m in _DOTTED.finditer(line))
    chains = [pair for pair, n in sorted(where.items()) if PLACES[0] <= n <= PLACES[1]]
    if not chains:
        return None
    owner, name = rng.choice(chains)
    drawn = rng.random()
    other = name if drawn < 0.4 else f"{owner}.{rng.choice(chains)[1]}" if drawn < 0.7 else f"{owner}._{name}"
    if other == f"{owner}.{name}":
        return None
    pattern = re.compile(rf"(?<![\w.]){re.escape(owner)}\.{re.escape(name)}\b")
    return _each(lines, lambda line: pattern.sub(other, line))


def _argument(lines: Lines, rng: random.Random) -> Lines | None:
    """An argument that several calls are given, and its parameter, are not there."""
    where: dict[str, int] = Counter(m[1] for line in lines for m in _ARGUMENT.finditer(line))
    names = [name for name, n in sorted(where.items()) if 1 <= n <= PLACES[1]]
    if not names:
        return None
    name = rng.choice(names)
    given = re.compile(rf",\s*{name}\s*=\s*(?:[\w.\"'-]+|\w+\([\w.\"']*\))(?=\s*[,)])")
    taken = re.compile(_PARAMETER.format(name))

    def without(line: str) -> str:
        return (taken if line.lstrip().startswith(("def ", "async def ")) else given).sub("", line)

    return _each(lines, without)


def _calls(line: str, name: str) -> list[tuple[int, int]]:
    """Where the brackets of calls (or the definition) of `name` open and close, if on this line."""
    found = []
    for match in re.finditer(rf"(?<![\w]){re.escape(name)}\(", line):
        depth = 0
        for at in range(match.end() - 1, len(line)):
            depth += (line[at] in "([{") - (line[at] in ")]}")
            if not depth:
                found.append((match.end() - 1, at))
                break
    return found


def _listed(inside: str) -> list[str]:
    """What stands between the commas of a bracket, brackets within it kept whole."""
    parts, depth, begun = [], 0, 0
    for at, sign in enumerate(inside):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            parts.append(inside[begun:at])
            begun = at + 1
    return [*parts, inside[begun:]] if inside.strip() else []


def _called(lines: Lines) -> list[str]:
    """Names that are called on some of the lines, whole calls only."""
    where: dict[str, int] = Counter(
        name
        for line in lines
        for name in set(re.findall(r"(?<![\w])([A-Za-z_]\w{2,})\(", line))
        if _calls(line, name)
    )
    return [
        name for name, n in sorted(where.items()) if PLACES[0] <= n <= PLACES[1] and name not in _TOO_COMMON
    ]


def _signature(lines: Lines, rng: random.Random) -> Lines | None:
    """A function's last parameter is not there, and no call gives it."""
    defined = [m[1] for line in lines if (m := re.match(r"\s*(?:async )?def (\w{3,})\(", line))]
    names = [name for name in _called(lines) if name in defined]
    if not names:
        return None
    name = rng.choice(names)
    head = next(line for line in lines if re.match(rf"\s*(?:async )?def {name}\(", line))
    if not (spans := _calls(head, name)):
        return None
    taken = [part.strip() for part in _listed(head[spans[0][0] + 1 : spans[0][1]])]
    own = taken[:1] in (["self"], ["cls"])
    if len(taken) < 2 + own or taken[-1].startswith("*"):
        return None

    def without(line: str) -> str:
        for first, last in reversed(_calls(line, name)):
            given = _listed(line[first + 1 : last])
            if len(given) == len(taken) - (own and line != head):
                line = line[: first + 1] + ",".join(given[:-1]) + line[last:]
        return line

    return _each(lines, without)


def _given(lines: Lines, rng: random.Random) -> Lines | None:
    """Every call of a function is given one more argument by its name."""
    names = [name for name in _called(lines) if not any(f"def {name}(" in line for line in lines)]
    words = sorted({w for line in lines for w in _WORD.findall(line) if w.islower()} - _TOO_COMMON)
    if not names or not words:
        return None
    name, word = rng.choice(names), rng.choice(words)
    more = f"{word}={rng.choice(('True', 'False', 'None', word, '0', 'self.' + word))}"

    def with_it(line: str) -> str:
        for first, last in reversed(_calls(line, name)):
            rest = line[first + 1 : last].rstrip().rstrip(",")
            line = f"{line[: first + 1]}{rest}{', ' if rest else ''}{more}{line[last:]}"
        return line

    return _each(lines, with_it)


def _imported(lines: Lines, rng: random.Random) -> Lines | None:
    """What is reached through a module is imported by its own name."""
    modules = [m[1] for line in lines if (m := re.fullmatch(r"import ([A-Za-z_]\w+)", line))]
    for module in rng.sample(modules, len(modules)):
        reached = re.compile(rf"(?<![\w.\"']){module}\.([A-Za-z_]\w*)")
        names = sorted({m[1] for line in lines for m in reached.finditer(line)})
        words = {w for line in lines for w in _WORD.findall(reached.sub("", line))}
        if 1 <= len(names) <= 3 and words.isdisjoint(names):
            whole = f"from {module} import {', '.join(names)}"
            return _each(
                lines,
                lambda line, m=module, r=reached, w=whole: w if line == f"import {m}" else r.sub(r"\1", line),  # type: ignore[misc]
            )
    return None


def _repeated(lines: Lines, rng: random.Random) -> Lines | None:
    """A line that stands in several places is not there."""
    where: dict[str, list[int]] = defaultdict(list)
    for i, line in enumerate(lines):
        if len(line.strip()) >= 10 and not line.rstrip().endswith((":", "(", "[", "{", '"""')):
            where[_shape(line)].append(i)
    groups = [at for _, at in sorted(where.items()) if PLACES[0] <= len(at) <= PLACES[1]]
    if not groups:
        return None
    gone = set(rng.choice(groups))
    return [GAP if i in gone else line for i, line in enumerate(lines)]


def _shape(line: str) -> str:
    """Lines that differ in one name or number are one line, said again for another thing."""
    return re.sub(r"\d+|(?<=[(\"'])\w+(?=[)\"'])", "#", line.strip())


_WAYS: tuple[Callable[[Lines, random.Random], Lines | None], ...] = (
    _renamed,
    _renamed,
    _qualified,
    _argument,
    _signature,
    _given,
    _imported,
    _repeated,
)
