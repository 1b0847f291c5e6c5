"""The names that a module defines, found without importing it.

A project's code and its packages are parsed, never run; only modules that are compiled into the interpreter
are inspected at run time. None means that the names cannot be known, and callers then report nothing.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
import time
from functools import lru_cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from keystroke.analysis.syntax import parse_quietly

MAX_BYTES = 2 << 20
# Signs that a module defines names dynamically.
_DYNAMIC = ("__getattr__", "globals()", "_convert_", "global_enum", "vars()", "sys.modules[__name__]",
            "locals()[")  # fmt: skip
_STDLIB = Path(sysconfig.get_paths()["stdlib"])
FRESH = 1.0  # seconds for which the result of a search on disk is reused
_REMEMBERED = 5000
_SKIPPED = {"node_modules", "__pycache__", "site-packages", "build", "dist"}


class Project:
    """Finds modules of one project: in its folders, its environment and the standard library."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self.own = _own_folders(root) if root is not None else ()
        self.sites = _site_folders(root)
        self._found: dict[tuple[str, Path | None], tuple[float, Path | None]] = {}

    def find(self, module: str, origin: Path | None = None) -> Path | None:
        """The file or package folder of an absolute module name. `origin`: the importing file; a script's
        folder is searched first."""
        key, now = (module, origin.parent if origin is not None else None), time.monotonic()
        known = self._found.get(key)
        if known is None or now - known[0] > FRESH:
            if len(self._found) > _REMEMBERED:
                self._found.clear()
            known = self._found[key] = (now, self._search(module, origin))
        return known[1]

    def _search(self, module: str, origin: Path | None) -> Path | None:
        script = origin is not None and not (origin.parent / "__init__.py").exists()
        near = (origin.parent,) if script and origin is not None else ()
        for folder in (*near, *self.own, _STDLIB, *self.sites):
            if (found := _locate_module(folder, module.split("."))) is not None:
                return found
        return None

    def exists(self, module: str, origin: Path | None = None) -> bool:
        top = module.partition(".")[0]
        if top in sys.builtin_module_names or (
            top in sys.stdlib_module_names and (top == module or module in sys.modules)
        ):
            return True
        return self.find(module, origin) is not None

    def names(self, module: str, origin: Path | None = None) -> frozenset[str] | None:
        """All names of `module`, submodules included; None if they cannot be known."""
        if module in sys.builtin_module_names:
            return frozenset(dir(import_module(module)))
        found = self.find(module, origin)
        if found is not None and found.suffix not in ("", ".py", ".pyi") and _STDLIB in found.parents:
            # A compiled module of Python has no source; it is inspected if it is already loaded.
            loaded = sys.modules.get(module)
            return frozenset(dir(loaded)) if loaded is not None else None
        return None if found is None else self.names_of(found)

    def names_of(self, found: Path, depth: int = 0) -> frozenset[str] | None:
        file = found / "__init__.py" if found.is_dir() else found
        inside = _submodules(found) if found.is_dir() else frozenset()
        if not file.exists():
            return inside if found.is_dir() and depth == 0 and inside else None
        try:
            info = file.stat()
        except OSError:
            return None
        own = _source_names(file, info.st_mtime_ns, info.st_size)
        if own is None:
            return None
        names, stars = own
        for level, module in stars:
            if depth > 4:
                return None
            target = self.relative(file, level, module) if level else self.find(module)
            more = None if target is None else self.names_of(target, depth + 1)
            if more is None:
                return None
            names |= more
        return names | inside | _MODULE_NAMES

    def relative(self, origin: Path, level: int, module: str) -> Path | None:
        """The module that `from ..module import` means in the file `origin`."""
        folder = origin.parent
        for _ in range(level - 1):
            folder = folder.parent
        return _locate_module(folder, module.split(".")) if module else folder

    def importable_names(self) -> frozenset[str]:
        """The top-level modules that can be imported."""
        names = {name for name in sys.stdlib_module_names if not name.startswith("_")}
        for folder in (*self.own, *self.sites):
            names |= _submodules(folder)
        return frozenset(names)

    def own_module_names(self) -> frozenset[str]:
        """The top-level modules of the project's own code."""
        return frozenset().union(*map(_submodules, self.own)) if self.own else frozenset()


