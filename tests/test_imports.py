"""The one-way rule, read from the imports themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "keystroke"
LEAVES = {"errors", "config", "text", "protocol"}

# What each room may open the door to. `clients/cli` is where the program is put together, so it may open any.
ALLOWED = {
    "errors": set(),
    "config": {"errors"},
    "text": {"errors"},
    "protocol": {"errors"},
    "engine": {"errors", "config", "text"},
    "assist": {"errors", "config", "text", "engine"},
    "agent": {"errors", "config", "text", "engine", "assist"},
    "gateway": {"errors", "config", "text", "protocol", "engine", "assist", "agent"},
    "clients": {"errors", "config", "text", "protocol"},
    "train": {"errors", "config", "text", "engine", "assist"},
}
BACKENDS = {"onnx", "cuda", "remote"}
FILES = sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[tuple[str, ...]]:
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
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    room = parts[0]
    if parts[:2] == ("clients", "cli") or room == "__init__":
        return
    assert room in ALLOWED, f"{room} is a new room: say in this test which rooms it may import"
    for target in imported(path):
        if target and target[0] in ALLOWED and target[0] != room:
            assert target[0] in ALLOWED[room], f"{'/'.join(parts)} imports {'.'.join(target)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_backends_never_import_each_other(path: Path) -> None:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if parts[0] != "engine" or parts[1] not in BACKENDS:
        return
    for target in imported(path):
        if target[:1] == ("engine",) and len(target) > 1 and target[1] in BACKENDS:
            assert target[1] == parts[1], f"{'/'.join(parts)} imports {'.'.join(target)}"


def test_the_rule_covers_every_room() -> None:
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert rooms <= set(ALLOWED)
    assert set(ALLOWED) >= LEAVES
