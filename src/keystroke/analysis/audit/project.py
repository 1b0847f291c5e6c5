"""What a project says about itself: versions, tests, words, macros of its headers.

Read lazily from the project's folder. Nothing is imported or run.
"""

from __future__ import annotations

import json
import re
import tomllib
from functools import cached_property
from pathlib import Path

from keystroke.analysis.project_files import project_files
from keystroke.analysis.rules.settings_file import read_settings

MAX_FILE = 1_000_000  # bytes; a larger file is data
_READ = frozenset({".py", ".pyi", ".js", ".cjs", ".mjs", ".ts", ".tsx", ".jsx", ".yaml", ".yml", ".cfg"})
_SETTINGS = ("pyproject.toml", "setup.py", "setup.cfg")
_MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", "package.json", "go.mod", "pom.xml", ".git")
_VERSION = re.compile(r"(>=|==|~=|>|\^|~)\s*(\d+)(?:\.(\d+))?")
# Functions that a test replaces: mock.patch("a.b.get"), monkeypatch.setattr(a, "get", ...), spyOn(a, "get").
_REPLACED = re.compile(
    r"""(?:\bpatch(?:\.object|\.dict)?|\bsetattr|\bspyOn|\bstub)\(\s*(?:[\w.()]+\s*,\s*)?["']([\w.]+)["']"""
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
# A macro that stands for one name or one number; others are no constant or need their arguments.
_PLAIN_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)(?![\w(])(.*)$", re.MULTILINE)
_NAME_OR_NUMBER = re.compile(r"\(?(\w+)\)?\s*(?:/\*.*|//.*)?")
MAX_HEADERS = 40  # read for one source file
_PYTHON_2_SYNTAX = re.compile(
    r"^[ \t]*(?:print[ \t]+[\"']|except[ \t]+[\w.]+[ \t]*,[ \t]*\w+[ \t]*:|raise[ \t]+\w+[ \t]*,[ \t]*[\"'])",
    re.MULTILINE,
)
_MOCKED_MODULE = re.compile(r"""jest\.mock\(\s*["'](?:node:)?([\w@/.-]+)["']""")


def project_root(path: Path) -> Path:
    """The project that a file or folder belongs to: the nearest parent that declares one, or its folder."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    for parent in (folder, *folder.parents):
        if any((parent / name).exists() for name in _MARKERS):
            return parent
    return folder


class ProjectFacts:
    """`root`: the folder of the project."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def python(self) -> tuple[int, int] | None:
        """The oldest Python version that the project declares to support."""
        declared = ""
        try:
            table = tomllib.loads(self._settings("pyproject.toml"))
            declared = str(table.get("project", {}).get("requires-python", ""))
            poetry = table.get("tool", {}).get("poetry", {}).get("dependencies", {})
            declared = declared or str(poetry.get("python", ""))
        except (ValueError, AttributeError):
            pass
        for name in () if declared else ("setup.cfg", "setup.py"):
            found = re.search(r"python_requires\s*=\s*[\"']?([^\"'\n]+)", self._settings(name))
            declared = found[1] if found is not None else declared
        return _oldest(declared)

    @cached_property
    def runs_on_python_2(self) -> bool:
        """Whether the project declares a Python before 3.6, or names Python 2 or is written for it."""
        if self.python is not None:
            return self.python < (3, 6)
        if any(path.suffix == ".py" and _PYTHON_2_SYNTAX.search(text) for path, text in self._texts):
            return True
        return any("Python :: 2" in self._settings(name) for name in _SETTINGS)

    @cached_property
    def node(self) -> int | None:
        """The oldest major version of Node.js that the project declares to support."""
        try:
            table = json.loads(self._settings("package.json"))
            oldest = _oldest(str(table.get("engines", {}).get("node", "")))
        except (ValueError, AttributeError):
            return None
        return oldest[0] if oldest is not None else None

    def _settings(self, name: str) -> str:
        return read_settings(self.root / name, self.root)

    @cached_property
    def _texts(self) -> list[tuple[Path, str]]:
        out: list[tuple[Path, str]] = []
        for path in project_files(self.root):
            try:
                if path.suffix.lower() not in _READ or path.stat().st_size > MAX_FILE:
                    continue
                out.append((path, path.read_text(encoding="utf-8", errors="replace")))
            except OSError:
                continue
        return out

    @cached_property
    def replaced(self) -> frozenset[str]:
        """The last names of functions, and the modules, that tests replace by others."""
        found: set[str] = set()
        for _, text in self._texts:
            if "patch" in text or "setattr" in text or "spyOn" in text or "stub" in text:
                found.update(name.rsplit(".", 1)[-1] for name in _REPLACED.findall(text))
            if "jest.mock" in text:
                found.update(_MOCKED_MODULE.findall(text))
        return frozenset(found)

    @cached_property
    def _headers(self) -> dict[str, list[Path]]:
        """The header files of the project by name."""
        out: dict[str, list[Path]] = {}
        for path in project_files(self.root):
            if path.suffix.lower() in (".h", ".hh", ".hpp"):
                out.setdefault(path.name, []).append(path)
        return out

    def macros(self, source: str) -> dict[str, str]:
        """The name or number that each macro of the headers stands for which a C text includes.

        Left out are macros that are defined twice in different ways.
        """
        found: dict[str, set[str]] = {}
        seen: set[str] = set()
        waiting = _INCLUDE.findall(source)
        while waiting and len(seen) < MAX_HEADERS:
            name = waiting.pop(0)
            if name in seen:
                continue
            seen.add(name)
            text = self._header(name)
            waiting += _INCLUDE.findall(text)
            for macro, value in _PLAIN_MACRO.findall(text):
                found.setdefault(macro, set()).add(value.strip())
        out: dict[str, str] = {}
        for macro, values in found.items():
            plain = _NAME_OR_NUMBER.fullmatch(values.pop()) if len(values) == 1 else None
            if plain is not None and plain[1] != macro:
                out[macro] = plain[1]
        return out

    def _header(self, name: str) -> str:
        """The text of the header that an #include names; "" if the project has none or several."""
        known = self._headers.get(name.rsplit("/", 1)[-1], [])
        fitting = [path for path in known if path.as_posix().endswith(f"/{name.lstrip('./')}")]
        if len(fitting) != 1:
            return ""
        try:
            if fitting[0].stat().st_size > MAX_FILE:
                return ""
            return fitting[0].read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def mentions(self, word: str) -> bool:
        """Whether any source or settings file of the project contains a text."""
        return any(word in text for _, text in self._texts)


def _oldest(declared: str) -> tuple[int, int] | None:
    versions = [(int(found[2]), int(found[3] or 0)) for found in _VERSION.finditer(declared)]
    return min(versions) if versions else None