_MODULE_NAMES = frozenset({
    "__name__", "__doc__", "__file__", "__path__", "__spec__", "__loader__", "__package__", "__dict__",
    "__builtins__", "__annotations__", "__class__", "__cached__",
})  # fmt: skip


def _own_folders(root: Path) -> tuple[Path, ...]:
    return tuple(folder for folder in (root, root / "src", root / "lib") if folder.is_dir())


def _site_folders(root: Path | None) -> tuple[Path, ...]:
    """The package folders of the project's environment, or of this interpreter if it has none."""
    homes = [root / name for name in (".venv", "venv")] if root is not None else []
    homes += [Path(os.environ[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)]
    for home in homes:
        found = sorted(home.glob("lib/python3*/site-packages")) or sorted(home.glob("Lib/site-packages"))
        if found:
            return tuple(found)
    return tuple(Path(item) for item in sys.path if item.endswith(("site-packages", "dist-packages")))


def _locate_module(folder: Path, parts: list[str]) -> Path | None:
    for part in parts[:-1]:
        folder = folder / part
        if not folder.is_dir():
            return None
    package, last = folder / parts[-1], parts[-1]
    if (package / "__init__.py").is_file():
        return package
    for name in (f"{last}.py", f"{last}.pyi", *(f"{last}{suffix}" for suffix in EXTENSION_SUFFIXES)):
        if (folder / name).is_file():
            return folder / name
    if package.is_dir() and _submodules(package):
        return package  # a namespace package
    return None


def _submodules(folder: Path) -> frozenset[str]:
    try:
        stamp = folder.stat().st_mtime_ns
    except OSError:
        return frozenset()
    return _list_submodules(folder, stamp)


@lru_cache(maxsize=512)
def _list_submodules(folder: Path, _stamp: int) -> frozenset[str]:
    names = set()
    try:
        for entry in os.scandir(folder):
            name, _, kind = entry.name.partition(".")
            if not name.isidentifier() or name in _SKIPPED:
                continue
            if (
                kind in ("py", "pyi")
                or kind.endswith(("so", "pyd"))
                or (not kind and entry.is_dir() and any(Path(entry.path).glob("*.py")))
            ):
                names.add(name)
    except OSError:
        return frozenset()
    return frozenset(names - {"__init__", "__main__", "setup", "conftest"})


_Named = tuple[frozenset[str], tuple[tuple[int, str], ...]]


@lru_cache(maxsize=512)
def _source_names(file: Path, _stamp: int, size: int) -> _Named | None:
    """The top-level names of a source file, and the modules that it star-imports."""
    if file.suffix not in (".py", ".pyi") or size > MAX_BYTES:
        return None
    try:
        text = file.read_bytes().decode("utf-8-sig")
        tree = parse_quietly(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if _STDLIB in file.parents and (loaded := _loaded_names(file)):
        return loaded, ()
    if any(word in text for word in _DYNAMIC):
        return None
    names: set[str] = set()
    stars: list[tuple[int, str]] = []
    for node in executed_statements(tree):
        add_bound_names(node, names, stars)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Global):
            names.update(inner.names)
    return frozenset(names), tuple(stars)


def _loaded_names(file: Path) -> frozenset[str]:
    """The names of a standard library module that this process has already loaded."""
    name = ".".join(file.relative_to(_STDLIB).with_suffix("").parts).removesuffix(".__init__")
    module = sys.modules.get(name)
    return frozenset(dir(module)) if getattr(module, "__file__", None) == str(file) else frozenset()


def executed_statements(tree: ast.AST) -> list[ast.stmt]:
    """The statements of a module or class body, including those inside `if` and `try`."""
    out: list[ast.stmt] = []
    todo = [tree]
    while todo:
        node = todo.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            for child in getattr(node, name, None) or ():
                if isinstance(child, ast.stmt):
                    out.append(child)
                if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    todo.append(child)
    return out


def add_bound_names(node: ast.stmt, names: set[str], stars: list[tuple[int, str]] | None = None) -> None:
    """Add the names that one statement binds, without nested statements."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        names.add(node.name)
        return
    if isinstance(node, ast.Import):
        names.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if alias.name != "*":
                names.add(alias.asname or alias.name)
            elif stars is not None:
                stars.append((node.level, node.module or ""))
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
        elif (isinstance(child, ast.ExceptHandler) and child.name) or (
            isinstance(child, (ast.MatchAs, ast.MatchStar)) and child.name
        ):
            names.add(child.name)
