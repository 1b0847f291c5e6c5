"""Context from other files: the definitions that imports name, and recent edits.

Files are read through `read`. Pieces come in a stable order, so that the front of the prompt stays the same
while the user types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath

from keystroke.assist.completion.window import ContextFile

_IMPORTS = (
    re.compile(r"^\s*from\s+(?P<module>[\w.]+)\s+import\s+(?P<names>[^#\n]+)", re.MULTILINE),
    re.compile(r"^\s*import\s+(?P<names>[\w$*{}\s,]+?)\s+from\s+['\"](?P<module>[^'\"\n]+)", re.MULTILINE),
)
_NAME = re.compile(r"[A-Za-z_$][\w$]*")
_LINES = 12  # of one definition
_PIECES = 6
_HEAD = re.compile(
    r"^(?P<indent>[ \t]*)(?:async\s+def|def|class|(?:export\s+)?(?:default\s+)?(?:async\s+)?"
    r"(?:function|class|interface|type|const|enum))\s+(?P<name>[A-Za-z_$][\w$]*)",
    re.MULTILINE,
)
Read = Callable[[str], str | None]


def gather_context(
    text: str, path: str | None, read: Read, recent: Sequence[ContextFile] = ()
) -> list[ContextFile]:
    """Pieces for the front of the prompt. `read(path)` gives a file of the project, or None; `recent` are
    lines that were edited, as they are now."""
    found: list[ContextFile] = []
    seen: set[str] = set()
    for module, names in _find_imports(text):
        if len(found) == _PIECES:
            break
        for candidate in _candidate_paths(module, path):
            if candidate in seen or candidate == path:
                break
            source = read(candidate)
            if source is None:
                continue
            seen.add(candidate)
            pieces = _find_definitions(source, names)
            if pieces:
                found.append(ContextFile(candidate, "\n".join(pieces)))
            break
    found += [edit for edit in recent if edit.path not in seen and edit.path != path]
    return found[: _PIECES + 2]


def _find_imports(text: str) -> Iterable[tuple[str, list[str]]]:
    head = text[:20_000]
    matches = sorted((m for pattern in _IMPORTS for m in pattern.finditer(head)), key=lambda m: m.start())
    for match in matches:
        names = [n for n in _NAME.findall(match["names"]) if n not in ("as", "import", "type")]
        yield match["module"], names


def _candidate_paths(module: str, path: str | None) -> list[str]:
    """Possible paths of a module, relative to the project's root."""
    folder = PurePosixPath(path).parent if path else PurePosixPath()
    if module.startswith(("./", "../")):
        base = folder
        for part in PurePosixPath(module).parts:
            base = base.parent if part == ".." else base / part
        return [f"{base}{end}" for end in ("", ".ts", ".tsx", ".js", ".jsx", "/index.ts", "/index.js")]
    dots = len(module) - len(module.lstrip("."))
    inner = module.lstrip(".").replace(".", "/")
    if dots:
        base = folder
        for _ in range(dots - 1):
            base = base.parent
        roots = [str(base / inner) if inner else str(base)]
    else:
        roots = [inner, f"src/{inner}"]
    return [f"{root}{end}" for root in roots for end in (".py", "/__init__.py")]


def _find_definitions(source: str, names: list[str]) -> list[str]:
    wanted = set(names)
    pieces = []
    lines = source.split("\n")
    for match in _HEAD.finditer(source):
        if match["name"] not in wanted or match["indent"]:
            continue
        first = source.count("\n", 0, match.start())
        kept = [lines[first]]
        for line in lines[first + 1 : first + _LINES]:
            if line.strip() and not line.startswith((" ", "\t", ")", "]", "}")):
                break
            kept.append(line)
        pieces.append("\n".join(kept).rstrip())
    return pieces
