"""Imports are acyclic: between packages, between subpackages, and between two files."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from keystroke import config

SOURCE = Path(__file__).parents[1] / "src" / "keystroke"

# The packages that each package may import. `clients/cli` assembles the program, so it may import any.
ALLOWED = {
    "errors": set(),
    "isolation": {"errors"},
    "replacing": set(),
    "config": {"errors", "replacing"},
    "text": {"errors"},
    "protocol": {"errors"},
    "analysis": {"errors", "text"},
    "engine": {"errors", "isolation", "replacing", "config", "text"},
    "assist": {"errors", "replacing", "config", "text", "engine", "analysis"},
    "agent": {"errors", "replacing", "config", "text", "engine", "analysis", "assist"},
    "gateway": {
        "errors",
        "isolation",
        "replacing",
        "config",
        "text",
        "protocol",
        "engine",
        "analysis",
        "assist",
        "agent",
    },
    "clients": {"errors", "replacing", "config", "text", "protocol"},
    "scale": {
        "errors",
        "replacing",
        "config",
        "text",
        "protocol",
        "engine",
        "analysis",
        "assist",
        "agent",
        "gateway",
    },
}
# A subpackage may import those before it in its line, never those after it. Modules of the package itself
# combine its subpackages, so they may import any.
ORDER = {
    ("gateway",): ("transport", "access", "record", "work", "tasks", "api", "live"),
    ("analysis",): ("rules", "audit", "check", "refactor", "failures"),
    ("analysis", "audit"): ("source", "flow", "rules", "memory", "fixes"),
    ("agent",): ("sandbox", "workspace", "tools", "attempts", "chat", "loop", "evaluation"),
    ("assist",): ("completion", "edit", "fix", "next_edit", "review", "tool_calls"),
}
APART = {("gateway", "api", "live"), ("analysis", "audit", "check")}  # must not import each other
BACKENDS = {*config.BACKENDS, "remote"}
FILES = sorted(SOURCE.rglob("*.py"))


def place(path: Path) -> tuple[str, ...]:
    """The module's parts; a package is its folder."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


MODULES = {place(path): path for path in FILES}


@cache
def imported(path: Path) -> frozenset[tuple[str, ...]]:
    """Every keystroke module a file imports, at the top or inside a function, as its parts."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(SOURCE)}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {tuple(name.split(".")[1:]) for name in names if name.split(".")[0] == "keystroke"}
    return frozenset(found)


def files_imported(path: Path) -> set[tuple[str, ...]]:
    """The modules among what a file imports: a name is looked up in the module that holds it."""
    return {target if target in MODULES else target[:-1] for target in imported(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    package = parts[0]
    if parts[:2] == ("clients", "cli") or package in ("__init__", "__main__"):
        return
    assert package in ALLOWED, f"{package} is a new package: add the packages that it may import to this test"
    for target in imported(path):
        if target and target[0] in ALLOWED and target[0] != package:
            assert target[0] in ALLOWED[package], f"{'/'.join(parts)} imports {'.'.join(target)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way_inside_a_package(path: Path) -> None:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    for package, order in ORDER.items():
        deep = len(package)
        if parts[:deep] != package or len(parts) <= deep + 1:
            continue
        mine = parts[deep]
        assert mine in order, f"{'/'.join(package)}/{mine} is new: add it to ORDER in this test"
        for target in imported(path):
            if target[:deep] != package or len(target) <= deep or target[deep] not in order:
                continue
            other = target[deep]
            assert order.index(other) <= order.index(mine), f"{'/'.join(parts)} imports {'.'.join(target)}"
            apart = (*package, *sorted((mine, other))) in APART
            assert not apart, f"{'/'.join(parts)} imports {'.'.join(target)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_product_never_imports_the_lab(path: Path) -> None:
    names = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not [name for name in names if name.partition(".")[0] in ("keystroke_lab", "bench")]


def test_no_two_files_import_each_other() -> None:
    known = {module: files_imported(path) for module, path in MODULES.items()}
    pairs = {
        tuple(sorted((".".join(one), ".".join(other))))
        for one, targets in known.items()
        for other in targets
        if other != one and one in known.get(other, ())
    }
    assert not pairs


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_backends_never_import_each_other(path: Path) -> None:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts[0] != "engine" or parts[1] not in BACKENDS:
        return
    for target in imported(path):
        if target[:1] == ("engine",) and len(target) > 1 and target[1] in BACKENDS:
            assert target[1] == parts[1], f"{'/'.join(parts)} imports {'.'.join(target)}"


def test_the_rule_covers_every_package() -> None:
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert packages <= set(ALLOWED)
