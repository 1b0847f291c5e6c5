"""`.editorconfig`: the properties that hold for one file.

Law: reads the files from the root of the project down; later sections and nearer files win. A line it cannot
read is skipped, as the format asks; nothing here raises for what a project contains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_LARGEST = 64 * 1024
_SECTION = re.compile(r"\[(?P<glob>.+)\]\s*")
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")


def properties(path: Path, root: Path | None = None) -> dict[str, str]:
    """What every `.editorconfig` above `path` says about it, nearest last."""
    found: dict[str, str] = {}
    for file in reversed(list(_files(path, root))):
        relative = path.relative_to(file.parent).as_posix()
        for glob, pairs in _sections(_read(file)):
            if _matches(glob, relative):
                found.update(pairs)
    return {key: value for key, value in found.items() if value != "unset"}


def _files(path: Path, root: Path | None) -> Iterator[Path]:
    for folder in path.parents:
        file = folder / ".editorconfig"
        if file.is_file():
            yield file
            head = _read(file).partition("[")[0]
            if re.search(r"^\s*root\s*=\s*true\s*$", head, re.MULTILINE | re.IGNORECASE):
                return
        if folder == root:
            return


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_LARGEST)
    except OSError:
        return ""


def _sections(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    glob: str | None = None
    pairs: dict[str, str] = {}
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        header = _SECTION.fullmatch(line)
        if header:
            if glob is not None:
                yield glob, pairs
            glob, pairs = header["glob"], {}
        elif "=" in line:
            key, _, value = line.partition("=")
            pairs[key.strip().lower()] = value.strip().lower()
    if glob is not None:
        yield glob, pairs


def _matches(glob: str, path: str) -> bool:
    pattern = _pattern(glob.lstrip("/"))
    try:
        compiled = re.compile(pattern)
    except re.error:
        return False
    target = path if "/" in glob.strip("/") or glob.startswith("/") else PurePosixPath(path).name
    return compiled.fullmatch(target) is not None


def _pattern(glob: str) -> str:
    """A glob of the format as a regular expression: `*`, `**`, `?`, `[...]`, `{a,b}`, `{1..9}`."""
    out, at, depth = "", 0, 0
    while at < len(glob):
        sign = glob[at]
        if glob.startswith("**", at):
            out, at = out + ".*", at + 1
        elif sign == "*":
            out += "[^/]*"
        elif sign == "?":
            out += "[^/]"
        elif sign == "[":
            end = glob.find("]", at + 1)
            if end < 0:
                out += r"\["
            else:
                inside = glob[at + 1 : end]
                negate = "^" if inside[:1] in ("!", "^") else ""
                out += f"[{negate}{re.escape(inside.lstrip('!^')).replace(chr(92) + '-', '-')}]"
                at = end
        elif sign == "{":
            end = glob.find("}", at)
            numbers = _RANGE.fullmatch(glob[at + 1 : end]) if end > 0 else None
            if numbers:
                low, high = sorted((int(numbers[1]), int(numbers[2])))
                span = range(low, min(high, low + 1000) + 1)
                out += "(?:" + "|".join(map(str, span)) + ")"
                at = end
            elif end > 0 and "," in glob[at:end]:
                out, depth = out + "(?:", depth + 1
            else:
                out += r"\{"
        elif sign == "}" and depth:
            out, depth = out + ")", depth - 1
        elif sign == "," and depth:
            out += "|"
        else:
            out += re.escape(sign)
        at += 1
    return out + ")" * depth
