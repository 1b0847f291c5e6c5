"""Tests whether a model writes search/replace blocks well, with three tiny edits.

The result is cached by the model's name. What a model's card says takes precedence.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from keystroke.assist.edit.blocks import block_messages
from keystroke.assist.edit.operations import EditFailure
from keystroke.assist.edit.resolve import parse_answer, resolve
from keystroke.assist.edit.writer import Writer
from keystroke.replacing import replace_file

VERSION = 1  # of the tasks below; part of the cache key
_MOST = 3_000  # characters of an answer; a right one has a tenth of that
_MAX_CACHED = 200  # models

# Each: the files, the instruction, and what they must be afterwards.
_AREA = "def area(width, height):\n    return width {} height\n\n\ndef double(x):\n    return x * 2\n"
_COLORS = "const colors = [\n  'red',\n{}  'blue',\n];\n\nmodule.exports = {{ colors }};\n"
_LIMIT = "LIMIT = 10\nNAME = 'one'\n"
_MOST_OF = "from one import LIMIT\n\n\ndef most():\n    return LIMIT{}\n"
_TASKS: tuple[tuple[dict[str, str], str, dict[str, str]], ...] = (
    ({"area.py": _AREA.format("+")}, "area must multiply, not add", {"area.py": _AREA.format("*")}),
    (
        {"colors.js": _COLORS.format("")},
        "insert 'green' between red and blue",
        {"colors.js": _COLORS.format("  'green',\n")},
    ),
    (
        {"one.py": _LIMIT, "two.py": _MOST_OF.format("")},
        "most() in two.py should return LIMIT minus 1; LIMIT itself stays",
        {"one.py": _LIMIT, "two.py": _MOST_OF.format(" - 1")},
    ),
)


def writes_blocks(writer: Writer, name: str, cache: Path) -> bool:
    """Whether the model called `name` passes. The first call runs three small edits, later ones read `cache`.
    Raises what the writer raises."""
    file = cache / "probes.json"
    known = _read_cache(file)
    key = f"{VERSION}:{name}"
    if key not in known:
        known = {**_read_cache(file), key: all(_passes(writer, *task) for task in _TASKS)}
        _write_cache(file, dict(list(known.items())[-_MAX_CACHED:]))
    return known[key]


def _passes(writer: Writer, files: dict[str, str], instruction: str, wanted: dict[str, str]) -> bool:
    answer = ""
    for piece in writer.write(block_messages(files, instruction), None):
        answer += piece
        if len(answer) > _MOST:
            return False
    operations = parse_answer(answer, tuple(files))
    if isinstance(operations, EditFailure):
        return False
    found = resolve(operations, files.get)
    return not found.failures and {**files, **found.texts} == wanted


def _read_cache(file: Path) -> dict[str, bool]:
    try:
        known = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in known.items() if isinstance(v, bool)} if isinstance(known, dict) else {}


def _write_cache(file: Path, known: dict[str, bool]) -> None:
    """Save the results; a cache that cannot be written only costs another probe."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, f"{json.dumps(known)}\n".encode())
