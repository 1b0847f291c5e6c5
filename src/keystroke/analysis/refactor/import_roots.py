"""The folders from which a project's modules are imported, and uses of a name that a rename left behind."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from keystroke.analysis.project_files import python_files
from keystroke.analysis.syntax import try_parse

_CONVENTIONAL = ("src", "lib", "python", "source")


def import_roots(root: Path) -> list[str]:
    """Folders relative to `root` from which imports resolve, the deepest first: the parents of top-level
    packages, conventional and configured source folders."""
    found: dict[str, None] = {}
    for name in python_files(root):
        folder = PurePosixPath(name).parent
        while folder.parts and (root / folder / "__init__.py").exists():
            folder = folder.parent
        found.setdefault(folder.as_posix(), None)
        for part in (folder, *folder.parents):
            if part.name in _CONVENTIONAL:
                found.setdefault(part.as_posix(), None)
    for configured in _configured_roots(root):
        if (root / configured).is_dir():
            found.setdefault(PurePosixPath(configured).as_posix(), None)
    names = [name for name in found if name != "."]
    return sorted(names, key=lambda name: (-name.count("/"), name))


def _configured_roots(root: Path) -> list[str]:
    """Source folders that pyproject.toml names."""
    try:
        read: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8", "replace"))
    except (OSError, tomllib.TOMLDecodeError):
        return []
    tool = read.get("tool", {})
    setuptools = _as_table(tool, "setuptools")
    places: list[Any] = [
        *_as_table(setuptools, "package-dir").values(),
        *_as_list(_as_table(_as_table(setuptools, "packages"), "find").get("where")),
        *_as_list(_as_table(_as_table(tool, "pytest"), "ini_options").get("pythonpath")),
        *(
            item.get("from")
            for item in _as_list(_as_table(tool, "poetry").get("packages"))
            if isinstance(item, dict)
        ),
    ]
    return [place for place in places if isinstance(place, str) and place and ".." not in place]


def _as_table(outer: Any, key: str) -> dict[str, Any]:
    inner = outer.get(key) if isinstance(outer, dict) else None
    return inner if isinstance(inner, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def files_importing(
    paths: Iterable[str], home: str, old: str, text_of: Callable[[str], str], exports: set[str]
) -> list[str]:
    """Files that still import `old` from the module `home`, or from one of the modules `exports` that passed
    it on."""
    modules = {dotted_module(path) for path in (home, *exports)}
    return [path for path in paths if _imports_name(text_of(path), path, old, modules)]


def dotted_module(path: str) -> str:
    """The module of a file, from the project's folder."""
    pure = PurePosixPath(path)
    parts = pure.parent.parts if pure.name == "__init__.py" else pure.with_suffix("").parts
    return ".".join(parts)


def _imports_name(text: str, path: str, name: str, modules: set[str]) -> bool:
    tree = try_parse(text)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            source = _imported_module(node, path)
            # The folder from which it is imported may be any above it.
            if any(module == source or module.endswith(f".{source}") for module in modules):
                return True
    return False


def _imported_module(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    base = PurePosixPath(path).parent.parts
    parts = base[: len(base) - node.level + 1]
    return ".".join([*parts, *(node.module or "").split(".")]).rstrip(".")
